// Matrix operands in shared memory, as the descriptors of both kinds of tensor core describe them.
#include "products.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "machine.h"
#include "numbers.h"
#include "tensormap.h"

namespace ptx {
namespace {

struct Descriptor {
  uint32_t start, leading, stride;  // bytes
  int swizzle;                      // 0 none, 1 32B, 2 64B, 3 128B
  int atomicity;
};

}  // namespace

void Machine::LoadTile(const Site& site, Cta& cta, const Matrix2d& matrix, const Actor& actor, Tile& tile) {
  const auto field = [&](int at, int width) {
    return static_cast<uint32_t>(matrix.descriptor >> at & ((uint64_t{1} << width) - 1));
  };
  Descriptor d{field(0, 14) << 4, field(16, 14) << 4, field(32, 14) << 4, 0, 0};
  if (options_.blackwell) {
    constexpr int kSwizzle[8] = {0, 3, 3, -1, 2, -1, 1, -1};
    if (field(46, 3) != 1) Fail("protocol", site, "bits 46 to 48 of the descriptor are not 1, which sm_100 expects");
    if (field(52, 1) != 0 || field(49, 3) != 0) Fail("unsupported", site, "a descriptor with base offset or LBO mode");
    d.swizzle = kSwizzle[field(61, 3)];
    d.atomicity = field(61, 3) == 1;
  } else {
    constexpr int kSwizzle[4] = {0, 3, 2, 1};
    if (field(49, 3) != 0) Fail("unsupported", site, "a descriptor with base offset");
    d.swizzle = kSwizzle[field(62, 2)];
  }
  if (d.swizzle < 0) Fail("protocol", site, "no such swizzle in the descriptor");

  const int element = BytesOf(matrix.format), per_chunk = PerChunk(matrix.format);
  const uint32_t pitch = 16u << d.swizzle;
  const uint32_t end = kReservedShared + options_.shared_bytes;
  const int rows = matrix.rows;
  tile.values.resize(static_cast<size_t>(matrix.k) * rows);
  const auto chunk = [&](uint32_t plain, float* to) {
    const uint32_t address = Swizzle(plain, d.swizzle, d.atomicity);
    if (address < kReservedShared || address + 16 > end) {
      Fail("out-of-bounds", site,
           Text("the descriptor %#llx reaches byte %d of shared memory, of which the launch has %u",
                static_cast<unsigned long long>(matrix.descriptor),
                static_cast<int>(address) - static_cast<int>(kReservedShared), options_.shared_bytes));
    }
    uint8_t raw[16];
    ReadShared(site, cta, address, 16, actor, raw);
    Widen(matrix.format, raw, to);
  };
  float values[32];
  if (!matrix.mn_major) {
    for (int r = 0; r < rows; ++r) {
      const uint32_t row = static_cast<uint32_t>(matrix.first_row + r);
      for (int k = 0; k < matrix.k; k += per_chunk) {
        const uint32_t bytes = static_cast<uint32_t>(k / per_chunk * 16);
        const uint32_t plain = d.swizzle == 0 ? d.start + row % 8 * 16 + row / 8 * d.stride + bytes / 16 * d.leading
                                              : d.start + row % 8 * pitch + row / 8 * d.stride + bytes;
        chunk(plain, values);
        for (int j = 0; j < per_chunk; ++j) tile.values[static_cast<size_t>(k + j) * rows + r] = values[j];
      }
    }
    return;
  }
  const uint32_t across = pitch / static_cast<uint32_t>(element);  // elements of a swizzled row
  const uint32_t group = d.atomicity ? 4 : 8;
  for (int k = 0; k < matrix.k; ++k) {
    const uint32_t depth = static_cast<uint32_t>(k);
    for (int r = 0; r < rows; r += per_chunk) {
      const uint32_t row = static_cast<uint32_t>(matrix.first_row + r);
      const uint32_t plain =
          d.swizzle == 0
              ? d.start + depth % 8 * 16 + row / static_cast<uint32_t>(per_chunk) * d.stride + depth / 8 * d.leading
              : d.start + row % across * static_cast<uint32_t>(element) + depth % group * pitch +
                    depth / group * d.stride + row / across * d.leading;
      chunk(plain, values);
      std::memcpy(&tile.values[static_cast<size_t>(k) * rows + r], values, static_cast<size_t>(per_chunk) * 4);
    }
  }
}

void MultiplyAdd(const float* a, int a_rows, const float* b, int b_rows, int k, int rows, int columns, float* sums) {
  for (int m = 0; m < rows; ++m) {
    float* to = sums + static_cast<size_t>(m) * columns;
    for (int depth = 0; depth < k; ++depth) {
      const float x = a[static_cast<size_t>(depth) * a_rows + m];
      const float* y = b + static_cast<size_t>(depth) * b_rows;
      for (int n = 0; n < columns; ++n) to[n] += x * y[n];
    }
  }
}

namespace {

constexpr int32_t kNone = -100000;    // exponent of zero
constexpr int32_t kBeyond = 1000000;  // of infinities and NaN: larger than any other, also beside a zero
constexpr int kKept = 25;             // bits below the largest exponent

int32_t ExponentOf(float value, int lowest) {
  if (value == 0) return kNone;
  const int32_t field = static_cast<int32_t>(BitCast<uint32_t>(value) >> 23 & 255);
  if (field != 0) return std::max(field - 127, lowest);
  int e = 0;
  std::frexp(value, &e);
  return std::max(e - 1, lowest);
}

// A sum of many bits to float32, towards zero; to infinity where it is too large.
float CutOff(double value) {
  if (std::fabs(value) >= 0x1p128)
    return std::copysign(std::numeric_limits<float>::infinity(), static_cast<float>(value));
  const float nearest = static_cast<float>(value);
  if (std::fabs(static_cast<double>(nearest)) <= std::fabs(value)) return nearest;
  return BitCast<float>(BitCast<uint32_t>(nearest) - 1);
}

// One element, wherever its exponents lie.
float AddProducts(const float* a, const int32_t* a_exponents, int a_rows, const float* b, const int32_t* b_exponents,
                  int b_rows, int k, float sum) {
  bool finite = std::isfinite(sum);
  int32_t largest = ExponentOf(sum, -126);
  for (int depth = 0; depth < k; ++depth) {
    finite = finite && std::isfinite(a[depth * a_rows]) && std::isfinite(b[depth * b_rows]);
    largest = std::max(largest, a_exponents[depth * a_rows] + b_exponents[depth * b_rows]);
  }
  if (!finite) {
    double total = sum;  // finite products stay finite
    for (int depth = 0; depth < k; ++depth) total += static_cast<double>(a[depth * a_rows]) * b[depth * b_rows];
    return Canonical(static_cast<float>(total));
  }
  if (largest <= kNone / 2) return 0;  // -0 too
  double total = std::trunc(std::ldexp(static_cast<double>(sum), kKept - largest));
  for (int depth = 0; depth < k; ++depth) {
    const double product = static_cast<double>(a[depth * a_rows]) * b[depth * b_rows];
    total += std::trunc(std::ldexp(product, kKept - largest));
  }
  return CutOff(std::ldexp(total, largest - kKept)) + 0.0f;  // never -0
}

}  // namespace

void Exponents(const std::vector<float>& values, int lowest, std::vector<int32_t>& exponents) {
  exponents.resize(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    const uint32_t bits = BitCast<uint32_t>(values[i]);
    const int32_t field = static_cast<int32_t>(bits >> 23 & 255);
    const int32_t e = field == 255 ? kBeyond : std::max(field - 127, lowest);
    exponents[i] = (bits & 0x7fffffff) == 0 ? kNone : e;
  }
}

void MultiplyAddTruncating(const float* a, const int32_t* a_exponents, int a_rows, const float* b,
                           const int32_t* b_exponents, int b_rows, int k, int rows, int columns, float* sums) {
  constexpr int kColumns = 256;
  // In this range neither a scaled product nor its scale leaves float32.
  constexpr int32_t kLowest = -90, kHighest = 90;
  int32_t largest[kColumns], low[kColumns], high[kColumns];
  float scale[kColumns];
  for (int m = 0; m < rows; ++m) {
    float* to = sums + static_cast<size_t>(m) * columns;
    for (int n = 0; n < columns; ++n) {
      const int32_t bits = BitCast<int32_t>(to[n]);
      const int32_t field = bits >> 23 & 255;
      largest[n] = (bits & 0x7fffffff) == 0 ? kNone : field == 255 ? kBeyond : field == 0 ? -126 : field - 127;
    }
    for (int depth = 0; depth < k; ++depth) {
      const int32_t e = a_exponents[static_cast<size_t>(depth) * a_rows + m];
      const int32_t* f = b_exponents + static_cast<size_t>(depth) * b_rows;
      for (int n = 0; n < columns; ++n) largest[n] = largest[n] > e + f[n] ? largest[n] : e + f[n];
    }
    bool ordinary = true;
    for (int n = 0; n < columns; ++n) {
      const int32_t e = largest[n];
      const bool zero = e < kNone / 2;
      ordinary &= zero | ((e >= kLowest) & (e <= kHighest));
      const int32_t clamped = zero ? 0 : e < kLowest ? kLowest : e > kHighest ? kHighest : e;
      largest[n] = clamped;
      scale[n] = BitCast<float>((127 + kKept - clamped) << 23);
    }
    if (!ordinary) {
      for (int n = 0; n < columns; ++n) {
        to[n] = AddProducts(a + m, a_exponents + m, a_rows, b + n, b_exponents + n, b_rows, k, to[n]);
      }
      continue;
    }
    for (int n = 0; n < columns; ++n) {
      low[n] = static_cast<int32_t>(to[n] * scale[n]);
      high[n] = 0;
    }
    // A product is below 2^27 units: eight of them and the sum fit 32 bits.
    for (int depth = 0; depth < k; ++depth) {
      const float x = a[static_cast<size_t>(depth) * a_rows + m];
      const float* y = b + static_cast<size_t>(depth) * b_rows;
      int32_t* part = depth < k / 2 ? low : high;
      for (int n = 0; n < columns; ++n) part[n] += static_cast<int32_t>(x * y[n] * scale[n]);
    }
    for (int n = 0; n < columns; ++n) {
      const double total = static_cast<double>(low[n]) + high[n];
      const double value = total * BitCast<double>(static_cast<int64_t>(1023 - kKept + largest[n]) << 52);
      const float nearest = static_cast<float>(value);
      const bool up = std::fabs(static_cast<double>(nearest)) > std::fabs(value);
      to[n] = BitCast<float>(BitCast<uint32_t>(nearest) - up);
    }
  }
}

}  // namespace ptx
