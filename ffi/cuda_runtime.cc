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
  int (*get_device)(int* device) = nullptr;                               // cuCtxGetDevice
  int (*get_attribute)(int* value, int attribute, int device) = nullptr;  // cuDeviceGetAttribute
  int (*error_name)(int error, const char** name) = nullptr;              // cuGetErrorName
};
constexpr int kMultiprocessorCount = 16;  // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT

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

struct State {
  std::shared_mutex mutex;
  std::string runtime_path;
  std::map<std::string, std::string, std::less<>> objects;                             // by key
  std::map<int, std::map<std::string, std::unique_ptr<Kernel>, std::less<>>> kernels;  // by device and key
  Driver driver;
  DslRuntime runtime;
  bool opened = false;
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

bool Open(State& state, std::string* error) {
  if (state.opened) return true;
  void* driver = OpenLibrary("libcuda.so.1", error);
  if (driver == nullptr || !Resolve(driver, "cuCtxGetDevice", &state.driver.get_device, error) ||
      !Resolve(driver, "cuDeviceGetAttribute", &state.driver.get_attribute, error) ||
      !Resolve(driver, "cuGetErrorName", &state.driver.error_name, error)) {
    return false;
  }
  void* runtime = OpenLibrary(state.runtime_path.c_str(), error);
  if (runtime == nullptr ||
      !Resolve(runtime, "CuteDSLRT_Module_Create_From_Bytes", &state.runtime.create_module, error) ||
      !Resolve(runtime, "CuteDSLRT_Module_Get_Function", &state.runtime.get_function, error) ||
      !Resolve(runtime, "CuteDSLRT_Function_Run", &state.runtime.run, error) ||
      !Resolve(runtime, "CuteDSLRT_GetErrorName", &state.runtime.error_name, error)) {
    return false;
  }
  state.opened = true;
  return true;
}

std::string DriverError(const State& state, int error) {
  const char* name = nullptr;
  if (state.driver.error_name(error, &name) != 0 || name == nullptr) name = "unknown CUDA error";
  return std::string(name) + " (" + std::to_string(error) + ")";
}

const Kernel* Find(const State& state, int device, std::string_view key) {
  const auto of_device = state.kernels.find(device);
  if (of_device == state.kernels.end()) return nullptr;
  const auto kernel = of_device->second.find(key);
  return kernel == of_device->second.end() ? nullptr : kernel->second.get();
}

}  // namespace

bool IsRegistered(std::string_view key) {
  State& state = TheState();
  const std::shared_lock lock(state.mutex);
  return state.objects.find(key) != state.objects.end();
}

const Kernel* FindKernel(std::string_view key, std::string* error) {
  State& state = TheState();
  int device = 0;
  {
    const std::shared_lock lock(state.mutex);
    if (state.opened && state.driver.get_device(&device) == 0) {
      if (const Kernel* kernel = Find(state, device, key)) return kernel;
    }
  }
  const std::unique_lock lock(state.mutex);
  if (!Open(state, error)) return nullptr;
  if (const int status = state.driver.get_device(&device)) {
    *error = "no current CUDA device: " + DriverError(state, status);
    return nullptr;
  }
  if (const Kernel* kernel = Find(state, device, key)) return kernel;
  const auto object = state.objects.find(key);
  if (object == state.objects.end()) {
    *error = "its object was not registered in this process";
    return nullptr;
  }
  auto kernel = std::make_unique<Kernel>();
  void* module = nullptr;
  int status = state.runtime.create_module(&module, reinterpret_cast<const unsigned char*>(object->second.data()),
                                           object->second.size(), nullptr, 0);
  if (status == 0) status = state.runtime.get_function(&kernel->function, module, kPrefix);
  if (status != 0) {
    *error = std::string("loading it failed: ") + state.runtime.error_name(status);
    return nullptr;
  }
  status = state.driver.get_attribute(&kernel->multiprocessors, kMultiprocessorCount, device);
  if (status != 0) {
    *error = DriverError(state, status);
    return nullptr;
  }
  return state.kernels[device].emplace(std::string(key), std::move(kernel)).first->second.get();
}

std::string Launch(const Kernel& kernel, void* const* arguments, size_t count) {
  const State& state = TheState();
  int32_t cuda_status = 0;
  std::array<void*, kMaxArguments + 1> with_status;
  if (count > kMaxArguments) return "too many arguments";
  std::copy(arguments, arguments + count, with_status.begin());
  with_status[count] = &cuda_status;
  const int status = state.runtime.run(kernel.function, with_status.data(), count + 1);
  if (cuda_status != 0) return DriverError(state, cuda_status);
  if (status != 0) return state.runtime.error_name(status);
  return "";
}

}  // namespace jax_ggemm

#define JAX_GGEMM_EXPORT extern "C" __attribute__((visibility("default")))

// Names the CuTe DSL's runtime library. Has no effect once a kernel was loaded.
JAX_GGEMM_EXPORT void jax_ggemm_cuda_set_runtime(const char* path) {
  auto& state = jax_ggemm::TheState();
  const std::unique_lock lock(state.mutex);
  state.runtime_path = path;
}

// Makes the object of a key known in this process. The first bytes of a key stay.
JAX_GGEMM_EXPORT void jax_ggemm_cuda_add_object(const char* key, const char* bytes, size_t size) {
  auto& state = jax_ggemm::TheState();
  const std::unique_lock lock(state.mutex);
  state.objects.emplace(key, std::string(bytes, size));
}
