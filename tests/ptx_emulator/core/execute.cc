// Instructions that stay within a warp: arithmetic, conversions, shuffles, votes.
#include <cmath>

#include "machine.h"
#include "numbers.h"

namespace ptx {
namespace {

constexpr uint32_t kAllLanes = ~0u;

template <typename T>
void Blend(T* to, const T* from, uint32_t mask) {
  if (mask == kAllLanes) {
    std::memcpy(to, from, 32 * sizeof(T));
    return;
  }
  for (int l = 0; l < 32; ++l) to[l] = mask >> l & 1 ? from[l] : to[l];
}

uint64_t Truncate(uint64_t value, int bits) { return bits >= 64 ? value : value & ((uint64_t{1} << bits) - 1); }

int64_t Extend(uint64_t value, int bits) {
  return static_cast<int64_t>(value << (64 - bits)) >> (64 - bits);
}

// One NaN gives the other operand, also a signalling one. -0 is below 0.
float Extreme(float x, float y, bool smaller) {
  if (x != x) return Canonical(y);
  if (y != y) return x;
  if (x == y) return std::signbit(x) == smaller ? x : y;
  return (x < y) == smaller ? x : y;
}

template <typename T>
bool CompareValues(Compare how, T a, T b) {
  const bool unordered = a != a || b != b;
  switch (how) {
    case Compare::eq: return a == b;
    case Compare::ne: return !unordered && a != b;
    case Compare::lt: return a < b;
    case Compare::le: return a <= b;
    case Compare::gt: return a > b;
    case Compare::ge: return a >= b;
    case Compare::ltu: return unordered || a < b;
    case Compare::leu: return unordered || a <= b;
    case Compare::gtu: return unordered || a > b;
    case Compare::geu: return unordered || a >= b;
    case Compare::equ: return unordered || a == b;
    case Compare::neu: return unordered || a != b;
    case Compare::num: return !unordered;
    case Compare::nan: return unordered;
  }
  return false;
}

template <typename T>
uint32_t CompareLanes(Compare how, const T* a, const T* b) {
  uint8_t bits[32];
  switch (how) {
    case Compare::eq: for (int l = 0; l < 32; ++l) bits[l] = a[l] == b[l]; break;
    case Compare::lt: for (int l = 0; l < 32; ++l) bits[l] = a[l] < b[l]; break;
    case Compare::le: for (int l = 0; l < 32; ++l) bits[l] = a[l] <= b[l]; break;
    case Compare::gt: for (int l = 0; l < 32; ++l) bits[l] = a[l] > b[l]; break;
    case Compare::ge: for (int l = 0; l < 32; ++l) bits[l] = a[l] >= b[l]; break;
    default: for (int l = 0; l < 32; ++l) bits[l] = CompareValues(how, a[l], b[l]);
  }
  uint32_t mask = 0;
  for (int l = 0; l < 32; ++l) mask |= static_cast<uint32_t>(bits[l]) << l;
  return mask;
}

}  // namespace

// Runs `f` on the lanes of two sources of type T.
#define BINARY(T, expression)                                  \
  do {                                                         \
    const T* a = Source<T>(c, 1);                              \
    const T* b = Source<T>(c, 2);                              \
    T r[32];                                                   \
    for (int l = 0; l < 32; ++l) {                             \
      const T x = a[l], y = b[l];                              \
      r[l] = static_cast<T>(expression);                       \
    }                                                          \
    Blend(Destination<T>(c, 0), r, c.mask);                    \
  } while (false)

#define UNARY(T, expression)                                   \
  do {                                                         \
    const T* a = Source<T>(c, 1);                              \
    T r[32];                                                   \
    for (int l = 0; l < 32; ++l) {                             \
      const T x = a[l];                                        \
      r[l] = static_cast<T>(expression);                       \
    }                                                          \
    Blend(Destination<T>(c, 0), r, c.mask);                    \
  } while (false)

void Machine::Alu(Context& c) {
  const Instr& i = c.instr;
  const bool is_signed = i.kind == 's';
  if (i.kind == 'p') {
    const uint32_t a = *Source<uint32_t>(c, 1);
    const uint32_t b = i.operands > 2 ? *Source<uint32_t>(c, 2) : 0;
    uint32_t r = a;
    switch (i.op()) {
      case Op::and_: r = a & b; break;
      case Op::or_: r = a | b; break;
      case Op::xor_: r = a ^ b; break;
      case Op::not_: r = ~a; break;
      default: break;
    }
    uint32_t& d = *Destination<uint32_t>(c, 0);
    d = (d & ~c.mask) | (r & c.mask);
    return;
  }
  if (i.kind == 'f') {
    if (i.bits == 32) {
      switch (i.op()) {
        case Op::add: BINARY(float, Canonical(x + y)); return;
        case Op::sub: BINARY(float, Canonical(x - y)); return;
        case Op::mul_lo: BINARY(float, Canonical(x * y)); return;
        case Op::div: BINARY(float, Canonical(x / y)); return;
        case Op::min: BINARY(float, Extreme(x, y, true)); return;
        case Op::max: BINARY(float, Extreme(x, y, false)); return;
        case Op::neg: UNARY(float, Canonical(-x)); return;
        case Op::abs: UNARY(float, Canonical(std::fabs(x))); return;
        case Op::fma: {
          const float* z = Source<float>(c, 3);
          BINARY(float, Canonical(std::fma(x, y, z[l])));
          return;
        }
        default: break;
      }
    } else {
      switch (i.op()) {
        case Op::add: BINARY(double, x + y); return;
        case Op::sub: BINARY(double, x - y); return;
        case Op::mul_lo: BINARY(double, x * y); return;
        case Op::div: BINARY(double, x / y); return;
        case Op::neg: UNARY(double, -x); return;
        case Op::fma: {
          const double* z = Source<double>(c, 3);
          BINARY(double, std::fma(x, y, z[l]));
          return;
        }
        default: break;
      }
    }
    Fail("unsupported", c.site(*this), "no such operation on floating point");
  }
  if (i.bits == 32) {
    switch (i.op()) {
      case Op::add: BINARY(uint32_t, x + y); return;
      case Op::sub: BINARY(uint32_t, x - y); return;
      case Op::mul_lo: BINARY(uint32_t, x * y); return;
      case Op::and_: BINARY(uint32_t, x & y); return;
      case Op::or_: BINARY(uint32_t, x | y); return;
      case Op::xor_: BINARY(uint32_t, x ^ y); return;
      case Op::not_: UNARY(uint32_t, ~x); return;
      case Op::neg: UNARY(uint32_t, 0u - x); return;
      case Op::shl: BINARY(uint32_t, y >= 32 ? 0u : x << (y & 31)); return;
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
        BINARY(uint32_t, x * y + z[l]);
        return;
      }
      default: break;
    }
  } else if (i.bits == 64) {
    switch (i.op()) {
      case Op::add: BINARY(uint64_t, x + y); return;
      case Op::sub: BINARY(uint64_t, x - y); return;
      case Op::mul_lo: BINARY(uint64_t, x * y); return;
      case Op::and_: BINARY(uint64_t, x & y); return;
      case Op::or_: BINARY(uint64_t, x | y); return;
      case Op::xor_: BINARY(uint64_t, x ^ y); return;
      default: break;
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
      case Op::add: r = x + y; break;
      case Op::sub: r = x - y; break;
      case Op::and_: r = x & y; break;
      case Op::or_: r = x | y; break;
      case Op::xor_: r = x ^ y; break;
      case Op::not_: r = ~x; break;
      case Op::neg: r = 0 - x; break;
      case Op::abs: r = static_cast<uint64_t>(sx < 0 ? -sx : sx); break;
      case Op::mul_lo: r = x * y; break;
      case Op::mad_lo: r = x * y + raw_z; break;
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
      case Op::min: r = is_signed ? static_cast<uint64_t>(sx < sy ? sx : sy) : (x < y ? x : y); break;
      case Op::max: r = is_signed ? static_cast<uint64_t>(sx > sy ? sx : sy) : (x > y ? x : y); break;
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
      case Op::popc: r = static_cast<uint64_t>(__builtin_popcountll(x)); width = 32; break;
      case Op::clz: r = x == 0 ? bits : static_cast<uint64_t>(__builtin_clzll(x) - (64 - bits)); width = 32; break;
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
      default: Fail("unsupported", c.site(*this), "no such operation on integers");
    }
    if (i.has(k_relu) && Extend(Truncate(r, bits), bits) < 0) r = 0;
    Put(c, 0, l, Truncate(r, width));
  }
}

