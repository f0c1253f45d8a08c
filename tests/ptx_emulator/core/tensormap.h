// The first 64 bytes of a CUtensorMap: what the TMA unit reads. Positions of fields as measured on an H200.
#pragma once
#include <array>
#include <cstdint>
#include <cstring>

namespace ptx {

struct TensorMap {
  uint64_t address = 0;
  int rank = 1, format = 0, interleave = 0, swizzle = 0, atomicity = 0;
  bool fills_with_nan = false;
  uint32_t element_bytes = 0;
  int packed = 1;                                          // elements per byte-sized unit
  std::array<uint64_t, 5> dims{1, 1, 1, 1, 1}, strides{};  // bytes; strides[0] is the element's size
  std::array<uint32_t, 5> box{1, 1, 1, 1, 1}, steps{1, 1, 1, 1, 1};

  uint64_t BoxBytes() const {
    uint64_t bytes = element_bytes;
    for (int i = 0; i < rank; ++i) bytes *= box[i];
    return bytes;
  }
};

// 0 for a format that is not known.
inline uint32_t FormatBytes(int format) {
  constexpr uint32_t kBytes[16] = {1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2, 1, 0, 0, 0, 0};
  return kBytes[format & 15];
}
constexpr int kFormatPacked4 = 11;

inline TensorMap DecodeTensorMap(const uint8_t* bytes) {
  uint64_t w[8];
  std::memcpy(w, bytes, sizeof(w));
  const auto field = [](uint64_t word, int at, int width) { return word >> at & ((uint64_t{1} << width) - 1); };
  TensorMap map;
  map.address = field(w[0], 0, 57);
  map.rank = static_cast<int>(field(w[1], 4, 3)) + 1;
  map.format = static_cast<int>(field(w[1], 7, 4));
  map.interleave = static_cast<int>(field(w[1], 11, 2));
  map.swizzle = static_cast<int>(field(w[1], 13, 2));
  map.fills_with_nan = field(w[1], 15, 1);
  map.atomicity = static_cast<int>(field(w[1], 19, 2));
  map.element_bytes = FormatBytes(map.format);
  const uint64_t strides[4] = {
      field(w[1], 32, 32) | field(w[3], 32, 4) << 32, field(w[2], 0, 32) | field(w[3], 36, 4) << 32,
      field(w[2], 32, 32) | field(w[3], 40, 4) << 32, field(w[3], 0, 32) | field(w[3], 44, 4) << 32};
  const uint64_t dims[5] = {field(w[4], 0, 32), field(w[4], 32, 32), field(w[5], 0, 32), field(w[5], 32, 32),
                            field(w[6], 0, 32)};
  const uint64_t box[5] = {field(w[6], 56, 8), field(w[7], 0, 8), field(w[7], 8, 8), field(w[7], 16, 8),
                           field(w[7], 24, 8)};
  map.strides[0] = map.element_bytes;
  for (int i = 0; i < map.rank && i < 5; ++i) {
    map.dims[i] = dims[i] + 1;
    map.box[i] = static_cast<uint32_t>(box[i]) + 1;
    map.steps[i] = static_cast<uint32_t>(field(w[6], 32 + 3 * i, 3)) + 1;
    if (i > 0) map.strides[i] = strides[i - 1] << 4;
  }
  if (map.format == kFormatPacked4) {  // two elements to a byte
    map.packed = 2;
    map.dims[0] /= 2;
    map.box[0] /= 2;
  }
  return map;
}

// Where a byte of shared memory lies under a swizzle of 0, 32, 64 or 128 bytes (mode 0 to 3).
inline uint32_t Swizzle(uint32_t address, int mode, int atomicity) {
  if (mode == 0) return address;
  if (mode == 3 && atomicity == 1) return address ^ ((address >> 7 & 3) << 5);
  return address ^ ((address >> 7 & ((1u << mode) - 1)) << 4);
}

}  // namespace ptx
