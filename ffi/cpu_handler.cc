// The custom call `jax_ggemm` on XLA's CPU backend: checks a call, and runs its problems on XLA's threads.
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "dimensions.h"
#include "grouped_product.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ggemm {
namespace {

namespace ffi = xla::ffi;

ffi::Error Invalid(std::string message) { return ffi::Error::InvalidArgument("jax_ggemm: " + std::move(message)); }

ffi::Error OutOfMemory() { return ffi::Error(ffi::ErrorCode::kResourceExhausted, "jax_ggemm: out of memory"); }

std::optional<DType> ToDType(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::DataType::F32:
      return DType::kF32;
    case ffi::DataType::F64:
      return DType::kF64;
    case ffi::DataType::BF16:
      return DType::kBF16;
    case ffi::DataType::F16:
      return DType::kF16;
    default:
      return std::nullopt;
  }
}

// An array argument: its batch axes, each of full length or of length 1, then the axes of one product.
struct Operand {
  const char* name;
  void* data;
  Dimensions dims;
  size_t batch_rank;

  Operand(const char* name, const ffi::AnyBuffer& buffer, size_t batch_rank)
      : name(name), data(buffer.untyped_data()), dims(buffer.dimensions()), batch_rank(batch_rank) {}

  int64_t operator[](size_t axis) const { return dims[batch_rank + axis]; }

  // The elements of one product.
  int64_t Stride() const {
    int64_t elements = 1;
    for (size_t axis = batch_rank; axis < dims.size(); ++axis) elements *= dims[axis];
    return elements;
  }

  // The data of batch element `index` of a batch of this shape; axes of length 1 do not move.
  void* At(const std::vector<int64_t>& batch, int64_t index, size_t width) const {
    int64_t position = 0;
    int64_t stride = Stride();
    for (size_t axis = batch_rank; axis-- > 0;) {
      const int64_t coordinate = index % batch[axis];
      index /= batch[axis];
      if (dims[axis] != 1) position += coordinate * stride;
      stride *= dims[axis];
    }
    return static_cast<char*>(data) + static_cast<int64_t>(width) * position;
  }
};

// Runs work(0) .. work(count - 1) on this thread and those of the pool that come to help. This thread takes
// part, so that it finishes even where the pool has no thread to spare. Returns false where memory ran out.
bool RunOnPool(ffi::ThreadPool& pool, int64_t threads, int64_t count, const std::function<void(int64_t)>& work) {
  struct Shared {
    std::atomic<int64_t> next{0};
    std::mutex mutex;
    std::condition_variable all_done;
    int64_t done = 0;
    bool out_of_memory = false;
  };
  // A helper may start after this function has returned: it then finds no work, and touches only this.
  const auto shared = std::make_shared<Shared>();
  const auto run = [shared, count, work = &work] {
    int64_t finished = 0;
    bool out_of_memory = false;
    for (int64_t i; (i = shared->next.fetch_add(1, std::memory_order_relaxed)) < count; ++finished) {
      try {
        (*work)(i);
      } catch (const std::bad_alloc&) {
        out_of_memory = true;
      }
    }
    if (finished == 0) return;
    const std::lock_guard<std::mutex> lock(shared->mutex);
    shared->out_of_memory |= out_of_memory;
    shared->done += finished;
    if (shared->done == count) shared->all_done.notify_all();
  };
  for (int64_t helper = 1; helper < std::min(threads, count); ++helper) pool.Schedule([run] { run(); });
  run();
  std::unique_lock<std::mutex> lock(shared->mutex);
  shared->all_done.wait(lock, [&] { return shared->done == count; });
  return !shared->out_of_memory;
}

std::optional<Product> ToProduct(std::string_view name) {
  if (name == "forward") return Product::kForward;
  if (name == "dlhs") return Product::kDlhs;
  if (name == "drhs") return Product::kDrhs;
  return std::nullopt;
}

