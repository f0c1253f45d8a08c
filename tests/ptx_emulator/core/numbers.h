// Conversions between number formats.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "program.h"

namespace ptx {

template <typename To, typename From>
To BitCast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// NVIDIA GPUs give one NaN, whatever went in: measured on an H200.
inline float Canonical(float value) { return value != value ? BitCast<float>(0x7fffffffu) : value; }

// .ftz: denormal numbers are zeros of their sign.
inline float Flush(float value) { return std::fabs(value) < 0x1p-126f ? std::copysign(0.0f, value) : value; }

// .sat: to [0, 1], a NaN to 0.
inline float Saturate(float value) { return !(value > 0) ? 0.0f : value < 1 ? value : 1.0f; }

inline uint32_t RoundToBf16(float value) {
  const uint32_t bits = BitCast<uint32_t>(value);
  if (std::isnan(value)) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// To a small float with `exponent` and `mantissa` bits, to nearest even, with subnormals; infinity where it is too
// large. The result has its sign at bit exponent + mantissa.
inline uint32_t RoundToSmall(float value, int exponent, int mantissa) {
  const uint32_t bits = BitCast<uint32_t>(value);
  const uint32_t sign = (bits >> 31) << (exponent + mantissa);
  const uint32_t infinity = ((1u << exponent) - 1) << mantissa;
  if (std::isnan(value)) return sign | infinity | ((1u << mantissa) - 1);
  const int bias = (1 << (exponent - 1)) - 1;
  const double magnitude = std::fabs(static_cast<double>(value));
  if (magnitude == 0) return sign;
  int e = 0;
  std::frexp(magnitude, &e);
  e -= 1;  // magnitude = 1.x * 2^e
  if (std::isinf(value)) return sign | infinity;
  const int lowest = 1 - bias;
  const int scale = (e < lowest ? lowest : e) - mantissa;
  const double steps = std::nearbyint(std::ldexp(magnitude, -scale));
  const uint64_t whole = static_cast<uint64_t>(steps);
  // Subnormals and the carry into the exponent come out of the same sum.
  uint64_t result = e < lowest ? whole : (static_cast<uint64_t>(e + bias) << mantissa) + (whole - (1ull << mantissa));
  if (result > infinity) result = infinity;
  return sign | static_cast<uint32_t>(result);
}

inline uint32_t RoundToF16(float value) {
  if (std::isnan(value)) return 0x7fff;
  return RoundToSmall(value, 5, 10);
}

// Saturating conversions to the 8-bit formats.
inline uint32_t RoundToE4m3(float value) {
  if (std::isnan(value)) return 0x7f;
  const uint32_t sign = BitCast<uint32_t>(value) >> 31 << 7;
  if (std::fabs(value) >= 448) return sign | 0x7e;
  // e4m3 has no infinity: its largest exponent holds numbers.
  const double magnitude = std::fabs(static_cast<double>(value));
  if (magnitude == 0) return sign;
  int e = 0;
  std::frexp(magnitude, &e);
  e -= 1;
  const int scale = (e < -6 ? -6 : e) - 3;
  const uint32_t whole = static_cast<uint32_t>(std::nearbyint(std::ldexp(magnitude, -scale)));
  const uint32_t result = e < -6 ? whole : (static_cast<uint32_t>(e + 7) << 3) + (whole - 8);
  return sign | (result > 0x7e ? 0x7e : result);
}

inline uint32_t RoundToE5m2(float value) {
  if (std::isnan(value)) return 0x7f;
  const uint32_t result = RoundToSmall(value, 5, 2);
  return (result & 0x7f) >= 0x7c ? (result & 0x80) | 0x7b : result;
}

inline float SmallToFloat(uint32_t bits, int exponent, int mantissa, bool has_infinity) {
  const uint32_t sign = bits >> (exponent + mantissa) & 1;
  const uint32_t e = bits >> mantissa & ((1u << exponent) - 1);
  const uint32_t m = bits & ((1u << mantissa) - 1);
  const int bias = (1 << (exponent - 1)) - 1;
  double value = 0;
  if (e == (1u << exponent) - 1 && has_infinity) {
    value = m == 0 ? INFINITY : NAN;
  } else if (e == (1u << exponent) - 1 && !has_infinity && m == (1u << mantissa) - 1) {
    value = NAN;
  } else if (e == 0) {
    value = std::ldexp(static_cast<double>(m), 1 - bias - mantissa);
  } else {
    value = std::ldexp(1.0 + static_cast<double>(m) / (1 << mantissa), static_cast<int>(e) - bias);
  }
  return static_cast<float>(sign ? -value : value);
}

inline const float* HalfTable() {
  static const std::vector<float>& table = *[] {
    auto* values = new std::vector<float>(65536);
    for (uint32_t i = 0; i < 65536; ++i) (*values)[i] = SmallToFloat(i, 5, 10, true);
    return values;
  }();
  return table.data();
}

inline const float* ByteTable(bool e4m3) {
  static const std::vector<float>& table = *[] {
    auto* values = new std::vector<float>(512);
    for (uint32_t i = 0; i < 256; ++i) {
      (*values)[i] = SmallToFloat(i, 4, 3, false);
      (*values)[256 + i] = SmallToFloat(i, 5, 2, true);
    }
    return values;
  }();
  return table.data() + (e4m3 ? 0 : 256);
}

inline int BytesOf(Format format) {
  switch (format) {
    case Format::f64:
      return 8;
    case Format::f32:
    case Format::tf32:
      return 4;
    case Format::f16:
    case Format::bf16:
      return 2;
    default:
      return 1;
  }
}

// Codes of e2m1: the fourth bit is the sign.
constexpr float kE2m1[16] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0f, -0.5, -1, -1.5, -2, -3, -4, -6};

// Elements in 16 bytes.
inline int PerChunk(Format format) { return format == Format::e2m1 ? 32 : 16 / BytesOf(format); }

// The elements of 16 bytes as float32: `to` has room for 32.
inline void Widen(Format format, const uint8_t* from, float* to) {
  switch (format) {
    case Format::bf16: {
      uint16_t raw[8];
      std::memcpy(raw, from, 16);
      for (int i = 0; i < 8; ++i) to[i] = BitCast<float>(static_cast<uint32_t>(raw[i]) << 16);
      return;
    }
    case Format::f16: {
      uint16_t raw[8];
      std::memcpy(raw, from, 16);
      const float* table = HalfTable();
      for (int i = 0; i < 8; ++i) to[i] = table[raw[i]];
      return;
    }
    case Format::tf32: {
      uint32_t raw[4];
      std::memcpy(raw, from, 16);
      for (int i = 0; i < 4; ++i) to[i] = BitCast<float>(raw[i] & 0xffffe000u);
      return;
    }
    case Format::e4m3:
    case Format::e5m2: {
      const float* table = ByteTable(format == Format::e4m3);
      for (int i = 0; i < 16; ++i) to[i] = table[from[i]];
      return;
    }
    case Format::e2m1:
      for (int i = 0; i < 32; ++i) to[i] = kE2m1[from[i / 2] >> (4 * (i % 2)) & 15];
      return;
    case Format::s8:
      for (int i = 0; i < 16; ++i) to[i] = static_cast<int8_t>(from[i]);
      return;
    case Format::u8:
      for (int i = 0; i < 16; ++i) to[i] = from[i];
      return;
    default:
      std::memcpy(to, from, 16);
  }
}

}  // namespace ptx
