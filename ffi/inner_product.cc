#include "inner_product.h"

#include <cstdlib>
#include <new>

#include "inner_product_kernels.h"

namespace jax_ggemm {
namespace {

using Kernel = void (*)(const Block& block, bool wide, Allocator allocate);

Kernel ChooseKernel() {
#ifdef JAX_GGEMM_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    return InnerProductAvx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return InnerProductAvx2;
#endif
  return InnerProductBase;
}

void* ThreadScratch(size_t bytes) {
  constexpr size_t kAlignment = 64;
  struct Buffer {
    void* data = nullptr;
    size_t size = 0;
    ~Buffer() { std::free(data); }
  };
  static thread_local Buffer buffer;
  if (buffer.size < bytes) {
    std::free(buffer.data);
    buffer.size = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    buffer.data = std::aligned_alloc(kAlignment, buffer.size);
    if (buffer.data == nullptr) {
      buffer.size = 0;
      throw std::bad_alloc();
    }
  }
  return buffer.data;
}

}  // namespace

void InnerProduct(const Block& block, bool wide) {
  static const Kernel kernel = ChooseKernel();
  kernel(block, wide, ThreadScratch);
}

}  // namespace jax_ggemm
