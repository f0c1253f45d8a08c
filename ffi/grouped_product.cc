#include "grouped_product.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "convert.h"

namespace jax_ggemm {
namespace {

// The blocks of a call are at most this large, and made smaller until there are enough for all threads.
constexpr int64_t kMaxBlockRows = 240;
constexpr int64_t kMaxBlockCols = 512;
constexpr int64_t kMinBlockRows = 24;
constexpr int64_t kMinBlockCols = 64;
// Block edges are multiples of these, and so of every inner product's register tile.
constexpr int64_t kRowQuantum = 24;
constexpr int64_t kColQuantum = 64;
constexpr int64_t kBlocksPerThread = 4;

// A contraction over this many rows of one group is split where its result is too small to give every thread
// a block. The split depends on the shapes alone, so that a result does not depend on the number of threads.
constexpr int64_t kSplitMinDepth = 16384;
constexpr int64_t kSplitMaxResult = 512 * 512;
constexpr int64_t kMaxSplits = 16;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The product of one group, or a part of the contraction of one: out = lhs * rhs.
struct Piece {
  int64_t rows;
  int64_t cols;
  int64_t depth;
  ConstMatrix lhs;
  ConstMatrix rhs;
  const void* bias;
  Matrix out;
};

// The parts of a contraction that was split, and where their sum goes.
struct Reduction {
  std::vector<Matrix> parts;
  int64_t rows;
  int64_t cols;
  Matrix out;
};

struct Zeros {
  void* data;
  size_t bytes;
};

// Everything that a call has to do.
struct Plan {
  std::vector<Piece> pieces;
  std::vector<Reduction> reductions;
  std::vector<Zeros> zeros;
  std::vector<std::unique_ptr<char[]>> scratch;
};

const void* Offset(const void* base, DType dtype, int64_t elements) {
  return static_cast<const char*>(base) + static_cast<int64_t>(ByteWidth(dtype)) * elements;
}

void* Offset(void* base, DType dtype, int64_t elements) {
  return static_cast<char*>(base) + static_cast<int64_t>(ByteWidth(dtype)) * elements;
}

// Calls visit(group, first_row, end_row) for each group, and returns the row at which the last one ends.
template <typename Visit>
int64_t ForEachGroup(const Problem& problem, const Visit& visit) {
  int64_t row = 0;
  for (int64_t group = 0; group < problem.groups; ++group) {
    const int64_t size = std::max<int64_t>(problem.group_sizes[group], 0);
    const int64_t end = std::min(problem.m, row + size);
    visit(group, row, end);
    row = end;
  }
  return row;
}

void AddRaggedRows(const Problem& problem, const Types& types, Plan& plan) {
  const bool forward = problem.product == Product::kForward;
  const int64_t depth = forward ? problem.k : problem.n;
  const int64_t cols = forward ? problem.n : problem.k;
  const DType bias_dtype = types.wide ? DType::kF64 : DType::kF32;
  const auto zero_rows = [&](int64_t row, int64_t end) {
    // In chunks, so that many zeros are written by many threads.
    for (int64_t at = row; at < end; at += kMaxBlockRows) {
      const int64_t rows = std::min(kMaxBlockRows, end - at);
      plan.zeros.push_back({Offset(problem.out, types.out, at * cols), ByteWidth(types.out) * rows * cols});
    }
  };
  const int64_t last = ForEachGroup(problem, [&](int64_t group, int64_t row, int64_t end) {
    const int64_t weight = group - problem.group_offset;
    if (weight < 0 || weight >= problem.num_weights) return zero_rows(row, end);
    if (row == end) return;
    ConstMatrix weights = {Offset(problem.rhs, types.rhs, weight * problem.k * problem.n), types.rhs, problem.n, 1};
    if (!forward) weights = weights.Transposed();
    const void* bias = problem.bias ? Offset(problem.bias, bias_dtype, weight * cols) : nullptr;
    plan.pieces.push_back({end - row,
                           cols,
                           depth,
                           {Offset(problem.lhs, types.lhs, row * depth), types.lhs, depth, 1},
                           weights,
                           bias,
                           {Offset(problem.out, types.out, row * cols), types.out, cols}});
  });
  zero_rows(last, problem.m);
}

// Splits the contraction into parts with results of their own.
void AddSplit(const Piece& whole, bool wide, Plan& plan) {
  const int64_t splits = std::min(kMaxSplits, whole.depth / (kSplitMinDepth / 2));
  const int64_t depth = CeilDiv(whole.depth, splits);
  const DType dtype = wide ? DType::kF64 : DType::kF32;
  Reduction reduction = {{}, whole.rows, whole.cols, whole.out};
  for (int64_t at = 0; at < whole.depth; at += depth) {
    // new[] without initialiser: the pages are touched by the threads that use them.
    plan.scratch.emplace_back(new char[ByteWidth(dtype) * whole.rows * whole.cols]);
    Piece part = whole;
    part.depth = std::min(depth, whole.depth - at);
    part.lhs = whole.lhs.At(0, at);
    part.rhs = whole.rhs.At(at, 0);
    part.out = {plan.scratch.back().get(), dtype, whole.cols};
    plan.pieces.push_back(part);
    reduction.parts.push_back(part.out);
  }
  plan.reductions.push_back(std::move(reduction));
}

void AddRaggedContraction(const Problem& problem, const Types& types, Plan& plan) {
  const int64_t result = problem.k * problem.n;
  std::vector<bool> written(static_cast<size_t>(problem.num_weights), false);
  ForEachGroup(problem, [&](int64_t group, int64_t row, int64_t end) {
    const int64_t weight = group - problem.group_offset;
    if (weight < 0 || weight >= problem.num_weights || row == end) return;
    written[static_cast<size_t>(weight)] = true;
    const ConstMatrix lhs = {Offset(problem.lhs, types.lhs, row * problem.k), types.lhs, problem.k, 1};
    const Piece piece = {problem.k,
                         problem.n,
                         end - row,
                         lhs.Transposed(),
                         {Offset(problem.rhs, types.rhs, row * problem.n), types.rhs, problem.n, 1},
                         nullptr,
                         {Offset(problem.out, types.out, weight * result), types.out, problem.n}};
    if (piece.depth >= kSplitMinDepth && result <= kSplitMaxResult) {
      AddSplit(piece, types.wide, plan);
    } else {
      plan.pieces.push_back(piece);
    }
  });
  for (int64_t weight = 0; weight < problem.num_weights; ++weight) {
    if (written[static_cast<size_t>(weight)]) continue;
    plan.zeros.push_back({Offset(problem.out, types.out, weight * result), ByteWidth(types.out) * result});
  }
}

// The size of the blocks that the pieces are cut into.
struct BlockShape {
  int64_t rows;
  int64_t cols;
};

int64_t CountBlocks(const std::vector<Piece>& pieces, const BlockShape& shape) {
  int64_t count = 0;
  for (const Piece& piece : pieces) count += CeilDiv(piece.rows, shape.rows) * CeilDiv(piece.cols, shape.cols);
  return count;
}

BlockShape ChooseBlockShape(const std::vector<Piece>& pieces, int64_t threads) {
  BlockShape shape = {kMaxBlockRows, kMaxBlockCols};
  while (CountBlocks(pieces, shape) < kBlocksPerThread * threads) {
    if (shape.cols > kMinBlockCols && (shape.cols >= shape.rows || shape.rows <= kMinBlockRows)) {
      shape.cols /= 2;
    } else if (shape.rows > kMinBlockRows) {
      shape.rows /= 2;
    } else {
      break;
    }
  }
  return shape;
}

// Cuts a length into equal parts of at most about `largest`, so that no thread is left with a remainder.
int64_t EvenPart(int64_t length, int64_t largest, int64_t quantum) {
  const int64_t part = CeilDiv(length, CeilDiv(length, largest));
  return CeilDiv(part, quantum) * quantum;
}

std::vector<Block> CutIntoBlocks(const std::vector<Piece>& pieces, DType bias_dtype, int64_t threads) {
  const BlockShape shape = ChooseBlockShape(pieces, threads);
  std::vector<Block> blocks;
  for (const Piece& piece : pieces) {
    if (piece.rows == 0 || piece.cols == 0) continue;
    const int64_t block_rows = EvenPart(piece.rows, shape.rows, kRowQuantum);
    const int64_t block_cols = EvenPart(piece.cols, shape.cols, kColQuantum);
    for (int64_t col = 0; col < piece.cols; col += block_cols) {
      const void* bias = piece.bias ? Offset(piece.bias, bias_dtype, col) : nullptr;
      for (int64_t row = 0; row < piece.rows; row += block_rows) {
        blocks.push_back({std::min(block_rows, piece.rows - row), std::min(block_cols, piece.cols - col), piece.depth,
                          piece.lhs.At(row, 0), piece.rhs.At(0, col), bias, piece.out.At(row, col)});
      }
    }
  }
  return blocks;
}

// out[row] = the sum of the parts' row.
void ReduceRow(const Reduction& reduction, int64_t row, bool wide) {
  const auto sum = [&](auto zero) {
    using Acc = decltype(zero);
    for (int64_t col = 0; col < reduction.cols; ++col) {
      Acc total = 0;
      for (const Matrix& part : reduction.parts) total += *static_cast<const Acc*>(part.At(row, col).data);
      void* out = reduction.out.At(row, col).data;
      switch (reduction.out.dtype) {
        case DType::kF32:
          Narrow(total, static_cast<float*>(out));
          break;
        case DType::kF64:
          Narrow(total, static_cast<double*>(out));
          break;
        case DType::kBF16:
          Narrow(total, static_cast<BF16*>(out));
          break;
        case DType::kF16:
          Narrow(total, static_cast<F16*>(out));
          break;
      }
    }
  };
  if (wide) {
    sum(double{0});
  } else {
    sum(float{0});
  }
}

// Asks for large pages where a result is large: it is usually fresh memory, and faulting its pages in one by one
// takes longer than computing it (64 MiB: 28 ms against 11 ms).
void AdviseLargePages(const Problem& problem, const Types& types) {
#ifdef __linux__
  constexpr uintptr_t kLargePage = uintptr_t{1} << 21;
  const int64_t elements = problem.product == Product::kForward ? problem.m * problem.n
                           : problem.product == Product::kDlhs  ? problem.m * problem.k
                                                                : problem.num_weights * problem.k * problem.n;
  const auto begin = reinterpret_cast<uintptr_t>(problem.out);
  const uintptr_t first = (begin + kLargePage - 1) / kLargePage * kLargePage;
  const uintptr_t last = (begin + ByteWidth(types.out) * static_cast<size_t>(elements)) / kLargePage * kLargePage;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

}  // namespace

void GroupedProducts(const std::vector<Problem>& problems, const Types& types, int64_t threads,
                     const ParallelFor& parallel_for) {
  Plan plan;
  for (const Problem& problem : problems) {
    AdviseLargePages(problem, types);
    if (problem.product == Product::kDrhs) {
      AddRaggedContraction(problem, types, plan);
    } else {
      AddRaggedRows(problem, types, plan);
    }
  }
  const std::vector<Block> blocks = CutIntoBlocks(plan.pieces, types.wide ? DType::kF64 : DType::kF32, threads);
  const auto num_blocks = static_cast<int64_t>(blocks.size());
  parallel_for(num_blocks + static_cast<int64_t>(plan.zeros.size()), [&](int64_t i) {
    if (i < num_blocks) return InnerProduct(blocks[static_cast<size_t>(i)], types.wide);
    const Zeros& zeros = plan.zeros[static_cast<size_t>(i - num_blocks)];
    if (zeros.bytes > 0) std::memset(zeros.data, 0, zeros.bytes);
  });
  std::vector<std::pair<const Reduction*, int64_t>> rows;
  for (const Reduction& reduction : plan.reductions) {
    for (int64_t row = 0; row < reduction.rows; ++row) rows.emplace_back(&reduction, row);
  }
  parallel_for(static_cast<int64_t>(rows.size()), [&](int64_t i) {
    const auto& [reduction, row] = rows[static_cast<size_t>(i)];
    ReduceRow(*reduction, row, types.wide);
  });
}

}  // namespace jax_ggemm
