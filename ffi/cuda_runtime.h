// Kernel objects on NVIDIA GPUs: known by their bytes, loaded on first use, one module per key and device.
//
// Nothing here needs CUDA to compile or to load: the driver and the CuTe DSL's runtime library are opened when the
// first kernel is. Every function is thread-safe, and may be called for any device whatever context is current.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace jax_ggemm {

// A GPU of this process.
struct Device {
  void* context = nullptr;  // its primary context, which is the one that XLA uses
  int32_t ordinal = 0;
  int32_t multiprocessors = 0;
  std::string architecture;  // as "sm_90"
};

// A loaded kernel on one device.
struct Kernel {
  const Device* device = nullptr;
  void* function = nullptr;
};

// The device of this ordinal, or the current one for a negative ordinal. Returns nullptr and fills `error` where there
// is none.
const Device* FindDevice(int32_t ordinal, std::string* error);

// The kernel of this key on a device. Returns nullptr and fills `error` where there is none. A kernel that is loaded
// is found without loading, allocation or a call into the driver.
const Kernel* FindKernel(const Device& device, std::string_view key, std::string* error);

// Makes the object of a key known in this process. The first bytes of a key stay.
void AddObject(std::string_view key, std::string_view object);

// Whether the key's object is known in this process.
bool IsKnown(std::string_view key);

// Launches a kernel. `arguments` are pointers to its arguments, a stream first. Returns an empty string, or what went
// wrong.
std::string Launch(const Kernel& kernel, void* const* arguments, size_t count);

// Fills memory of a device with zeros. Returns an empty string, or what went wrong.
std::string Clear(const Device& device, void* data, size_t bytes, void* stream);

}  // namespace jax_ggemm
