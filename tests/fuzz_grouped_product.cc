// Random grouped products against a plain loop, to be compiled with sanitizers: test_cpu_sanitized.py runs it.
//
// Usage: fuzz INSTRUCTION_SET SEED COUNT. Every array is its own allocation of the exact size, so that an access
// past its end is caught; results start as NaN, so that an element that is not written is caught.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "convert.h"
#include "grouped_product.h"
#include "inner_product_kernels.h"

namespace jax_ggemm {
namespace {

void* Scratch(size_t bytes) {
  // A new allocation for each block: an access past what the block asked for is caught too.
  static thread_local std::vector<char> buffer;
  buffer = std::vector<char>(bytes);
  return buffer.data();
}

void (*inner_product)(const Block&, bool, Allocator) = InnerProductBase;

bool SetInstructionSet(const std::string& name) {
  if (name == "base") return true;
#ifdef JAX_GGEMM_X86
  __builtin_cpu_init();
  if (name == "avx2" && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    inner_product = InnerProductAvx2;
    return true;
  }
  if (name == "avx512" && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    inner_product = InnerProductAvx512;
    return true;
  }
#endif
  return false;
}

}  // namespace

// Stands in for the one of inner_product.cc.
void InnerProduct(const Block& block, bool wide) { inner_product(block, wide, Scratch); }

namespace {

using Random = std::mt19937_64;

int64_t Uniform(Random& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

// An array of any element type, and its values in double.
struct Array {
  DType dtype;
  std::vector<char> bytes;
  std::vector<double> values;

  Array(DType dtype, int64_t size) : dtype(dtype), bytes(size * ByteWidth(dtype)), values(size) {}

  void Set(int64_t i, double value) {
    switch (dtype) {
      case DType::kF32:
        return Store(i, static_cast<float>(value));
      case DType::kF64:
        return Store(i, value);
      case DType::kBF16:
        return Store(i, ToBF16(static_cast<float>(value)));
      case DType::kF16:
        return Store(i, ToF16(static_cast<float>(value)));
    }
  }

  double Get(int64_t i) const {
    switch (dtype) {
      case DType::kF32:
        return Load<float>(i);
      case DType::kF64:
        return Load<double>(i);
      case DType::kBF16:
        return Widen(Load<BF16>(i));
      case DType::kF16:
        return Widen(Load<F16>(i));
    }
    return 0;
  }

 private:
  template <typename T>
  void Store(int64_t i, T value) {
    std::memcpy(bytes.data() + i * sizeof(T), &value, sizeof(T));
    values[i] = Get(i);
  }
  template <typename T>
  T Load(int64_t i) const {
    T value;
    std::memcpy(&value, bytes.data() + i * sizeof(T), sizeof(T));
    return value;
  }
};

Array RandomArray(Random& random, DType dtype, int64_t size) {
  Array array(dtype, size);
  std::normal_distribution<double> normal;
  for (int64_t i = 0; i < size; ++i) array.Set(i, normal(random));
  return array;
}

std::vector<int32_t> RandomSizes(Random& random, int64_t groups, int64_t m) {
  std::vector<int32_t> sizes(groups);
  for (int32_t& size : sizes) {
    switch (Uniform(random, 0, 7)) {
      case 0:
        size = 0;
        break;
      case 1:
        size = 1;
        break;
      case 2:
        size = static_cast<int32_t>(Uniform(random, -5, m));
        break;
      case 3:
        size = static_cast<int32_t>(random());  // any bits
        break;
      default:
        size = static_cast<int32_t>(Uniform(random, 0, 2 * m / std::max<int64_t>(groups, 1) + 1));
    }
  }
  return sizes;
}

int64_t RandomLength(Random& random, int64_t longest) {
  static constexpr int64_t kEdges[] = {0, 1, 5, 6, 7, 8, 15, 16, 17, 23, 24, 25, 31, 32, 33, 64, 65, 241, 512, 513};
  const int64_t pick = Uniform(random, 0, 1) ? kEdges[Uniform(random, 0, 19)] : Uniform(random, 1, longest);
  return std::min(pick, longest);
}

double Epsilon(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return 0x1p-23;
    case DType::kF64:
      return 0x1p-52;
    case DType::kBF16:
      return 0x1p-8;
    default:
      return 0x1p-11;
  }
}

int failures = 0;

void Compare(const Array& out, int64_t i, double expected, double magnitude, int64_t depth, bool wide,
             const char* what) {
  const double eps = Epsilon(wide ? DType::kF64 : DType::kF32) * (2 + static_cast<double>(depth));
  const double tolerance =
      magnitude * eps + std::abs(expected) * Epsilon(out.dtype) + 0x1p-24 * (out.dtype == DType::kF16);
  const double got = out.Get(i);
  if (!(std::abs(got - expected) <= tolerance) && failures++ < 10) {
    std::printf("%s: element %lld is %g, not %g (tolerance %g)\n", what, static_cast<long long>(i), got, expected,
                tolerance);
  }
}

void Check(Random& random) {
  static constexpr DType kDTypes[] = {DType::kF32, DType::kF64, DType::kBF16, DType::kF16};
  const auto dtype = [&] { return kDTypes[Uniform(random, 0, 3)]; };
  Types types = {dtype(), dtype(), dtype(), false};
  if (Uniform(random, 0, 1)) types.rhs = types.out = types.lhs = DType::kF32;
  types.wide = types.lhs == DType::kF64 || types.rhs == DType::kF64 || types.out == DType::kF64;

  Problem problem = {};
  problem.product = static_cast<Product>(Uniform(random, 0, 2));
  const bool forward = problem.product == Product::kForward;
  const bool contraction = problem.product == Product::kDrhs;
  const bool deep = Uniform(random, 0, 19) == 0;  // deep enough to be split
  problem.m = deep ? Uniform(random, 16384, 40000) : RandomLength(random, 300);
  problem.k = RandomLength(random, deep ? 9 : 600);
  problem.n = RandomLength(random, deep ? 9 : 600);
  problem.groups = Uniform(random, 0, deep ? 2 : 9);
  problem.num_weights = Uniform(random, 0, problem.groups + 1);
  problem.group_offset = static_cast<int32_t>(Uniform(random, -2, 3));
  if (Uniform(random, 0, 1)) problem.num_weights = problem.groups, problem.group_offset = 0;

  const int64_t lhs_cols = problem.product == Product::kDlhs ? problem.n : problem.k;
  const int64_t out_cols = forward ? problem.n : problem.k;
  const int64_t matrix = problem.k * problem.n;
  const Array lhs = RandomArray(random, types.lhs, problem.m * lhs_cols);
  const Array rhs = RandomArray(random, types.rhs, contraction ? problem.m * problem.n : problem.num_weights * matrix);
  const Array bias = RandomArray(random, types.wide ? DType::kF64 : DType::kF32, problem.num_weights * out_cols);
  const std::vector<int32_t> sizes = RandomSizes(random, problem.groups, problem.m);
  Array out(types.out, contraction ? problem.num_weights * matrix : problem.m * out_cols);
  for (size_t i = 0; i < out.values.size(); ++i) out.Set(i, std::nan(""));
  problem.lhs = lhs.bytes.data();
  problem.rhs = rhs.bytes.data();
  problem.bias = !contraction && Uniform(random, 0, 1) ? bias.bytes.data() : nullptr;
  problem.group_sizes = sizes.data();
  problem.out = out.bytes.data();

  const auto on_threads = [](int64_t count, const std::function<void(int64_t)>& work) {
    std::atomic<int64_t> next{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([&] {
        for (int64_t at; (at = next++) < count;) work(at);
      });
    }
    for (std::thread& thread : threads) thread.join();
  };
  GroupedProducts({problem}, types, Uniform(random, 1, 64), on_threads);

  // The plain loop.
  std::vector<double> expected(out.values.size()), magnitude(out.values.size());
  int64_t row = 0;
  for (int64_t group = 0; group < problem.groups; ++group) {
    const int64_t end = std::min(problem.m, row + std::max<int64_t>(sizes[group], 0));
    const int64_t weight = group - problem.group_offset;
    for (; row < end; ++row) {
      if (weight < 0 || weight >= problem.num_weights) continue;
      for (int64_t k = 0; k < problem.k; ++k) {
        for (int64_t n = 0; n < problem.n; ++n) {
          double a, b;
          int64_t to;
          if (contraction) {
            a = lhs.values[row * problem.k + k], b = rhs.values[row * problem.n + n],
            to = weight * matrix + k * problem.n + n;
          } else {
            a = lhs.values[row * lhs_cols + (forward ? k : n)];
            b = rhs.values[weight * matrix + k * problem.n + n];
            to = row * out_cols + (forward ? n : k);
          }
          expected[to] += a * b;
          magnitude[to] += std::abs(a * b);
        }
      }
      for (int64_t col = 0; problem.bias != nullptr && col < out_cols; ++col) {
        expected[row * out_cols + col] += bias.values[weight * out_cols + col];
        magnitude[row * out_cols + col] += std::abs(bias.values[weight * out_cols + col]);
      }
    }
  }
  const int64_t depth = contraction ? problem.m : forward ? problem.k : problem.n;
  const char* name = contraction ? "drhs" : forward ? "forward" : "dlhs";
  for (size_t i = 0; i < expected.size(); ++i) Compare(out, i, expected[i], magnitude[i], depth, types.wide, name);
}

}  // namespace
}  // namespace jax_ggemm

int main(int argc, char** argv) {
  if (argc != 4 || !jax_ggemm::SetInstructionSet(argv[1])) {
    std::printf("not available: %s\n", argc > 1 ? argv[1] : "");
    return 2;
  }
  jax_ggemm::Random random(std::strtoull(argv[2], nullptr, 10));
  const int count = std::atoi(argv[3]);
  for (int i = 0; i < count; ++i) jax_ggemm::Check(random);
  std::printf("%d problems, %d wrong elements\n", count, jax_ggemm::failures);
  return jax_ggemm::failures != 0;
}