void Machine::Convert(Context& c) {
  const Instr& i = c.instr;
  if (i.op() == Op::cvt_pack) {
    const float* high = Source<float>(c, 1);
    const float* low = Source<float>(c, 2);
    uint32_t r[32];
    for (int l = 0; l < 32; ++l) {
      const float h = i.has(k_relu) ? std::fmax(high[l], 0.0f) : high[l];
      const float w = i.has(k_relu) ? std::fmax(low[l], 0.0f) : low[l];
      switch (static_cast<Format>(i.variant)) {
        case Format::bf16: r[l] = RoundToBf16(h) << 16 | RoundToBf16(w); break;
        case Format::f16: r[l] = RoundToF16(h) << 16 | RoundToF16(w); break;
        case Format::e4m3: r[l] = RoundToE4m3(h) << 8 | RoundToE4m3(w); break;
        default: r[l] = RoundToE5m2(h) << 8 | RoundToE5m2(w); break;
      }
    }
    Blend(Destination<uint32_t>(c, 0), r, c.mask);
    return;
  }
  const bool from_float = i.kind2 == 'f' || i.kind2 == 'h' || i.kind2 == 'x';
  const bool to_float = i.kind == 'f' || i.kind == 'h' || i.kind == 'x' || i.kind == 't';
  for (int l = 0; l < 32; ++l) {
    if (!(c.mask >> l & 1)) continue;
    const uint64_t raw = Truncate(Value(c, 1, l), i.bits2);
    if (!from_float && !to_float) {
      uint64_t r = i.kind2 == 's' ? static_cast<uint64_t>(Extend(raw, i.bits2)) : raw;
      if (i.has(k_saturate)) Fail("unsupported", c.site(*this), "saturating conversion of integers");
      // A narrow result in a wider register is extended by its own sign.
      const Operand& o = c.operands[0];
      r = Truncate(r, i.bits);
      if (i.kind == 's' && o.bits > i.bits) r = Truncate(static_cast<uint64_t>(Extend(r, i.bits)), static_cast<int>(o.bits));
      Put(c, 0, l, r);
      continue;
    }
    double value = 0;
    if (i.kind2 == 'f') {
      value = i.bits2 == 64 ? BitCast<double>(raw) : BitCast<float>(static_cast<uint32_t>(raw));
    } else if (i.kind2 == 'h') {
      value = HalfTable()[raw];
    } else if (i.kind2 == 'x') {
      value = BitCast<float>(static_cast<uint32_t>(raw) << 16);
    } else {
      value = i.kind2 == 's' ? static_cast<double>(Extend(raw, i.bits2)) : static_cast<double>(raw);
    }
    const Round round = static_cast<Round>(i.variant);
    if (to_float) {
      if (round != Round::none && round != Round::rn && round != Round::rni && !(i.kind == 't')) {
        Fail("unsupported", c.site(*this), "rounding mode");
      }
      if (round == Round::rni) value = std::nearbyint(value);
      if (i.has(k_saturate)) value = std::isnan(value) ? 0 : std::fmin(std::fmax(value, 0.0), 1.0);
      if (i.kind == 'f') {
        Put(c, 0, l, i.bits == 64 ? BitCast<uint64_t>(value) : BitCast<uint32_t>(Canonical(static_cast<float>(value))));
      } else if (i.kind == 't') {
        const uint32_t bits = BitCast<uint32_t>(static_cast<float>(value));
        Put(c, 0, l, (bits + 0x1000) & 0xffffe000u);  // cvt.rna: to nearest, ties away
      } else {
        Put(c, 0, l, i.kind == 'h' ? RoundToF16(static_cast<float>(value)) : RoundToBf16(static_cast<float>(value)));
      }
      continue;
    }
    switch (round) {
      case Round::rni: value = std::nearbyint(value); break;
      case Round::rmi: value = std::floor(value); break;
      case Round::rpi: value = std::ceil(value); break;
      default: value = std::trunc(value);
    }
    const bool is_signed = i.kind == 's';
    const double low = is_signed ? -std::ldexp(1.0, i.bits - 1) : 0;
    const double high = std::ldexp(1.0, is_signed ? i.bits - 1 : i.bits);
    uint64_t r = 0;
    if (std::isnan(value)) {
      r = 0;
    } else if (value <= low) {
      r = is_signed ? uint64_t{1} << (i.bits - 1) : 0;
    } else if (value >= high) {
      r = is_signed ? (uint64_t{1} << (i.bits - 1)) - 1 : ~uint64_t{0};
    } else {
      r = is_signed ? static_cast<uint64_t>(static_cast<int64_t>(value)) : static_cast<uint64_t>(value);
    }
    Put(c, 0, l, Truncate(r, i.bits));
  }
}

