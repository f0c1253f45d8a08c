// Conversions between element types, branch-free so that loops over them vectorise.
//
// Included by sources that are compiled for different instruction sets: everything has internal linkage, so
// that the linker cannot keep one version for all.
#pragma once

#include <cstdint>
#include <cstring>

#include "dtype.h"

namespace jax_ggemm {
namespace {

inline float FloatFromBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline uint32_t BitsFromFloat(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float Widen(float value) { return value; }
inline double Widen(double value) { return value; }
inline float Widen(BF16 value) { return FloatFromBits(uint32_t{value.bits} << 16); }

// Subnormal halves go through integers: XLA runs with denormals flushed to zero.
inline float Widen(F16 value) {
  const uint32_t sign = (uint32_t{value.bits} & 0x8000u) << 16;
  const uint32_t magnitude = value.bits & 0x7fffu;
  const uint32_t shifted = magnitude << 13;
  const uint32_t normal = shifted + (112u << 23);
  const uint32_t special = shifted | 0x7f800000u;
  const uint32_t subnormal = BitsFromFloat(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  const uint32_t bits = magnitude >= 0x7c00u ? special : magnitude >= 0x0400u ? normal : subnormal;
  return FloatFromBits(bits | sign);
}

// Round to nearest, ties to even; NaN stays NaN.
inline BF16 ToBF16(float value) {
  const uint32_t bits = BitsFromFloat(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t nan = (bits >> 16) | 0x0040u;
  return {static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded)};
}

inline F16 ToF16(float value) {
  const uint32_t bits = BitsFromFloat(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude - (112u << 23) + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
  // Below 2^-14: adding 2^23 * 2^-24 leaves the half's mantissa, rounded, in the low bits.
  const uint32_t subnormal = BitsFromFloat(FloatFromBits(magnitude) + 0.5f) - BitsFromFloat(0.5f);
  const uint32_t infinite = 0x7c00u;
  const uint32_t nan = 0x7e00u;
  const uint32_t half = magnitude > 0x7f800000u    ? nan
                        : magnitude >= 0x477ff000u ? infinite  // 65520, halfway to what 2^16 would be
                        : magnitude >= 0x38800000u ? normal    // 2^-14
                                                   : subnormal;
  return {static_cast<uint16_t>(half | sign)};
}

inline void Narrow(float value, float* out) { *out = value; }
inline void Narrow(double value, double* out) { *out = value; }
inline void Narrow(double value, float* out) { *out = static_cast<float>(value); }
inline void Narrow(float value, double* out) { *out = value; }
inline void Narrow(float value, BF16* out) { *out = ToBF16(value); }
inline void Narrow(float value, F16* out) { *out = ToF16(value); }
inline void Narrow(double value, BF16* out) { *out = ToBF16(static_cast<float>(value)); }
inline void Narrow(double value, F16* out) { *out = ToF16(static_cast<float>(value)); }

}  // namespace
}  // namespace jax_ggemm
