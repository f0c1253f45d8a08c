// Vectors of 16 bytes: SSE2 on x86-64, NEON on 64-bit Arm.
#define JAX_GGEMM_VECTOR_BYTES 16
#define JAX_GGEMM_TILE_ROWS 6
#define JAX_GGEMM_INNER_PRODUCT InnerProductBase
#include "inner_product_impl.h"
