// Kernels on three devices from eight threads at once, and every way to fail, on `fake_cuda.cc`.
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "cuda_runtime.h"

extern "C" {
void jax_ggemm_cuda_set_runtime(const char* path);
int FakeLoads(int device, const char* object);
size_t FakeContexts();
}

namespace {

using jax_ggemm::Device;
using jax_ggemm::Kernel;

void Check(bool holds, const char* what, const std::string& got = "") {
  if (holds) return;
  std::fprintf(stderr, "failed: %s: %s\n", what, got.c_str());
  std::exit(1);
}

bool Contains(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

void LaunchMany(int thread, std::array<std::array<const Kernel*, 2>, 3>* seen) {
  constexpr const char* kKeys[] = {"key0", "key1"};
  for (int i = thread; i < thread + 600; ++i) {
    std::string error;
    const Device* device = jax_ggemm::FindDevice(i % 3, &error);
    Check(device != nullptr, "device", error);
    const Kernel* kernel = jax_ggemm::FindKernel(*device, kKeys[i % 2], &error);
    Check(kernel != nullptr, "kernel", error);
    const Kernel*& first = (*seen)[i % 3][i % 2];
    Check(first == nullptr || first == kernel, "one kernel for a key and device");
    first = kernel;
    int32_t where = -1;
    void* arguments[] = {&where};
    error = jax_ggemm::Launch(*kernel, arguments, 1);
    Check(error.empty() && where == i % 3, "launch on its device", error);
    char data[5] = {1, 1, 1, 1, 1};
    error = jax_ggemm::Clear(*device, data, 4, nullptr);
    Check(error.empty() && data[0] == 0 && data[3] == 0 && data[4] == 1, "clear", error);
    Check(FakeContexts() == 0, "the thread has the contexts that it had");
  }
}

}  // namespace

int main(int, char** argv) {
  std::string error;
  jax_ggemm::AddObject("key0", "object0");
  jax_ggemm::AddObject("key0", "another object, too late");
  jax_ggemm::AddObject("failing", "failing");
  jax_ggemm::AddObject("damaged", "damaged");
  const Device* first = jax_ggemm::FindDevice(0, &error);
  Check(first != nullptr, "first device", error);
  Check(jax_ggemm::FindKernel(*first, "key0", &error) == nullptr && Contains(error, "runtime library"), "no runtime",
        error);
  jax_ggemm_cuda_set_runtime(argv[1]);
  jax_ggemm::AddObject("key1", "object1");

  std::array<std::array<std::array<const Kernel*, 2>, 3>, 8> seen{};
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) threads.emplace_back(LaunchMany, i, &seen[i]);
  for (auto& thread : threads) thread.join();
  for (const auto& of_thread : seen) Check(of_thread == seen[0], "all threads see the same kernels");
  for (int device = 0; device < 3; ++device) {
    Check(FakeLoads(device, "object0") == 1 && FakeLoads(device, "object1") == 1, "each is loaded once a device");
  }
  const Device* last = jax_ggemm::FindDevice(2, &error);
  Check(first->architecture == "sm_90" && last->architecture == "sm_100", "architectures");
  Check(first->multiprocessors == 100 && last->multiprocessors == 102, "multiprocessors");

  Check(jax_ggemm::FindKernel(*first, "unknown", &error) == nullptr && Contains(error, "not known"), "unknown", error);
  Check(jax_ggemm::FindKernel(*first, "damaged", &error) == nullptr && Contains(error, "InvalidBinary"), "damaged",
        error);
  Check(jax_ggemm::FindDevice(7, &error) == nullptr && Contains(error, "CUDA_ERROR_INVALID_DEVICE (101)"),
        "no such device", error);
  Check(jax_ggemm::FindDevice(-1, &error) == nullptr && Contains(error, "CUDA_ERROR_INVALID_CONTEXT"),
        "no current device", error);
  const Kernel* failing = jax_ggemm::FindKernel(*first, "failing", &error);
  int32_t where = -1;
  void* arguments[] = {&where};
  error = jax_ggemm::Launch(*failing, arguments, 1);
  Check(error == "CUDA_ERROR_LAUNCH_FAILED (719)", "a failing launch", error);
  Check(FakeContexts() == 0, "contexts after failures");
  return 0;
}
