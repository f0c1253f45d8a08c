// The three grouped products on the CPU: how a call is cut into blocks that run in parallel.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "inner_product.h"

namespace jax_ggemm {

enum class Product { kForward, kDlhs, kDrhs };

// One product of row-major arrays without batch axes; see jax_ggemm/products.py for the shapes.
struct Problem {
  Product product;
  int64_t m;            // rows of lhs
  int64_t k;            // columns of lhs (FORWARD, DRHS) or of the result (DLHS)
  int64_t n;            // columns of the result (FORWARD), of lhs (DLHS) or of rhs (DRHS)
  int64_t groups;       // entries of group_sizes
  int64_t num_weights;  // matrices of rhs, or of the result for DRHS
  const void* lhs;
  const void* rhs;
  const int32_t* group_sizes;
  int32_t group_offset;
  const void* bias;  // (num_weights, columns of the result) in the accumulation type, or null
  void* out;
};

// What all problems of a call share.
struct Types {
  DType lhs;
  DType rhs;
  DType out;
  bool wide;  // sums in double
};

// Calls work(i) for every i in [0, count), in any order, on several threads, and returns when all are done.
using ParallelFor = std::function<void(int64_t count, const std::function<void(int64_t)>& work)>;

// Runs the problems of one call. Reads and writes inside the arrays whatever group_sizes holds: a negative
// size counts as 0, and groups end at row m.
void GroupedProducts(const std::vector<Problem>& problems, const Types& types, int64_t threads,
                     const ParallelFor& parallel_for);

}  // namespace jax_ggemm
