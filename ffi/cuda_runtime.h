// Kernel objects on NVIDIA GPUs: registered by Python as bytes, loaded on first use, one module per key and device.
//
// Nothing here needs CUDA to compile or to load: the driver and the CuTe DSL's runtime library are opened when the
// first kernel is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace jax_ggemm {

// A loaded kernel on one device.
struct Kernel {
  void* function;
  int32_t multiprocessors;
};

// The kernel of this key on the current device. Returns nullptr and fills `error` where there is none.
// Thread-safe; a kernel that is loaded is found without loading, allocation or a call into the driver's loader.
const Kernel* FindKernel(std::string_view key, std::string* error);

// Whether the key's bytes are known in this process.
bool IsRegistered(std::string_view key);

// Launches a kernel. `arguments` are pointers to its arguments. Returns an empty string, or what went wrong.
std::string Launch(const Kernel& kernel, void* const* arguments, size_t count);

}  // namespace jax_ggemm