// Whether all lanes of `members` that are alive are here. Where some are elsewhere, this group waits for them.
bool Machine::Converged(Context& c, uint32_t members) {
  const uint32_t needed = members & c.warp.live;
  if ((needed & ~c.mask) == 0) return true;
  if ((needed & ~c.fragment.mask) == 0) {
    Fail("protocol", c.site(*this),
         Text("lanes %#010x do not take part: their guard is false", needed & ~c.mask));
  }
  c.fragment.wait = {Wait::kLanes, c.warp.cta, needed, 0};
  return false;
}

// Registers go from warp to warp through a pool of the CTA.
Step Machine::SetRegisters(Context& c) {
  Warp& warp = c.warp;
  Cta& cta = *warp.cta;
  const uint32_t wanted = Source<uint32_t>(c, 0)[__builtin_ctz(c.mask)];
  const bool more = c.instr.variant != 0;
  if (wanted < 24 || wanted > 256 || wanted % 8 != 0) {
    Fail("protocol", c.site(*this), Text("%u registers: it must be a multiple of 8 from 24 to 256", wanted));
  }
  if (more ? wanted < warp.register_count : wanted > warp.register_count) {
    Fail("protocol", c.site(*this), Text("%u registers are asked for, the warp has %u", wanted, warp.register_count));
  }
  if (more && (wanted - warp.register_count) * 32 > cta.free_registers) {
    c.fragment.wait = {Wait::kRegisters, &cta, (wanted - warp.register_count) * 32, 0};
    return Step::kBlocked;
  }
  cta.free_registers += (warp.register_count - wanted) * 32;  // modulo 2^32
  warp.register_count = wanted;
  ++progress_;
  return Step::kNext;
}

