#include "cuda_runtime.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <utility>

namespace jax_ggemm {
namespace {

// The few functions of NVIDIA's libraries that are used, as their documentation declares them.
struct Driver {
  int (*get_current_device)(int* device) = nullptr;                                        // cuCtxGetDevice
  int (*get_device)(int* device, int ordinal) = nullptr;                                   // cuDeviceGet
  int (*get_attribute)(int* value, int attribute, int device) = nullptr;                   // cuDeviceGetAttribute
  int (*retain_context)(void** context, int device) = nullptr;                             // cuDevicePrimaryCtxRetain
  int (*get_context)(void** context) = nullptr;                                            // cuCtxGetCurrent
  int (*push_context)(void* context) = nullptr;                                            // cuCtxPushCurrent
  int (*pop_context)(void** context) = nullptr;                                            // cuCtxPopCurrent
  int (*clear)(uint64_t data, unsigned char value, size_t count, void* stream) = nullptr;  // cuMemsetD8Async
  int (*error_name)(int error, const char** name) = nullptr;                               // cuGetErrorName
};
constexpr int kMultiprocessorCount = 16;     // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
constexpr int kComputeCapabilityMajor = 75;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
constexpr int kComputeCapabilityMinor = 76;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR

struct DslRuntime {
  // CuteDSLRT_Module_Create_From_Bytes, _Module_Get_Function, _Function_Run and _GetErrorName.
  int (*create_module)(void** module, const unsigned char* bytes, size_t size, const char** libraries,
                       size_t library_count) = nullptr;
  int (*get_function)(void** function, void* module, const char* prefix) = nullptr;
  int (*run)(void* function, void** arguments, size_t count) = nullptr;
  const char* (*error_name)(int error) = nullptr;
};

// What `kernel/build.py` calls the function in every object.
constexpr char kPrefix[] = "jax_ggemm";
constexpr size_t kMaxArguments = 32;

// Written under `mutex`; what was opened, a device and a kernel never change afterwards, nor move.
struct State {
  std::shared_mutex mutex;
  std::string runtime_path;
  std::map<std::string, std::string, std::less<>> objects;            // by key
  std::map<int, Device> devices;                                      // by ordinal
  std::map<int, std::map<std::string, Kernel, std::less<>>> kernels;  // by ordinal and key
  Driver driver;
  DslRuntime runtime;
  bool has_driver = false;
  bool has_runtime = false;
};

// Never destroyed: XLA's threads may still run at exit.
State& TheState() {
  static State& state = *new State;
  return state;
}

template <typename F>
bool Resolve(void* library, const char* name, F* function, std::string* error) {
  *function = reinterpret_cast<F>(dlsym(library, name));
  if (*function == nullptr) *error = std::string("no symbol ") + name + " in NVIDIA's library";
  return *function != nullptr;
}

void* OpenLibrary(const char* path, std::string* error) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) *error = dlerror();
  return library;
}

bool OpenDriver(State& state, std::string* error) {
  if (state.has_driver) return true;
  void* library = OpenLibrary("libcuda.so.1", error);
  Driver& driver = state.driver;
  state.has_driver = library != nullptr && Resolve(library, "cuCtxGetDevice", &driver.get_current_device, error) &&
                     Resolve(library, "cuDeviceGet", &driver.get_device, error) &&
                     Resolve(library, "cuDeviceGetAttribute", &driver.get_attribute, error) &&
                     Resolve(library, "cuDevicePrimaryCtxRetain", &driver.retain_context, error) &&
                     Resolve(library, "cuCtxGetCurrent", &driver.get_context, error) &&
                     Resolve(library, "cuCtxPushCurrent_v2", &driver.push_context, error) &&
                     Resolve(library, "cuCtxPopCurrent_v2", &driver.pop_context, error) &&
                     Resolve(library, "cuMemsetD8Async", &driver.clear, error) &&
                     Resolve(library, "cuGetErrorName", &driver.error_name, error);
  return state.has_driver;
}

bool OpenRuntime(State& state, std::string* error) {
  if (state.has_runtime) return true;
  if (state.runtime_path.empty()) {
    *error = "the CuTe DSL's runtime library was not found; jax_ggemm.register() looks for it";
    return false;
  }
  void* library = OpenLibrary(state.runtime_path.c_str(), error);
  DslRuntime& runtime = state.runtime;
  state.has_runtime = library != nullptr &&
                      Resolve(library, "CuteDSLRT_Module_Create_From_Bytes", &runtime.create_module, error) &&
                      Resolve(library, "CuteDSLRT_Module_Get_Function", &runtime.get_function, error) &&
                      Resolve(library, "CuteDSLRT_Function_Run", &runtime.run, error) &&
                      Resolve(library, "CuteDSLRT_GetErrorName", &runtime.error_name, error);
  return state.has_runtime;
}

std::string DriverError(const Driver& driver, int error) {
  const char* name = nullptr;
  if (driver.error_name(error, &name) != 0 || name == nullptr) name = "unknown CUDA error";
  return std::string(name) + " (" + std::to_string(error) + ")";
}

// Makes a device's context the current one of this thread, as long as it lives. XLA's threads need not have one.
class CurrentContext {
 public:
  CurrentContext(const Driver& driver, void* context) : driver_(driver) {
    void* current = nullptr;
    status_ = driver.get_context(&current);
    if (status_ != 0 || current == context) return;
    status_ = driver.push_context(context);
    pushed_ = status_ == 0;
  }
  ~CurrentContext() {
    void* context = nullptr;
    if (pushed_) driver_.pop_context(&context);
  }
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

