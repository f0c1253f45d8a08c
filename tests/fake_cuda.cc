// What `ffi/cuda_runtime.cc` uses of the CUDA driver and of the CuTe DSL's runtime, for tests without a GPU: three
// devices, contexts per thread, and loads that are counted. Built as libcuda.so.1, which is also the runtime library.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr int kDevices = 3;
constexpr int kInvalidDevice = 101;
constexpr int kInvalidContext = 201;
constexpr int kLaunchFailed = 719;

char contexts[kDevices];
thread_local std::vector<void*> stack;

struct Module {
  int device;
  std::string object;
};

std::mutex mutex;
std::map<std::pair<int, std::string>, int> loads;

int CurrentDevice() { return stack.empty() ? -1 : static_cast<int>(static_cast<char*>(stack.back()) - contexts); }

}  // namespace

extern "C" {

int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return ordinal < 0 || ordinal >= kDevices ? kInvalidDevice : 0;
}
int cuCtxGetDevice(int* device) {
  *device = CurrentDevice();
  return *device < 0 ? kInvalidContext : 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = attribute == 16 ? 100 + device : attribute == 75 ? (device == 2 ? 10 : 9) : 0;
  return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = &contexts[device];
  return 0;
}
int cuCtxGetCurrent(void** context) {
  *context = stack.empty() ? nullptr : stack.back();
  return 0;
}
int cuCtxPushCurrent_v2(void* context) {
  stack.push_back(context);
  return 0;
}
int cuCtxPopCurrent_v2(void** context) {
  *context = stack.back();
  stack.pop_back();
  return 0;
}
int cuMemsetD8Async(uint64_t data, unsigned char value, size_t count, void*) {
  if (CurrentDevice() < 0) return kInvalidContext;
  std::memset(reinterpret_cast<void*>(data), value, count);
  return 0;
}
int cuGetErrorName(int error, const char** name) {
  *name = error == kInvalidDevice    ? "CUDA_ERROR_INVALID_DEVICE"
          : error == kInvalidContext ? "CUDA_ERROR_INVALID_CONTEXT"
          : error == kLaunchFailed   ? "CUDA_ERROR_LAUNCH_FAILED"
                                     : nullptr;
  return *name == nullptr ? 1 : 0;
}

int CuteDSLRT_Module_Create_From_Bytes(void** module, const unsigned char* bytes, size_t size, const char**, size_t) {
  const std::string object(reinterpret_cast<const char*>(bytes), size);
  if (object == "damaged") return 2;
  if (CurrentDevice() < 0) return 1;
  const std::lock_guard lock(mutex);
  ++loads[{CurrentDevice(), object}];
  *module = new Module{CurrentDevice(), object};
  return 0;
}
int CuteDSLRT_Module_Get_Function(void** function, void* module, const char* prefix) {
  *function = module;
  return std::strcmp(prefix, "jax_ggemm") == 0 ? 0 : 7;
}
// The arguments are an int that the launch writes its device to, and the status.
int CuteDSLRT_Function_Run(void* function, void** arguments, size_t count) {
  const auto& module = *static_cast<const Module*>(function);
  if (count != 2) return 7;
  *static_cast<int32_t*>(arguments[1]) = module.object == "failing"         ? kLaunchFailed
                                         : CurrentDevice() != module.device ? kInvalidContext
                                                                            : 0;
  *static_cast<int32_t*>(arguments[0]) = module.device;
  return 0;
}
const char* CuteDSLRT_GetErrorName(int error) { return error == 2 ? "InvalidBinary" : "Other"; }

// For the test: how often an object was loaded on a device, and how many contexts this thread has on its stack.
int FakeLoads(int device, const char* object) {
  const std::lock_guard lock(mutex);
  const auto found = loads.find({device, object});
  return found == loads.end() ? 0 : found->second;
}
size_t FakeContexts() { return stack.size(); }
}
