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

// The attributes of a call:
//   product   what it computes
//   keys      by architecture, as "sm_90a": the key of its kernel
//   objects   by key: the kernels' objects, in a program that holds its own. Others are known in the process.
struct Found {
  const Kernel* kernel = nullptr;
  std::string_view product = "unknown";
  std::string_view key = "unknown";
  // Where there is no kernel:
  ffi::ErrorCode code = ffi::ErrorCode::kInternal;
  std::string error;
};

// The key for an architecture such as "sm_90": of "sm_90a", whose features belong to that one alone.
std::string_view KeyFor(const ffi::Dictionary& keys, std::string_view architecture) {
  for (auto it = keys.begin(); it != keys.end(); ++it) {
    const std::string_view name = *it;
    if (name.substr(0, architecture.size()) != architecture || name.size() > architecture.size() + 1) continue;
    if (name.size() > architecture.size() && name.back() >= '0' && name.back() <= '9') continue;
    if (const auto key = keys.get<std::string_view>(*it); key.has_value()) return *key;
  }
  return {};
}

std::string Names(const ffi::Dictionary& keys) {
  std::string names;
  for (auto it = keys.begin(); it != keys.end(); ++it) names += (names.empty() ? "" : ", ") + std::string(*it);
  return names;
}

ffi::Error Instantiate(ffi::Dictionary attributes) {
  const auto product = attributes.get<std::string_view>("product");
  const auto keys = attributes.get<ffi::Dictionary>("keys");
  if (product.has_error()) return product.error();
  if (keys.has_error()) return keys.error();
  if (attributes.contains("objects")) {
    const auto objects = attributes.get<ffi::Dictionary>("objects");
    if (objects.has_error()) return objects.error();
    for (auto it = objects->begin(); it != objects->end(); ++it) {
      const auto object = objects->get<std::string_view>(*it);
      if (object.has_error()) return object.error();
      if (!IsKnown(*it)) AddObject(*it, *object);
    }
  }
  for (auto it = keys->begin(); it != keys->end(); ++it) {
    const auto key = keys->get<std::string_view>(*it);
    if (key.has_error()) return key.error();
    if (!IsKnown(*key)) {
      return Failed(ffi::ErrorCode::kFailedPrecondition, "the kernel's object is not known in this process", *product,
                    *key);
    }
  }
  return ffi::Error::Success();
}

// The kernel of a call on a device.
Found FindKernel(const ffi::Dictionary& attributes, int32_t ordinal) {
  Found found;
  const auto product = attributes.get<std::string_view>("product");
  const auto keys = attributes.get<ffi::Dictionary>("keys");
  if (product.has_error() || keys.has_error()) {
    found.code = ffi::ErrorCode::kInvalidArgument;
    found.error = product.has_error() ? product.error().message() : keys.error().message();
    return found;
  }
  found.product = *product;
  const Device* device = FindDevice(ordinal, &found.error);
  if (device == nullptr) return found;
  const std::string_view key = KeyFor(*keys, device->architecture);
  if (key.empty()) {
    found.code = ffi::ErrorCode::kFailedPrecondition;
    found.error = "the program holds kernels for " + Names(*keys) + ", and CUDA device " +
                  std::to_string(device->ordinal) + " is " + device->architecture;
    return found;
  }
  found.key = key;
  found.kernel = FindKernel(*device, key, &found.error);
  return found;
}

// Loads the kernel before the first execution, which may be inside the capture of a CUDA graph.
ffi::Error Initialize(int32_t ordinal, ffi::RemainingArgs operands, ffi::Dictionary attributes) {
  const Found found = FindKernel(attributes, ordinal);
  if (found.kernel != nullptr) return ffi::Error::Success();
  std::string shapes;
  for (size_t i = 0; i < operands.size(); ++i) {
    const auto operand = operands.get<ffi::AnyBuffer>(i);
    if (operand.has_value()) shapes += (i ? ", " : ": operands ") + ToString(operand->dimensions());
  }
  return Failed(found.code, found.error + shapes, found.product, found.key);
}

// Every operand has one batch axis, of the result's length or of length 1, in front of the axes of a product.
ffi::Error Execute(void* stream, int32_t ordinal, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs, ffi::AnyBuffer sizes,
                   ffi::AnyBuffer offset, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out,
                   ffi::Dictionary attributes) {
  const Found found = FindKernel(attributes, ordinal);
  const auto describe = [&](std::string what) {
    return what + ": lhs " + ToString(lhs.dimensions()) + ", rhs " + ToString(rhs.dimensions()) + ", group_sizes " +
           ToString(sizes.dimensions()) + ", result " + ToString(out->dimensions());
  };
  const auto failed = [&](ffi::ErrorCode code, std::string what) {
    return Failed(code, describe(std::move(what)), found.product, found.key);
  };
  const auto invalid = [&](std::string what) { return failed(ffi::ErrorCode::kInvalidArgument, std::move(what)); };
  if (found.kernel == nullptr) return failed(found.code, found.error);
  const Kernel& kernel = *found.kernel;
  const bool rows_ragged = found.product != "drhs";
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

  // Only where a shape was not known when the program was traced: no rows, or no groups. (k and n always are.)
  if (lhs.element_count() == 0 || rhs.element_count() == 0 || sizes.element_count() == 0) {
    if (out->element_count() == 0) return ffi::Error::Success();
    const std::string failure = Clear(*kernel.device, out->untyped_data(), out->size_bytes(), stream);
    return failure.empty() ? ffi::Error::Success() : failed(ffi::ErrorCode::kInternal, failure);
  }

  std::array<void*, 7> pointers = {stream,
                                   lhs.untyped_data(),
                                   rhs.untyped_data(),
                                   sizes.untyped_data(),
                                   offset.untyped_data(),
                                   bias ? bias : out->untyped_data(),
                                   out->untyped_data()};
  std::array<int32_t, extents.size() + 1> values;
  std::copy(extents.begin(), extents.end(), values.begin());
  values.back() = kernel.device->multiprocessors;

  std::array<void*, pointers.size() + values.size()> arguments;
  auto next = arguments.begin();
  for (void*& pointer : pointers) *next++ = &pointer;
  for (int32_t& value : values) *next++ = &value;
  const std::string failure = Launch(kernel, arguments.data(), arguments.size());
  return failure.empty() ? ffi::Error::Success() : failed(ffi::ErrorCode::kInternal, failure);
}

}  // namespace
}  // namespace jax_ggemm

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_ggemm_cuda_instantiate, jax_ggemm::Instantiate,
                              xla::ffi::Ffi::BindInstantiate().Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_ggemm_cuda_initialize, jax_ggemm::Initialize,
                              xla::ffi::Ffi::BindInitialize().Ctx<xla::ffi::DeviceOrdinal>().RemainingArgs().Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_ggemm_cuda, jax_ggemm::Execute,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<void*>>()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attrs(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
#pragma GCC visibility pop