ffi::Error CheckAndRun(ffi::ThreadPool pool, ffi::AnyBuffer lhs_buffer, ffi::AnyBuffer rhs_buffer,
                       ffi::AnyBuffer sizes_buffer, ffi::AnyBuffer offset_buffer, ffi::RemainingArgs rest,
                       ffi::Result<ffi::AnyBuffer> out_buffer, std::string_view product_name) {
  const auto product = ToProduct(product_name);
  if (!product) return Invalid("unknown product '" + std::string(product_name) + "'");
  const bool rows_ragged = *product != Product::kDrhs;
  const bool forward = *product == Product::kForward;

  const auto lhs_dtype = ToDType(lhs_buffer.element_type());
  const auto rhs_dtype = ToDType(rhs_buffer.element_type());
  const auto out_dtype = ToDType(out_buffer->element_type());
  if (!lhs_dtype || !rhs_dtype || !out_dtype) {
    return Invalid("lhs, rhs and the result must be float32, float64, bfloat16 or float16");
  }
  if (sizes_buffer.element_type() != ffi::DataType::S32 || offset_buffer.element_type() != ffi::DataType::S32) {
    return Invalid("group_sizes and group_offset must be int32");
  }
  const bool wide = lhs_dtype == DType::kF64 || rhs_dtype == DType::kF64 || out_dtype == DType::kF64;
  const Types types = {*lhs_dtype, *rhs_dtype, *out_dtype, wide};
  if (rest.size() > 1 || (rest.size() == 1 && !rows_ragged)) return Invalid("too many operands");

  const size_t batch_rank = offset_buffer.dimensions().size();
  const Operand lhs("lhs", lhs_buffer, batch_rank), rhs("rhs", rhs_buffer, batch_rank);
  const Operand sizes("group_sizes", sizes_buffer, batch_rank), offset("group_offset", offset_buffer, batch_rank);
  const Operand out("the result", *out_buffer, batch_rank);
  std::optional<Operand> bias;
  if (rest.size() == 1) {
    const auto buffer = rest.get<ffi::AnyBuffer>(0);
    if (buffer.has_error()) return buffer.error();
    if (ToDType(buffer->element_type()) != (wide ? DType::kF64 : DType::kF32)) {
      return Invalid("bias must have the accumulation type");
    }
    bias.emplace("bias", *buffer, batch_rank);
  }

  const auto has_rank = [&](const Operand& operand, size_t rank) { return operand.dims.size() == batch_rank + rank; };
  if (!has_rank(lhs, 2) || !has_rank(rhs, rows_ragged ? 3 : 2) || !has_rank(sizes, 1) ||
      !has_rank(out, rows_ragged ? 2 : 3) || (bias && !has_rank(*bias, 2))) {
    return Invalid("wrong rank: lhs " + ToString(lhs.dims) + ", rhs " + ToString(rhs.dims) + ", group_sizes " +
                   ToString(sizes.dims) + ", group_offset " + ToString(offset.dims) + ", result " + ToString(out.dims));
  }

  Problem problem = {};
  problem.product = *product;
  problem.m = lhs[0];
  problem.groups = sizes[0];
  const Operand& weights = rows_ragged ? rhs : out;
  problem.num_weights = weights[0];
  problem.k = weights[1];
  problem.n = weights[2];
  const int64_t lhs_cols = *product == Product::kDlhs ? problem.n : problem.k;
  const int64_t out_cols = forward ? problem.n : problem.k;
  const bool extents_fit =
      lhs[1] == lhs_cols &&
      (rows_ragged ? out[0] == problem.m && out[1] == out_cols : rhs[0] == problem.m && rhs[1] == problem.n) &&
      (!bias || ((*bias)[0] == problem.num_weights && (*bias)[1] == out_cols));
  if (!extents_fit || problem.m > std::numeric_limits<int32_t>::max()) {
    return Invalid("extents of lhs " + ToString(lhs.dims) + ", rhs " + ToString(rhs.dims) + " and the result " +
                   ToString(out.dims) + " do not fit the product " + std::string(product_name));
  }

  const std::vector<int64_t> batch(out.dims.begin(), out.dims.begin() + batch_rank);
  int64_t batch_size = 1;
  for (const int64_t length : batch) batch_size *= length;
  for (const Operand* operand : {&lhs, &rhs, &sizes, &offset, bias ? &*bias : &lhs}) {
    for (size_t axis = 0; axis < batch_rank; ++axis) {
      if (operand->dims[axis] != batch[axis] && operand->dims[axis] != 1) {
        return Invalid(std::string(operand->name) + " " + ToString(operand->dims) +
                       " does not have the batch axes of the result " + ToString(out.dims));
      }
    }
  }

  std::vector<Problem> problems;
  problems.reserve(static_cast<size_t>(batch_size));
  for (int64_t i = 0; i < batch_size; ++i) {
    problem.lhs = lhs.At(batch, i, ByteWidth(types.lhs));
    problem.rhs = rhs.At(batch, i, ByteWidth(types.rhs));
    problem.group_sizes = static_cast<const int32_t*>(sizes.At(batch, i, sizeof(int32_t)));
    problem.group_offset = *static_cast<const int32_t*>(offset.At(batch, i, sizeof(int32_t)));
    problem.bias = bias ? bias->At(batch, i, ByteWidth(wide ? DType::kF64 : DType::kF32)) : nullptr;
    problem.out = out.At(batch, i, ByteWidth(types.out));
    problems.push_back(problem);
  }
  const int64_t threads = std::max<int64_t>(pool.num_threads(), 1);
  bool has_memory = true;
  GroupedProducts(problems, types, threads, [&](int64_t count, const std::function<void(int64_t)>& work) {
    has_memory = RunOnPool(pool, threads, count, work) && has_memory;
  });
  return has_memory ? ffi::Error::Success() : OutOfMemory();
}

ffi::Error Run(ffi::ThreadPool pool, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs, ffi::AnyBuffer group_sizes,
               ffi::AnyBuffer group_offset, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out,
               std::string_view product) {
  try {
    return CheckAndRun(pool, lhs, rhs, group_sizes, group_offset, rest, out, product);
  } catch (const std::bad_alloc&) {  // XLA knows no exceptions
    return OutOfMemory();
  }
}

}  // namespace
}  // namespace jax_ggemm

#define JAX_GGEMM_EXPORT extern "C" __attribute__((visibility("default")))

JAX_GGEMM_EXPORT int jax_ggemm_ffi_major() { return XLA_FFI_API_MAJOR; }
JAX_GGEMM_EXPORT int jax_ggemm_ffi_minor() { return XLA_FFI_API_MINOR; }

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_ggemm_cpu, jax_ggemm::Run,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<std::string_view>("product"));
#pragma GCC visibility pop
