// Places in TMEM.
#pragma once
#include <cstdint>

namespace ptx {

constexpr uint32_t kTmemLanes = 128, kTmemColumns = 512;

inline uint32_t ColumnOf(uint32_t address) { return address & 0xffff; }
// Bits 30 and 31 carry a scale factor's number.
inline uint32_t LaneOf(uint32_t address) { return address >> 16 & 0x3fff; }

}  // namespace ptx
