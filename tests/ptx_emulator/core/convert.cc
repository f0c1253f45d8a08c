// Conversions.
#include <algorithm>
#include <cmath>

#include "lanes.h"
#include "machine.h"

namespace ptx {
namespace {

// Negative numbers become 0, a NaN stays one.
float Relu(float value) { return value > 0 || std::isnan(value) ? value : 0.0f; }

double RoundToWhole(double value, Round how) {
  switch (how) {
    case Round::rni:
      return std::nearbyint(value);
    case Round::rmi:
      return std::floor(value);
    case Round::rpi:
      return std::ceil(value);
    case Round::rzi:
      return std::trunc(value);
    default:
      return value;
  }
}

// To an integer of `bits` bits, cut off at its ends. What becomes of a NaN is as in the PTX ISA, cvt.
uint64_t ToInteger(double value, bool is_signed, int bits, bool wide) {
  const uint64_t top = uint64_t{1} << (bits - 1);
  if (std::isnan(value)) return wide ? top : 0;
  const double low = is_signed ? -std::ldexp(1.0, bits - 1) : 0, high = std::ldexp(1.0, is_signed ? bits - 1 : bits);
  if (value <= low) return is_signed ? top : 0;
  if (value >= high) return is_signed ? top - 1 : ~uint64_t{0};
  return is_signed ? static_cast<uint64_t>(static_cast<int64_t>(value)) : static_cast<uint64_t>(value);
}

// An integer cut off at the ends of another type.
uint64_t SaturateInteger(uint64_t raw, bool from_signed, bool to_signed, int bits) {
  const __int128 value = from_signed ? static_cast<__int128>(static_cast<int64_t>(raw)) : static_cast<__int128>(raw);
  const __int128 one = 1;
  const __int128 low = to_signed ? -(one << (bits - 1)) : 0, high = (one << (to_signed ? bits - 1 : bits)) - 1;
  return static_cast<uint64_t>(std::clamp(value, low, high));
}

double SaturateDouble(double value) { return !(value > 0) ? 0.0 : std::min(value, 1.0); }

bool IsFloat(int32_t kind) { return kind == 'f' || kind == 'h' || kind == 'x'; }

}  // namespace

void Machine::ConvertPairs(Context& c) {
  const Instr& i = c.instr;
  const float* high = Source<float>(c, 1);
  const float* low = Source<float>(c, 2);
  uint32_t r[32];
  for (int l = 0; l < 32; ++l) {
    const float h = i.has(k_relu) ? Relu(high[l]) : high[l];
    const float w = i.has(k_relu) ? Relu(low[l]) : low[l];
    switch (static_cast<Format>(i.variant)) {
      case Format::bf16:
        r[l] = RoundToBf16(h) << 16 | RoundToBf16(w);
        break;
      case Format::f16:
        r[l] = RoundToF16(h) << 16 | RoundToF16(w);
        break;
      case Format::e4m3:
        r[l] = RoundToE4m3(h) << 8 | RoundToE4m3(w);
        break;
      default:
        r[l] = RoundToE5m2(h) << 8 | RoundToE5m2(w);
        break;
    }
  }
  Blend(Destination<uint32_t>(c, 0), r, c.mask);
}

// One lane's number; the parser refuses what would be rounded twice on this way.
uint64_t Machine::ConvertNumber(const Instr& i, uint64_t raw) {
  const Round round = static_cast<Round>(i.variant);
  const bool from_signed = i.kind2 == 's';
  const uint64_t extended = from_signed ? static_cast<uint64_t>(Extend(raw, i.bits2)) : raw;
  double value = 0;
  if (i.kind2 == 'f' && i.bits2 == 64) {
    value = BitCast<double>(raw);
  } else if (i.kind2 == 'f') {
    const float single = BitCast<float>(static_cast<uint32_t>(raw));
    value = i.has(k_ftz) ? Flush(single) : single;
  } else if (i.kind2 == 'h') {
    value = HalfTable()[raw];
  } else if (i.kind2 == 'x') {
    value = BitCast<float>(static_cast<uint32_t>(raw) << 16);
  } else if (!IsFloat(i.kind)) {
    return i.has(k_saturate) ? SaturateInteger(extended, from_signed, i.kind == 's', i.bits) : extended;
  } else if (i.bits == 64) {
    value = from_signed ? static_cast<double>(static_cast<int64_t>(extended)) : static_cast<double>(raw);
    return BitCast<uint64_t>(i.has(k_saturate) ? SaturateDouble(value) : value);
  } else {
    const float single = from_signed ? static_cast<float>(static_cast<int64_t>(extended)) : static_cast<float>(raw);
    return BitCast<uint32_t>(i.has(k_saturate) ? Saturate(single) : single);
  }
  if (!IsFloat(i.kind)) {
    const bool wide = i.bits2 == 64 || i.bits == 64;
    return ToInteger(RoundToWhole(value, round), i.kind == 's', i.bits, wide);
  }
  value = RoundToWhole(value, round);
  if (i.kind == 'f' && i.bits == 64) {
    return BitCast<uint64_t>(i.has(k_saturate) ? SaturateDouble(value) : value);
  }
  float single = Canonical(static_cast<float>(value));
  if (i.has(k_ftz)) single = Flush(single);
  if (i.has(k_saturate)) single = Saturate(single);
  if (i.kind == 'f') return BitCast<uint32_t>(single);
  return i.kind == 'h' ? RoundToF16(single) : RoundToBf16(single);
}

void Machine::Convert(Context& c) {
  const Instr& i = c.instr;
  const int width = static_cast<int>(c.operands[0].bits);
  // The bits of a bfloat16 are those of a float32, also of a NaN.
  const bool shifts = i.kind2 == 'x' && i.kind == 'f' && i.bits == 32 && !i.has(k_saturate) && !i.has(k_ftz);
  for (int l = 0; l < 32; ++l) {
    if (!(c.mask >> l & 1)) continue;
    const uint64_t raw = Truncate(Value(c, 1, l), i.bits2);
    uint64_t r = Truncate(shifts ? raw << 16 : ConvertNumber(i, raw), i.bits);
    // A narrow result in a wider register is extended by its own sign.
    if (i.kind == 's' && width > i.bits) r = Truncate(static_cast<uint64_t>(Extend(r, i.bits)), width);
    Put(c, 0, l, r);
  }
}

}  // namespace ptx
