// Arithmetic of the tensor cores.
#pragma once
#include <cstdint>
#include <vector>

namespace ptx {

// sums[m][n] += sum over k of a[k][m] * b[k][n], in float32: products of 16-bit, 8-bit and tf32 numbers are exact.
// What the hardware rounds within one instruction is not documented.
void MultiplyAdd(const float* a, int a_rows, const float* b, int b_rows, int k, int rows, int columns, float* sums);

// Exponents, floor(log2 |x|), of operands; those of subnormals count as `lowest`, zeros as less than any other.
void Exponents(const std::vector<float>& values, int lowest, std::vector<int32_t>& exponents);

// The same for 16-bit operands as an H200 does it, found by measurement and right bit for bit on all that was compared:
// within an instruction all products and the sum so far are cut off, towards zero, to multiples of 2^(e - 25), where e
// is the largest of their exponents; they are added exactly, and the sum is cut off to float32.
void MultiplyAddTruncating(const float* a, const int32_t* a_exponents, int a_rows, const float* b,
                           const int32_t* b_exponents, int b_rows, int k, int rows, int columns, float* sums);

}  // namespace ptx
