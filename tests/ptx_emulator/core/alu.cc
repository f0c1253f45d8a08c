// Arithmetic.
#include <algorithm>
#include <cmath>

#include "lanes.h"
#include "machine.h"

namespace ptx {

constexpr int64_t kLowest = INT32_MIN, kHighest = INT32_MAX;

// Runs `f` on the lanes of two sources of type T.
#define BINARY(T, expression)               \
  do {                                      \
    const T* a = Source<T>(c, 1);           \
    const T* b = Source<T>(c, 2);           \
    T r[32];                                \
    for (int l = 0; l < 32; ++l) {          \
      const T x = a[l], y = b[l];           \
      r[l] = static_cast<T>(expression);    \
    }                                       \
    Blend(Destination<T>(c, 0), r, c.mask); \
  } while (false)

#define UNARY(T, expression)                \
  do {                                      \
    const T* a = Source<T>(c, 1);           \
    T r[32];                                \
    for (int l = 0; l < 32; ++l) {          \
      const T x = a[l];                     \
      r[l] = static_cast<T>(expression);    \
    }                                       \
    Blend(Destination<T>(c, 0), r, c.mask); \
  } while (false)

// float32 with .ftz, which takes denormal numbers for zeros, or .sat, which keeps results within [0, 1].
void Machine::FloatWithModifiers(Context& c) {
  const Instr& i = c.instr;
  const bool flushes = i.has(k_ftz);
  for (int l = 0; l < 32; ++l) {
    if (!(c.mask >> l & 1)) continue;
    const auto operand = [&](int o) {
      const float value = o < i.operands ? BitCast<float>(static_cast<uint32_t>(Value(c, o, l))) : 0.0f;
      return flushes ? Flush(value) : value;
    };
    const float x = operand(1), y = operand(2);
    float r = 0;
    switch (i.op()) {
      case Op::add:
        r = x + y;
        break;
      case Op::sub:
        r = x - y;
        break;
      case Op::mul_lo:
        r = x * y;
        break;
      case Op::div:
        r = x / y;
        break;
      case Op::fma:
        r = std::fma(x, y, operand(3));
        break;
      case Op::min:
      case Op::max:
        r = Extreme(x, y, i.op() == Op::min);
        break;
      case Op::neg:
        r = -x;
        break;
      case Op::abs:
        r = std::fabs(x);
        break;
      default:
        Fail("unsupported", c.site(*this), "no such operation on floating point");
    }
    r = Canonical(r);
    if (flushes) r = Flush(r);
    Put(c, 0, l, BitCast<uint32_t>(i.has(k_saturate) ? Saturate(r) : r));
  }
}

void Machine::Alu(Context& c) {
  const Instr& i = c.instr;
  const bool is_signed = i.kind == 's';
  if (i.kind == 'p') {
    const uint32_t a = *Source<uint32_t>(c, 1);
    const uint32_t b = i.operands > 2 ? *Source<uint32_t>(c, 2) : 0;
    uint32_t r = a;
    switch (i.op()) {
      case Op::and_:
        r = a & b;
        break;
      case Op::or_:
        r = a | b;
        break;
      case Op::xor_:
        r = a ^ b;
        break;
      case Op::not_:
        r = ~a;
        break;
      default:
        break;
    }
    uint32_t& d = *Destination<uint32_t>(c, 0);
    d = (d & ~c.mask) | (r & c.mask);
    return;
  }
  if (i.kind == 'f' && (i.has(k_ftz) || i.has(k_saturate))) return FloatWithModifiers(c);
  if (i.kind == 'f') {
    if (i.bits == 32) {
      switch (i.op()) {
        case Op::add:
          BINARY(float, Canonical(x + y));
          return;
        case Op::sub:
          BINARY(float, Canonical(x - y));
          return;
        case Op::mul_lo:
          BINARY(float, Canonical(x * y));
          return;
        case Op::div:
          BINARY(float, Canonical(x / y));
          return;
        case Op::min:
          BINARY(float, Extreme(x, y, true));
          return;
        case Op::max:
          BINARY(float, Extreme(x, y, false));
          return;
        case Op::neg:
          UNARY(float, Canonical(-x));
          return;
        case Op::abs:
          UNARY(float, Canonical(std::fabs(x)));
          return;
        case Op::fma: {
          const float* z = Source<float>(c, 3);
          BINARY(float, Canonical(std::fma(x, y, z[l])));
          return;
        }
        default:
          break;
      }
    } else {
      switch (i.op()) {
        case Op::add:
          BINARY(double, x + y);
          return;
        case Op::sub:
          BINARY(double, x - y);
          return;
        case Op::mul_lo:
          BINARY(double, x* y);
          return;
        case Op::div:
          BINARY(double, x / y);
          return;
        case Op::neg:
          UNARY(double, -x);
          return;
        case Op::fma: {
          const double* z = Source<double>(c, 3);
          BINARY(double, std::fma(x, y, z[l]));
          return;
        }
        default:
          break;
      }
    }
    Fail("unsupported", c.site(*this), "no such operation on floating point");
  }
  if (i.bits == 32) {
    switch (i.op()) {
      case Op::add:
        if (i.has(k_saturate)) {
          BINARY(int32_t, std::clamp(int64_t{x} + y, kLowest, kHighest));
        } else {
          BINARY(uint32_t, x + y);
        }
        return;
      case Op::sub:
        if (i.has(k_saturate)) {
          BINARY(int32_t, std::clamp(int64_t{x} - y, kLowest, kHighest));
        } else {
          BINARY(uint32_t, x - y);
        }
        return;
      case Op::mul_lo:
        BINARY(uint32_t, x* y);
        return;
      case Op::and_:
        BINARY(uint32_t, x& y);
        return;
      case Op::or_:
        BINARY(uint32_t, x | y);
        return;
      case Op::xor_:
        BINARY(uint32_t, x ^ y);
        return;
      case Op::not_:
        UNARY(uint32_t, ~x);
        return;
      case Op::neg:
        UNARY(uint32_t, 0u - x);
        return;
      case Op::shl:
        BINARY(uint32_t, y >= 32 ? 0u : x << (y & 31));
        return;
      case Op::shr:
        if (is_signed) {
          BINARY(int32_t, x >> (static_cast<uint32_t>(y) >= 32 ? 31 : y));
        } else {
          BINARY(uint32_t, y >= 32 ? 0u : x >> (y & 31));
        }
        return;
      case Op::min:
        if (is_signed) {
          if (i.has(k_relu)) {
            BINARY(int32_t, (x < y ? x : y) > 0 ? (x < y ? x : y) : 0);
          } else {
            BINARY(int32_t, x < y ? x : y);
          }
        } else {
          BINARY(uint32_t, x < y ? x : y);
        }
        return;
      case Op::max:
        if (is_signed) {
          if (i.has(k_relu)) {
            BINARY(int32_t, (x > y ? x : y) > 0 ? (x > y ? x : y) : 0);
          } else {
            BINARY(int32_t, x > y ? x : y);
          }
        } else {
          BINARY(uint32_t, x > y ? x : y);
        }
        return;
      case Op::mad_lo: {
        const uint32_t* z = Source<uint32_t>(c, 3);
        BINARY(uint32_t, x* y + z[l]);
        return;
      }
      default:
        break;
    }
  } else if (i.bits == 64) {
    switch (i.op()) {
      case Op::add:
        BINARY(uint64_t, x + y);
        return;
      case Op::sub:
        BINARY(uint64_t, x - y);
        return;
      case Op::mul_lo:
        BINARY(uint64_t, x* y);
        return;
      case Op::and_:
        BINARY(uint64_t, x& y);
        return;
      case Op::or_:
        BINARY(uint64_t, x | y);
        return;
      case Op::xor_:
        BINARY(uint64_t, x ^ y);
        return;
      default:
        break;
    }
  }
  // The others, lane by lane.
  for (int l = 0; l < 32; ++l) {
    if (!(c.mask >> l & 1)) continue;
    const int bits = i.bits;
    const uint64_t x = Truncate(Value(c, 1, l), bits);
    const uint64_t raw_y = i.operands > 2 ? Value(c, 2, l) : 0;
    const uint64_t raw_z = i.operands > 3 ? Value(c, 3, l) : 0;
    const uint64_t y = Truncate(raw_y, bits);
    const int64_t sx = Extend(x, bits), sy = Extend(y, bits);
    uint64_t r = 0;
    int width = bits;
    switch (i.op()) {
      case Op::add:
        r = x + y;
        break;
      case Op::sub:
        r = x - y;
        break;
      case Op::and_:
        r = x & y;
        break;
      case Op::or_:
        r = x | y;
        break;
      case Op::xor_:
        r = x ^ y;
        break;
      case Op::not_:
        r = ~x;
        break;
      case Op::neg:
        r = 0 - x;
        break;
      case Op::abs:
        r = static_cast<uint64_t>(sx < 0 ? -sx : sx);
        break;
      case Op::mul_lo:
        r = x * y;
        break;
      case Op::mad_lo:
        r = x * y + raw_z;
        break;
      case Op::mul_wide:
      case Op::mad_wide:
        r = is_signed ? static_cast<uint64_t>(sx * sy) : x * y;
        if (i.op() == Op::mad_wide) r += raw_z;
        width = 2 * bits;
        break;
      case Op::mul_hi:
      case Op::mad_hi:
        if (bits == 64) {
          r = is_signed ? static_cast<uint64_t>((static_cast<__int128>(sx) * sy) >> 64)
                        : static_cast<uint64_t>((static_cast<unsigned __int128>(x) * y) >> 64);
        } else {
          r = is_signed ? static_cast<uint64_t>((sx * sy) >> bits) : (x * y) >> bits;
        }
        if (i.op() == Op::mad_hi) r += raw_z;
        break;
      case Op::min:
        r = is_signed ? static_cast<uint64_t>(sx < sy ? sx : sy) : (x < y ? x : y);
        break;
      case Op::max:
        r = is_signed ? static_cast<uint64_t>(sx > sy ? sx : sy) : (x > y ? x : y);
        break;
      case Op::div:
      case Op::rem:
        // Division by zero gives an unspecified value; ones are as good as any, and easy to see.
        if (y == 0) {
          r = ~uint64_t{0};
        } else if (is_signed) {
          const __int128 q = static_cast<__int128>(sx) / sy;
          r = static_cast<uint64_t>(i.op() == Op::div ? q : sx - q * sy);
        } else {
          r = i.op() == Op::div ? x / y : x % y;
        }
        break;
      case Op::shl: {
        const uint32_t shift = static_cast<uint32_t>(raw_y);
        r = shift >= static_cast<uint32_t>(bits) ? 0 : x << shift;
        break;
      }
      case Op::shr: {
        const uint32_t shift = static_cast<uint32_t>(raw_y);
        if (is_signed) {
          r = static_cast<uint64_t>(sx >> (shift >= static_cast<uint32_t>(bits) ? bits - 1 : static_cast<int>(shift)));
        } else {
          r = shift >= static_cast<uint32_t>(bits) ? 0 : x >> shift;
        }
        break;
      }
      case Op::popc:
        r = static_cast<uint64_t>(__builtin_popcountll(x));
        width = 32;
        break;
      case Op::clz:
        r = x == 0 ? bits : static_cast<uint64_t>(__builtin_clzll(x) - (64 - bits));
        width = 32;
        break;
      case Op::brev:
        for (int b = 0; b < bits; ++b) r |= (x >> b & 1) << (bits - 1 - b);
        break;
      case Op::lop3: {
        const uint64_t z = raw_z, table = Value(c, 4, l);
        for (int b = 0; b < 32; ++b) {
          const int index = static_cast<int>((x >> b & 1) << 2 | (y >> b & 1) << 1 | (z >> b & 1));
          r |= (table >> index & 1) << b;
        }
        break;
      }
      case Op::prmt: {
        const uint64_t bytes = x | y << 32, selector = raw_z;
        for (int b = 0; b < 4; ++b) {
          const uint64_t pick = selector >> (4 * b) & 15;
          uint64_t byte = bytes >> (8 * (pick & 7)) & 255;
          if (pick & 8) byte = byte & 128 ? 255 : 0;
          r |= byte << (8 * b);
        }
        break;
      }
      case Op::bfe: {
        const uint32_t position = static_cast<uint32_t>(raw_y) & 255, length = static_cast<uint32_t>(raw_z) & 255;
        for (uint32_t b = 0; b < length && b < static_cast<uint32_t>(bits); ++b) {
          if (position + b < static_cast<uint32_t>(bits)) r |= (x >> (position + b) & 1) << b;
        }
        if (is_signed && length > 0 && length < static_cast<uint32_t>(bits)) {
          const uint32_t top = position + length - 1;
          const uint64_t sign = x >> (top < static_cast<uint32_t>(bits) ? top : bits - 1) & 1;
          if (sign) r |= ~uint64_t{0} << length;
        }
        break;
      }
      case Op::bfi: {
        const uint32_t position = static_cast<uint32_t>(raw_z) & 255;
        const uint32_t length = static_cast<uint32_t>(Value(c, 4, l)) & 255;
        r = y;
        for (uint32_t b = 0; b < length && position + b < static_cast<uint32_t>(bits); ++b) {
          r = (r & ~(uint64_t{1} << (position + b))) | (x >> b & 1) << (position + b);
        }
        break;
      }
      default:
        Fail("unsupported", c.site(*this), "no such operation on integers");
    }
    if (i.has(k_relu) && Extend(Truncate(r, bits), bits) < 0) r = 0;
    Put(c, 0, l, Truncate(r, width));
  }
}

}  // namespace ptx
