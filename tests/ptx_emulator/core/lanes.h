// Operations on the 32 lanes of a register.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "numbers.h"
#include "program.h"

namespace ptx {

constexpr uint32_t kAllLanes = ~0u;

template <typename T>
void Blend(T* to, const T* from, uint32_t mask) {
  if (mask == kAllLanes) {
    std::memcpy(to, from, 32 * sizeof(T));
    return;
  }
  for (int l = 0; l < 32; ++l) to[l] = mask >> l & 1 ? from[l] : to[l];
}

inline uint64_t Truncate(uint64_t value, int bits) { return bits >= 64 ? value : value & ((uint64_t{1} << bits) - 1); }

inline int64_t Extend(uint64_t value, int bits) { return static_cast<int64_t>(value << (64 - bits)) >> (64 - bits); }

// One NaN gives the other operand, also a signalling one. -0 is below 0.
inline float Extreme(float x, float y, bool smaller) {
  if (x != x) return Canonical(y);
  if (y != y) return x;
  if (x == y) return std::signbit(x) == smaller ? x : y;
  return (x < y) == smaller ? x : y;
}

template <typename T>
bool CompareValues(Compare how, T a, T b) {
  const bool unordered = a != a || b != b;
  switch (how) {
    case Compare::eq:
      return a == b;
    case Compare::ne:
      return !unordered && a != b;
    case Compare::lt:
      return a < b;
    case Compare::le:
      return a <= b;
    case Compare::gt:
      return a > b;
    case Compare::ge:
      return a >= b;
    case Compare::ltu:
      return unordered || a < b;
    case Compare::leu:
      return unordered || a <= b;
    case Compare::gtu:
      return unordered || a > b;
    case Compare::geu:
      return unordered || a >= b;
    case Compare::equ:
      return unordered || a == b;
    case Compare::neu:
      return unordered || a != b;
    case Compare::num:
      return !unordered;
    case Compare::nan:
      return unordered;
  }
  return false;
}

template <typename T>
uint32_t CompareLanes(Compare how, const T* a, const T* b) {
  uint8_t bits[32];
  switch (how) {
    case Compare::eq:
      for (int l = 0; l < 32; ++l) bits[l] = a[l] == b[l];
      break;
    case Compare::lt:
      for (int l = 0; l < 32; ++l) bits[l] = a[l] < b[l];
      break;
    case Compare::le:
      for (int l = 0; l < 32; ++l) bits[l] = a[l] <= b[l];
      break;
    case Compare::gt:
      for (int l = 0; l < 32; ++l) bits[l] = a[l] > b[l];
      break;
    case Compare::ge:
      for (int l = 0; l < 32; ++l) bits[l] = a[l] >= b[l];
      break;
    default:
      for (int l = 0; l < 32; ++l) bits[l] = CompareValues(how, a[l], b[l]);
  }
  uint32_t mask = 0;
  for (int l = 0; l < 32; ++l) mask |= static_cast<uint32_t>(bits[l]) << l;
  return mask;
}

}  // namespace ptx
