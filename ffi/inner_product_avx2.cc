// AVX2 with FMA: 12 of the 16 registers hold sums.
#define JAX_GGEMM_VECTOR_BYTES 32
#define JAX_GGEMM_TILE_ROWS 6
#define JAX_GGEMM_INNER_PRODUCT InnerProductAvx2
#include "inner_product_impl.h"