void Machine::Shuffle(Context& c) {
  const Instr& i = c.instr;
  const uint32_t* value = Source<uint32_t>(c, 2);
  const uint32_t* by = Source<uint32_t>(c, 3);
  const uint32_t* limits = Source<uint32_t>(c, 4);
  uint32_t r[32], in_range = 0;
  for (int l = 0; l < 32; ++l) {
    r[l] = 0;
    if (!(c.mask >> l & 1)) continue;
    const int segment = static_cast<int>(limits[l] >> 8 & 31), clamp = static_cast<int>(limits[l] & 31);
    const int highest = (l & segment) | (clamp & ~segment), lowest = l & segment;
    const int b = static_cast<int>(by[l] & 31);
    int source = l;
    bool ok = true;
    switch (static_cast<ptx::Shuffle>(i.variant)) {
      case ptx::Shuffle::idx: source = lowest | (b & ~segment); ok = source <= highest; break;
      case ptx::Shuffle::up: source = l - b; ok = source >= highest; break;
      case ptx::Shuffle::down: source = l + b; ok = source <= highest; break;
      case ptx::Shuffle::bfly: source = l ^ b; ok = source <= highest; break;
    }
    if (!ok) source = l;
    if (!(c.mask >> source & 1)) {
      Fail("protocol", c.site(*this), Text("lane %d takes a value from lane %d, which is not here", l, source));
    }
    r[l] = value[source];
    in_range |= static_cast<uint32_t>(ok) << l;
  }
  if (c.operands[0].kind != kSink) Blend(Destination<uint32_t>(c, 0), r, c.mask);
  if (c.operands[1].kind != kSink) {
    uint32_t& d = *Destination<uint32_t>(c, 1);
    d = (d & ~c.mask) | (in_range & c.mask);
  }
}