  int status() const { return status_; }

 private:
  const Driver& driver_;
  int status_ = 0;
  bool pushed_ = false;
};

// nullptr where there is none yet.
template <typename Map, typename Key>
auto Find(Map& map, const Key& key) {
  const auto found = map.find(key);
  return found == map.end() ? nullptr : &found->second;
}

const Kernel* FindLoaded(const State& state, int ordinal, std::string_view key) {
  const auto* of_device = Find(state.kernels, ordinal);
  return of_device == nullptr ? nullptr : Find(*of_device, key);
}

}  // namespace

const Device* FindDevice(int32_t ordinal, std::string* error) {
  State& state = TheState();
  {
    const std::shared_lock lock(state.mutex);
    if (const Device* device = Find(state.devices, ordinal)) return device;
  }
  const std::unique_lock lock(state.mutex);
  if (!OpenDriver(state, error)) return nullptr;
  int device = 0;
  int status = ordinal < 0 ? state.driver.get_current_device(&device) : state.driver.get_device(&device, ordinal);
  if (status != 0) {
    *error = "no CUDA device " + std::to_string(ordinal) + ": " + DriverError(state.driver, status);
    return nullptr;
  }
  if (ordinal < 0) ordinal = device;  // the driver numbers devices as their ordinals
  if (const Device* known = Find(state.devices, ordinal)) return known;
  Device result;
  result.ordinal = ordinal;
  int major = 0, minor = 0;
  status = state.driver.retain_context(&result.context, device);
  if (status == 0) status = state.driver.get_attribute(&result.multiprocessors, kMultiprocessorCount, device);
  if (status == 0) status = state.driver.get_attribute(&major, kComputeCapabilityMajor, device);
  if (status == 0) status = state.driver.get_attribute(&minor, kComputeCapabilityMinor, device);
  if (status != 0) {
    *error = "CUDA device " + std::to_string(ordinal) + ": " + DriverError(state.driver, status);
    return nullptr;
  }
  result.architecture = "sm_" + std::to_string(10 * major + minor);
  return &state.devices.emplace(ordinal, std::move(result)).first->second;
}

const Kernel* FindKernel(const Device& device, std::string_view key, std::string* error) {
  State& state = TheState();
  {
    const std::shared_lock lock(state.mutex);
    if (const Kernel* kernel = FindLoaded(state, device.ordinal, key)) return kernel;
  }
  const std::unique_lock lock(state.mutex);
  if (const Kernel* kernel = FindLoaded(state, device.ordinal, key)) return kernel;
  const std::string* object = Find(state.objects, key);
  if (object == nullptr) {
    *error = "the kernel's object is not known in this process";
    return nullptr;
  }
  if (!OpenRuntime(state, error)) return nullptr;
  const CurrentContext current(state.driver, device.context);
  if (current.status() != 0) {
    *error = "CUDA device " + std::to_string(device.ordinal) + ": " + DriverError(state.driver, current.status());
    return nullptr;
  }
  Kernel kernel{&device};
  void* module = nullptr;
  int status = state.runtime.create_module(&module, reinterpret_cast<const unsigned char*>(object->data()),
                                           object->size(), nullptr, 0);
  if (status == 0) status = state.runtime.get_function(&kernel.function, module, kPrefix);
  if (status != 0) {
    *error = "loading the kernel's object failed on CUDA device " + std::to_string(device.ordinal) + ": " +
             state.runtime.error_name(status);
    return nullptr;
  }
  return &state.kernels[device.ordinal].emplace(std::string(key), kernel).first->second;
}

void AddObject(std::string_view key, std::string_view object) {
  State& state = TheState();
  const std::unique_lock lock(state.mutex);
  state.objects.emplace(key, object);
}

bool IsKnown(std::string_view key) {
  State& state = TheState();
  const std::shared_lock lock(state.mutex);
  return Find(state.objects, key) != nullptr;
}

std::string Launch(const Kernel& kernel, void* const* arguments, size_t count) {
  const State& state = TheState();
  if (count > kMaxArguments) return "too many arguments";
  const CurrentContext current(state.driver, kernel.device->context);
  if (current.status() != 0) return DriverError(state.driver, current.status());
  int32_t cuda_status = 0;
  std::array<void*, kMaxArguments + 1> with_status;
  std::copy(arguments, arguments + count, with_status.begin());
  with_status[count] = &cuda_status;
  const int status = state.runtime.run(kernel.function, with_status.data(), count + 1);
  if (cuda_status != 0) return DriverError(state.driver, cuda_status);
  if (status != 0) return state.runtime.error_name(status);
  return "";
}

std::string Clear(const Device& device, void* data, size_t bytes, void* stream) {
  const Driver& driver = TheState().driver;
  const CurrentContext current(driver, device.context);
  int status = current.status();
  if (status == 0) status = driver.clear(reinterpret_cast<uint64_t>(data), 0, bytes, stream);
  return status == 0 ? "" : DriverError(driver, status);
}

}  // namespace jax_ggemm

#define JAX_GGEMM_EXPORT extern "C" __attribute__((visibility("default")))

// Names the CuTe DSL's runtime library. Has no effect once a kernel was loaded.
JAX_GGEMM_EXPORT void jax_ggemm_cuda_set_runtime(const char* path) {
  auto& state = jax_ggemm::TheState();
  const std::unique_lock lock(state.mutex);
  state.runtime_path = path;
}

JAX_GGEMM_EXPORT void jax_ggemm_cuda_add_object(const char* key, const char* bytes, size_t size) {
  jax_ggemm::AddObject(key, {bytes, size});
}
