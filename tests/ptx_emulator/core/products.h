// Arithmetic of the tensor cores.
#pragma once

namespace ptx {

// sums[m][n] += sum over k of a[k][m] * b[k][n], in float32: products of 16-bit, 8-bit and tf32 numbers are exact.
// What the hardware rounds within one instruction is not documented.
void MultiplyAdd(const float* a, int a_rows, const float* b, int b_rows, int k, int rows, int columns, float* sums);

}  // namespace ptx