Step Machine::Execute(Context& c) {
  const Instr& i = c.instr;
  if (i.has(k_touches_accumulators) && i.op() != Op::wgmma_mma) CheckAccumulators(c);
  const int lane = __builtin_ctz(c.mask);
  switch (i.op()) {
    case Op::mov:
      if (i.kind == 'p') {
        uint32_t& d = *Destination<uint32_t>(c, 0);
        d = (d & ~c.mask) | (*Source<uint32_t>(c, 1) & c.mask);
      } else if (i.bits == 32 && c.operands[0].bits <= 32) {
        Blend(Destination<uint32_t>(c, 0), Source<uint32_t>(c, 1), c.mask);
      } else if (i.bits == 64 && c.operands[1].bits == 64) {
        Blend(Destination<uint64_t>(c, 0), Source<uint64_t>(c, 1), c.mask);
      } else if (i.bits == 128) {
        Blend(Destination<uint64_t>(c, 0), Source<uint64_t>(c, 1), c.mask);
        Blend(Destination<uint64_t>(c, 0) + 32, Source<uint64_t>(c, 1) + 32, c.mask);
      } else {
        for (int l = 0; l < 32; ++l) {
          if (c.mask >> l & 1) Put(c, 0, l, Truncate(Value(c, 1, l), i.bits));
        }
      }
      return Step::kNext;
    case Op::pack:
      if (i.bits == 128) {
        Blend(Destination<uint64_t>(c, 0), Source<uint64_t>(c, 1), c.mask);
        Blend(Destination<uint64_t>(c, 0) + 32, Source<uint64_t>(c, 2), c.mask);
        return Step::kNext;
      }
      for (int l = 0; l < 32; ++l) {
        if (!(c.mask >> l & 1)) continue;
        uint64_t value = 0;
        const int width = i.bits / i.count;
        for (int j = 0; j < i.count; ++j) value |= Truncate(Value(c, 1 + j, l), width) << (j * width);
        Put(c, 0, l, value);
      }
      return Step::kNext;
    case Op::unpack:
      if (i.bits == 128) {
        for (int j = 0; j < 2; ++j) {
          if (c.operands[j].kind != kSink) {
            Blend(Destination<uint64_t>(c, j), Source<uint64_t>(c, 2) + 32 * j, c.mask);
          }
        }
        return Step::kNext;
      }
      for (int l = 0; l < 32; ++l) {
        if (!(c.mask >> l & 1)) continue;
        const uint64_t value = Value(c, i.count, l);
        const int width = i.bits / i.count;
        for (int j = 0; j < i.count; ++j) Put(c, j, l, Truncate(value >> (j * width), width));
      }
      return Step::kNext;
    case Op::setp: {
      const Compare how = static_cast<Compare>(i.variant);
      uint32_t r = 0;
      if (i.bits == 32 && i.kind == 'f') {
        r = CompareLanes(how, Source<float>(c, 2), Source<float>(c, 3));
      } else if (i.bits == 64 && i.kind == 'f') {
        r = CompareLanes(how, Source<double>(c, 2), Source<double>(c, 3));
      } else if (i.bits == 32 && i.kind == 's') {
        r = CompareLanes(how, Source<int32_t>(c, 2), Source<int32_t>(c, 3));
      } else if (i.bits == 32) {
        r = CompareLanes(how, Source<uint32_t>(c, 2), Source<uint32_t>(c, 3));
      } else if (i.bits == 64 && i.kind == 's') {
        r = CompareLanes(how, Source<int64_t>(c, 2), Source<int64_t>(c, 3));
      } else if (i.bits == 64) {
        r = CompareLanes(how, Source<uint64_t>(c, 2), Source<uint64_t>(c, 3));
      } else {
        int64_t a[32], b[32];
        for (int l = 0; l < 32; ++l) {
          a[l] = static_cast<int64_t>(Truncate(Value(c, 2, l), i.bits));
          b[l] = static_cast<int64_t>(Truncate(Value(c, 3, l), i.bits));
          if (i.kind == 's') {
            a[l] = Extend(static_cast<uint64_t>(a[l]), i.bits);
            b[l] = Extend(static_cast<uint64_t>(b[l]), i.bits);
          }
        }
        r = CompareLanes(how, a, b);
      }
      uint32_t both[2] = {r, ~r};
      for (int d = 0; d < 2; ++d) {
        if (c.operands[d].kind == kSink) continue;
        uint32_t value = both[d];
        if (i.extra != 0) {
          const uint32_t other = i.count < 0 ? ~*Source<uint32_t>(c, 4) : *Source<uint32_t>(c, 4);
          value = i.extra == 1 ? value & other : i.extra == 2 ? value | other : value ^ other;
        }
        uint32_t& destination = *Destination<uint32_t>(c, d);
        destination = (destination & ~c.mask) | (value & c.mask);
      }
      return Step::kNext;
    }
    case Op::selp: {
      const uint32_t p = *Source<uint32_t>(c, 3);
      if (i.bits == 64) {
        const uint64_t *a = Source<uint64_t>(c, 1), *b = Source<uint64_t>(c, 2);
        uint64_t r[32];
        for (int l = 0; l < 32; ++l) r[l] = p >> l & 1 ? a[l] : b[l];
        Blend(Destination<uint64_t>(c, 0), r, c.mask);
      } else {
        const uint32_t *a = Source<uint32_t>(c, 1), *b = Source<uint32_t>(c, 2);
        uint32_t r[32];
        for (int l = 0; l < 32; ++l) r[l] = p >> l & 1 ? a[l] : b[l];
        Blend(Destination<uint32_t>(c, 0), r, c.mask);
      }
      return Step::kNext;
    }
    case Op::cvt:
    case Op::cvt_pack: Convert(c); return Step::kNext;
    case Op::cvta_shared:
      for (int l = 0; l < 32; ++l) {
        if (c.mask >> l & 1) Put(c, 0, l, Value(c, 1, l) | kSharedWindow);
      }
      return Step::kNext;
    case Op::cvta_to_shared:
      for (int l = 0; l < 32; ++l) {
        if (c.mask >> l & 1) Put(c, 0, l, Truncate(Value(c, 1, l), 32));
      }
      return Step::kNext;
    case Op::mapa:
      for (int l = 0; l < 32; ++l) {
        if (c.mask >> l & 1) Put(c, 0, l, (Value(c, 1, l) & kOffsetMask) | Value(c, 2, l) << kRankShift);
      }
      return Step::kNext;
    case Op::shfl:
      if (!Converged(c, Source<uint32_t>(c, 5)[lane])) return Step::kBlocked;
      Shuffle(c);
      return Step::kNext;
    case Op::vote: {
      const uint32_t members = Source<uint32_t>(c, 2)[lane];
      if (!Converged(c, members)) return Step::kBlocked;
      const uint32_t p = *Source<uint32_t>(c, 1);
      const uint32_t true_lanes = (i.extra ? ~p : p) & c.mask & members;
      uint32_t r = true_lanes;
      const uint32_t all = c.mask & members;
      switch (static_cast<Vote>(i.variant)) {
        case Vote::ballot: break;
        case Vote::any: r = true_lanes != 0; break;
        case Vote::all: r = true_lanes == all; break;
        case Vote::uni: r = true_lanes == 0 || true_lanes == all; break;
      }
      for (int l = 0; l < 32; ++l) {
        if (c.mask >> l & 1) Put(c, 0, l, r);
      }
      return Step::kNext;
    }
    case Op::elect: {
      const uint32_t members = Source<uint32_t>(c, 2)[lane];
      if (!Converged(c, members)) return Step::kBlocked;
      for (int l = 0; l < 32; ++l) {
        if (!(c.mask >> l & 1)) continue;
        Put(c, 0, l, static_cast<uint64_t>(lane));
        Put(c, 1, l, l == lane);
      }
      return Step::kNext;
    }
    case Op::activemask:
      for (int l = 0; l < 32; ++l) {
        if (c.mask >> l & 1) Put(c, 0, l, c.mask);
      }
      return Step::kNext;
    case Op::nop: return Step::kNext;
    case Op::trap: Fail("protocol", c.site(*this), "the kernel stopped itself with trap");
    case Op::setmaxnreg: {
      if (!Converged(c, ~0u)) return Step::kBlocked;
      return SetRegisters(c);
    }
    case Op::bar_warp_sync: {
      const uint32_t members = Source<uint32_t>(c, 0)[lane];
      if (!Converged(c, members)) return Step::kBlocked;
      if (options_.races) {
        // Every member knows what any of them knew.
        Clocks all = c.warp.lanes[lane];
        for (int l = 0; l < 32; ++l) {
          if (c.mask & members & 1u << l) Join(all, c.warp.lanes[l]);
        }
        for (int l = 0; l < 32; ++l) {
          if (c.mask & members & 1u << l) c.warp.lanes[l] = all;
        }
        Tick(c.warp);
      }
      return Step::kNext;
    }
    case Op::bar_sync: return BarSync(c, true);
    case Op::bar_arrive: return BarSync(c, false);
    case Op::cluster_arrive: ClusterArrive(c); return Step::kNext;
    case Op::cluster_wait: return ClusterWait(c);
    case Op::fence: FenceThread(c); return Step::kNext;
    case Op::fence_proxy_async: FenceAsync(c); return Step::kNext;
    case Op::fence_mbarrier_init: FenceMbarrierInit(c); return Step::kNext;
    case Op::mbarrier_init:
    case Op::mbarrier_inval: MbarrierInit(c); return Step::kNext;
    case Op::mbarrier_arrive:
    case Op::mbarrier_expect_tx:
    case Op::mbarrier_complete_tx: MbarrierArrive(c); return Step::kNext;
    case Op::mbarrier_wait: return MbarrierWait(c);
    case Op::ld:
    case Op::st: LoadStore(c); return Step::kNext;
    case Op::st_async: StoreAsync(c); return Step::kNext;
    case Op::atom: AtomicOp(c); return Step::kNext;
    case Op::stmatrix:
    case Op::ldmatrix:
      if (!Converged(c, ~0u)) return Step::kBlocked;
      Matrix(c);
      return Step::kNext;
    case Op::tma_load: TmaLoad(c); return Step::kNext;
    case Op::tma_store: TmaStore(c); return Step::kNext;
    case Op::bulk_load: BulkLoad(c); return Step::kNext;
    case Op::bulk_store: BulkStore(c); return Step::kNext;
    case Op::bulk_commit: BulkCommit(c); return Step::kNext;
    case Op::bulk_wait: return BulkWait(c);
    case Op::prefetch_tensormap: {
      uint8_t map[128];
      ReadGlobal(c.site(*this), *c.warp.cta->cluster, Address(c, 0, lane), 128, LaneActor(c, lane), map);
      return Step::kNext;
    }
    case Op::tensormap_replace: TensorMapReplace(c); return Step::kNext;
    case Op::wgmma_fence:
      if (!Converged(c, ~0u)) return Step::kBlocked;
      c.warp.fence_needed = false;
      return Step::kNext;
    case Op::wgmma_commit:
      if (!Converged(c, ~0u)) return Step::kBlocked;
      WgmmaCommit(c);
      return Step::kNext;
    case Op::wgmma_wait:
      if (!Converged(c, ~0u)) return Step::kBlocked;
      WgmmaWait(c);
      return Step::kNext;
    case Op::wgmma_mma:
      if (!Converged(c, ~0u)) return Step::kBlocked;
      WgmmaIssue(c);
      return Step::kNext;
    case Op::tc_alloc:
      if (!Converged(c, ~0u)) return Step::kBlocked;
      return TcAlloc(c);
    case Op::tc_dealloc:
    case Op::tc_relinquish:
      if (!Converged(c, ~0u)) return Step::kBlocked;
      TcDealloc(c);
      return Step::kNext;
    case Op::tc_mma: TcMma(c); return Step::kNext;
    case Op::tc_commit: TcCommit(c); return Step::kNext;
    case Op::tc_cp: TcCp(c); return Step::kNext;
    case Op::tc_ld:
    case Op::tc_st:
      if (!Converged(c, ~0u)) return Step::kBlocked;
      TcLoadStore(c);
      return Step::kNext;
    case Op::tc_wait:
    case Op::tc_fence: return Step::kNext;
    case Op::clc_try_cancel: TryCancel(c); return Step::kNext;
    case Op::clc_is_canceled:
    case Op::clc_first_ctaid: {
      // The response is opaque to programs; here it is {x, y, z, whether there is one}.
      const uint64_t* low = Source<uint64_t>(c, 1);
      const uint64_t* high = low + 32;
      for (int l = 0; l < 32; ++l) {
        if (!(c.mask >> l & 1)) continue;
        const uint64_t words[4] = {low[l] & 0xffffffff, low[l] >> 32, high[l] & 0xffffffff, high[l] >> 32};
        Put(c, 0, l, i.op() == Op::clc_is_canceled ? words[3] & 1 : words[i.extra]);
      }
      return Step::kNext;
    }
    case Op::bra:
    case Op::ret: return Step::kNext;  // run by the scheduler
    default: Alu(c); return Step::kNext;
  }
}

}  // namespace ptx
