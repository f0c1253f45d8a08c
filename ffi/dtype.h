// The element types of the CPU handler and their conversions, free of XLA's headers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

// For functions in headers that are compiled for different instruction sets: the linker would keep one copy of a
// function that is not inlined, which need not be one that this machine can run.
#define JAX_GGEMM_INLINE inline __attribute__((always_inline))

namespace jax_ggemm {

enum class DType { kF32, kF64, kBF16, kF16 };

struct BF16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

JAX_GGEMM_INLINE size_t ByteWidth(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return 4;
    case DType::kF64:
      return 8;
    default:
      return 2;
  }
}

}  // namespace jax_ggemm
