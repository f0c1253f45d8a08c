// The custom call `jax_ggemm` on NVIDIA GPUs: checks a call, and launches its kernel on XLA's stream.
#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cuda_runtime.h"
#include "dimensions.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ggemm {
namespace {

namespace ffi = xla::ffi;

// The first error says which call it was.
ffi::Error Failed(ffi::ErrorCode code, std::string_view what, std::string_view product, std::string_view key) {
  return ffi::Error(code, "jax_ggemm: " + std::string(what) + " (product " + std::string(product) + ", kernel " +
                              std::string(key) + ")");
}

ffi::Error Instantiate(std::string_view product, std::string_view key) {
  if (IsRegistered(key)) return ffi::Error::Success();
  return Failed(ffi::ErrorCode::kFailedPrecondition, "the kernel's object is not known in this process", product, key);
}

// Loads the kernel before the first execution, which may be inside the capture of a CUDA graph.
ffi::Error Initialize(std::string_view product, std::string_view key) {
  std::string error;
  if (FindKernel(key, &error) != nullptr) return ffi::Error::Success();
  return Failed(ffi::ErrorCode::kInternal, error, product, key);
}

// Every operand has one batch axis, of the result's length or of length 1, in front of the axes of a product.
ffi::Error Execute(void* stream, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs, ffi::AnyBuffer sizes, ffi::AnyBuffer offset,
                   ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out, std::string_view product,
                   std::string_view key) {
  const auto describe = [&](std::string what) {
    return what + ": lhs " + ToString(lhs.dimensions()) + ", rhs " + ToString(rhs.dimensions()) + ", group_sizes " +
           ToString(sizes.dimensions()) + ", result " + ToString(out->dimensions());
  };
  const auto invalid = [&](std::string what) {
    return Failed(ffi::ErrorCode::kInvalidArgument, describe(std::move(what)), product, key);
  };
  const bool rows_ragged = product != "drhs";
  if (lhs.dimensions().size() != 3 || rhs.dimensions().size() != (rows_ragged ? 4 : 3) ||
      sizes.dimensions().size() != 2 || offset.dimensions().size() != 1 ||
      out->dimensions().size() != (rows_ragged ? 3 : 4) || rest.size() > (rows_ragged ? 1 : 0)) {
    return invalid("wrong rank or number of operands");
  }
  void* bias = nullptr;
  int64_t bias_batch = 1;
  if (rest.size() == 1) {
    const auto buffer = rest.get<ffi::AnyBuffer>(0);
    if (buffer.has_error()) return buffer.error();
    if (buffer->element_type() != ffi::DataType::F32 || buffer->dimensions().size() != 3) {
      return invalid("bias must be (batch, weights, columns) of float32");
    }
    bias = buffer->untyped_data();
    bias_batch = buffer->dimensions()[0];
  }
  const Dimensions weights = rows_ragged ? rhs.dimensions() : out->dimensions();
  const int64_t batch = out->dimensions()[0];
  const int64_t m = lhs.dimensions()[1];
  // 0 where the operand is shared by the batch.
  const auto step = [&](int64_t length, int64_t per_element) { return length == batch && batch > 1 ? per_element : 0; };
  const std::array<int64_t, 9> extents = {
      m,
      weights[2],
      weights[3],
      sizes.dimensions()[1],
      weights[1],
      batch,
      step(lhs.dimensions()[0], m),
      step(rhs.dimensions()[0], rows_ragged ? weights[1] : m),
      step(bias_batch, weights[1]),
  };
  constexpr int64_t kMaxRows = int64_t{1} << 30;
  for (const int64_t extent : extents) {
    if (extent > kMaxRows) return invalid("an extent exceeds 2^30");
  }
  if (batch * m > kMaxRows || batch * weights[1] * weights[2] > std::numeric_limits<int32_t>::max()) {
    return invalid("too many rows for the kernel's 32-bit row numbers");
  }
  for (const auto* data : {lhs.untyped_data(), rhs.untyped_data(), out->untyped_data()}) {
    if (reinterpret_cast<uintptr_t>(data) % 16 != 0) return invalid("an operand is not aligned to 16 bytes");
  }

  std::string error;
  const Kernel* kernel = FindKernel(key, &error);
  if (kernel == nullptr) return Failed(ffi::ErrorCode::kInternal, error, product, key);

  std::array<void*, 7> pointers = {stream,
                                   lhs.untyped_data(),
                                   rhs.untyped_data(),
                                   sizes.untyped_data(),
                                   offset.untyped_data(),
                                   bias ? bias : out->untyped_data(),
                                   out->untyped_data()};
  std::array<int32_t, extents.size() + 1> values;
  std::copy(extents.begin(), extents.end(), values.begin());
  values.back() = kernel->multiprocessors;

  std::array<void*, pointers.size() + values.size()> arguments;
  auto next = arguments.begin();
  for (void*& pointer : pointers) *next++ = &pointer;
  for (int32_t& value : values) *next++ = &value;
  const std::string failure = Launch(*kernel, arguments.data(), arguments.size());
  if (!failure.empty()) return Failed(ffi::ErrorCode::kInternal, describe(failure), product, key);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jax_ggemm

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jax_ggemm_cuda_instantiate, jax_ggemm::Instantiate,
    xla::ffi::Ffi::BindInstantiate().Attr<std::string_view>("product").Attr<std::string_view>("key"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jax_ggemm_cuda_initialize, jax_ggemm::Initialize,
    xla::ffi::Ffi::BindInitialize().Attr<std::string_view>("product").Attr<std::string_view>("key"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_ggemm_cuda, jax_ggemm::Execute,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<void*>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<std::string_view>("product")
                                  .Attr<std::string_view>("key"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
#pragma GCC visibility pop
