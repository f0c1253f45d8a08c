// AVX-512: 24 of the 32 registers hold sums.
#define JAX_GGEMM_VECTOR_BYTES 64
#define JAX_GGEMM_TILE_ROWS 12
#define JAX_GGEMM_INNER_PRODUCT InnerProductAvx512
#include "inner_product_impl.h"
