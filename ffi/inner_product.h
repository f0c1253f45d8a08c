// The single-threaded product of one block, for the instruction set of this machine.
#pragma once

#include <cstdint>

#include "dtype.h"

namespace jax_ggemm {

// A matrix in memory with any strides, counted in elements.
struct ConstMatrix {
  const void* data;
  DType dtype;
  int64_t row_stride;
  int64_t col_stride;

  JAX_GGEMM_INLINE ConstMatrix At(int64_t row, int64_t col) const {
    const auto offset = static_cast<int64_t>(ByteWidth(dtype)) * (row * row_stride + col * col_stride);
    return {static_cast<const char*>(data) + offset, dtype, row_stride, col_stride};
  }
  JAX_GGEMM_INLINE ConstMatrix Transposed() const { return {data, dtype, col_stride, row_stride}; }
};

// A result block with contiguous rows.
struct Matrix {
  void* data;
  DType dtype;
  int64_t row_stride;

  JAX_GGEMM_INLINE Matrix At(int64_t row, int64_t col) const {
    const auto offset = static_cast<int64_t>(ByteWidth(dtype)) * (row * row_stride + col);
    return {static_cast<char*>(data) + offset, dtype, row_stride};
  }
};

// One block: out[rows, cols] = lhs[rows, depth] * rhs[depth, cols] + bias[cols].
struct Block {
  int64_t rows;
  int64_t cols;
  int64_t depth;
  ConstMatrix lhs;
  ConstMatrix rhs;
  const void* bias;  // in the accumulation type, or null
  Matrix out;
};

// Sums are kept in double where `wide`, in float otherwise; the result is rounded once. A depth of 0 gives
// the bias, or zeros. Operands may have any of the element types, each its own.
void InnerProduct(const Block& block, bool wide);

}  // namespace jax_ggemm
