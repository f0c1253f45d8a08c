// Stands in for the CUDA runtime under the host code of a CuTe DSL object: device memory is this process's memory, and
// a launch becomes a call of whoever asked for it. Signatures as NVIDIA's documentation declares them.
#include <cstdint>
#include <cstring>
#include <string>

namespace {

struct Dim3 {
  uint32_t x, y, z;
};

struct Attribute {  // cudaLaunchAttribute: 72 bytes
  int32_t id;
  int32_t padding;
  uint32_t value[16];
};
static_assert(sizeof(Attribute) == 72);
constexpr int32_t kClusterDimension = 4;

struct LaunchConfig {  // cudaLaunchConfig_t
  Dim3 grid, block;
  size_t shared_bytes;
  void* stream;
  const Attribute* attributes;
  uint32_t attribute_count;
};

struct Kernel {
  std::string name;
  int32_t allowed_shared_bytes = 48 * 1024;
};

using LaunchCallback = int32_t (*)(const char* kernel, const uint32_t* grid, const uint32_t* block,
                                   const uint32_t* cluster, uint64_t shared_bytes, uint64_t allowed_shared_bytes,
                                   void** arguments);
LaunchCallback launch_callback = nullptr;

constexpr int kMaxSharedOptIn = 97;        // cudaDevAttrMaxSharedMemoryPerBlockOptin
constexpr int kMultiprocessors = 16;       // cudaDevAttrMultiProcessorCount
constexpr int kDynamicSharedSize = 8;      // cudaFuncAttributeMaxDynamicSharedMemorySize
constexpr int kSharedOptInBytes = 232448;  // of Hopper and of Blackwell
constexpr int kErrorInvalidValue = 1;
constexpr int kErrorNotSupported = 801;

}  // namespace

extern "C" {

void ptx_emulator_on_launch(LaunchCallback callback) { launch_callback = callback; }

int _cudaLibraryLoadData(void** library, const void* code, void*, void*, unsigned, void*, void*, unsigned) {
  *library = const_cast<void*>(code);
  return 0;
}

int _cudaLibraryGetKernel(void** kernel, void*, const char* name) {
  *kernel = new Kernel{name};  // a kernel lives as long as its library, which stays
  return 0;
}

int _cudaDeviceGetAttribute(int* value, int attribute, int) {
  switch (attribute) {
    case kMaxSharedOptIn:
      *value = kSharedOptInBytes;
      return 0;
    case kMultiprocessors:
      *value = 4;
      return 0;
    default:
      return kErrorNotSupported;
  }
}

int _cudaGetDevice(int* device) {
  *device = 0;
  return 0;
}

int _cudaSetDevice(int) { return 0; }

int _cudaGetDeviceCount(int* count) {
  *count = 1;
  return 0;
}

int _cuKernelGetAttribute(int* value, int, void*, int) {
  *value = 0;  // no static shared memory
  return 0;
}

int _cudaKernelSetAttributeForDevice(void* kernel, int attribute, int value, int) {
  if (attribute == kDynamicSharedSize) static_cast<Kernel*>(kernel)->allowed_shared_bytes = value;
  return 0;
}

int _cudaFuncSetAttribute(void* kernel, int attribute, int value) {
  return _cudaKernelSetAttributeForDevice(kernel, attribute, value, 0);
}

int _cudaLaunchKernelEx(const LaunchConfig* config, void* function, void** arguments) {
  const auto* kernel = static_cast<const Kernel*>(function);
  uint32_t cluster[3] = {1, 1, 1};
  for (uint32_t i = 0; i < config->attribute_count; ++i) {
    if (config->attributes[i].id == kClusterDimension)
      std::memcpy(cluster, config->attributes[i].value, sizeof(cluster));
  }
  const uint32_t grid[3] = {config->grid.x, config->grid.y, config->grid.z};
  const uint32_t block[3] = {config->block.x, config->block.y, config->block.z};
  if (launch_callback == nullptr) return kErrorInvalidValue;
  return launch_callback(kernel->name.c_str(), grid, block, cluster, config->shared_bytes,
                         static_cast<uint64_t>(kernel->allowed_shared_bytes), arguments);
}

}  // extern "C"
