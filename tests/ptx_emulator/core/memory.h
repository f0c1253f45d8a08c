// Global memory: the buffers of this process that a kernel may touch.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "shadow.h"

namespace ptx {

struct Buffer {
  std::string name;
  uint64_t start = 0, end = 0;
  bool writable = false;
  uint8_t* written = nullptr;  // a byte per byte; nullptr where all hold values
  std::unique_ptr<Shadow> shadow;
  std::vector<uint8_t> coherence;  // a byte per byte, where the program has ld.global.nc: kStored, kNonCoherent
};

constexpr uint8_t kStored = 1, kNonCoherent = 2;

class GlobalMemory {
 public:
  void Add(Buffer buffer) { buffers_.push_back(std::move(buffer)); }

  template <typename F>
  void ForEach(const F& f) {
    for (Buffer& buffer : buffers_) f(buffer);
  }

  // The buffer that holds all of [address, address + bytes), or nullptr.
  Buffer* Find(uint64_t address, uint64_t bytes) {
    if (last_ != nullptr && Holds(*last_, address, bytes)) return last_;
    for (Buffer& buffer : buffers_) {
      if (Holds(buffer, address, bytes)) return last_ = &buffer;
    }
    return nullptr;
  }

  // The buffer that an address lies in or close behind, for a report.
  std::string Nearest(uint64_t address) const {
    std::string text = "no buffer is near";
    uint64_t best = 1 << 24;
    for (const Buffer& buffer : buffers_) {
      if (address >= buffer.start && address - buffer.start < buffer.end - buffer.start + best) {
        best = address - buffer.start;
        text = "buffer " + buffer.name + " has " + std::to_string(buffer.end - buffer.start) +
               " bytes, the access is at byte " + std::to_string(best);
      } else if (address < buffer.start && buffer.start - address < best) {
        best = buffer.start - address;
        text = "buffer " + buffer.name + " begins " + std::to_string(best) + " bytes behind it";
      }
    }
    return text;
  }

 private:
  static bool Holds(const Buffer& buffer, uint64_t address, uint64_t bytes) {
    return address >= buffer.start && bytes <= buffer.end - buffer.start &&
           address - buffer.start <= buffer.end - buffer.start - bytes;
  }

  std::vector<Buffer> buffers_;
  Buffer* last_ = nullptr;
};

}  // namespace ptx
