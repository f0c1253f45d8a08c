// The inner product for one instruction set.
//
// Each of inner_product_{base,avx2,avx512}.cc sets JAX_GGEMM_VECTOR_BYTES, JAX_GGEMM_TILE_ROWS and
// JAX_GGEMM_INNER_PRODUCT and includes this file. Everything else here has internal linkage and no standard
// library function is instantiated: the linker would keep the code of one instruction set for all.
//
// The scheme is that of GotoBLAS and BLIS (Van Zee and van de Geijn, 2015): the result is computed in register
// tiles of kTileRows x 2 vectors, from panels that are packed as the tile reads them. Packing widens 16-bit
// elements and undoes transposes. What grouped products need beyond it: operands are read in place, without
// packing, where their rows are used too few times to pay for it, as the weights of a group of few rows are.
#include <cstdint>

#include "convert.h"
#include "inner_product_kernels.h"

namespace jax_ggemm {
namespace {

constexpr int kTileRows = JAX_GGEMM_TILE_ROWS;
// The part of the contraction that is worked off at a time: a packed panel of rhs then fits L1, and the result
// is read back seldom.
constexpr int64_t kPartDepth = 512;
// Up to this depth, rhs is cheaper to read in place, and the result, written row by row, is what takes time.
constexpr int64_t kShallow = 32;

template <typename Acc>
struct Simd {
  static constexpr int kLanes = JAX_GGEMM_VECTOR_BYTES / static_cast<int>(sizeof(Acc));
  static constexpr int kTileCols = 2 * kLanes;
  typedef Acc Vector __attribute__((vector_size(JAX_GGEMM_VECTOR_BYTES)));
  typedef Acc Unaligned __attribute__((vector_size(JAX_GGEMM_VECTOR_BYTES), aligned(sizeof(Acc)), may_alias));

  static Vector Load(const Acc* from) { return *reinterpret_cast<const Unaligned*>(from); }
  static void Store(Acc* to, Vector value) { *reinterpret_cast<Unaligned*>(to) = value; }
};

// lhs element (i, p) at data[i * stride + p * depth_stride], rhs element (p, j) at data[p * depth_stride + j].
template <typename Acc>
struct Panel {
  const Acc* data;
  int64_t stride;
  int64_t depth_stride;
};

// out[kRows, kTileCols] = lhs * rhs, plus what out holds where `add`.
template <typename Acc, int kRows>
void Tile(int64_t depth, Panel<Acc> lhs, Panel<Acc> rhs, Acc* out, int64_t out_stride, bool add) {
  using S = Simd<Acc>;
  typename S::Vector sum[kRows][2];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) sum[i][0] = sum[i][1] = typename S::Vector{};
  const Acc* a = lhs.data;
  const Acc* b = rhs.data;
  for (int64_t p = 0; p < depth; ++p, a += lhs.depth_stride, b += rhs.depth_stride) {
    __builtin_prefetch(b + 16 * rhs.depth_stride);
    const typename S::Vector b0 = S::Load(b);
    const typename S::Vector b1 = S::Load(b + S::kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const Acc value = a[i * lhs.stride];
      sum[i][0] += value * b0;
      sum[i][1] += value * b1;
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i, out += out_stride) {
    if (add) {
      sum[i][0] += S::Load(out);
      sum[i][1] += S::Load(out + S::kLanes);
    }
    S::Store(out, sum[i][0]);
    S::Store(out + S::kLanes, sum[i][1]);
  }
}

template <typename Acc, int kRows>
void TileOfRows(int64_t rows, int64_t depth, Panel<Acc> lhs, Panel<Acc> rhs, Acc* out, int64_t out_stride, bool add) {
  if (rows == kRows) return Tile<Acc, kRows>(depth, lhs, rhs, out, out_stride, add);
  if constexpr (kRows > 1) TileOfRows<Acc, kRows - 1>(rows, depth, lhs, rhs, out, out_stride, add);
}

// Packs `lanes` (at most kWidth) lanes of a panel: out[p * kWidth + lane] = element (lane, p), zeros beside them.
template <int kWidth, typename Acc, typename T>
void PackPanel(const T* in, int64_t lane_stride, int64_t depth_stride, int64_t lanes, int64_t depth, Acc* out) {
  constexpr int64_t kStep = 16;
  constexpr int64_t kAhead = 8;  // rows that are far apart are not fetched ahead by the hardware
  if (lanes < kWidth) {
    for (int64_t i = 0; i < depth * kWidth; ++i) out[i] = 0;
  } else if (lane_stride == 1) {
    for (int64_t p = 0; p < depth; ++p) {
      __builtin_prefetch(in + (p + kAhead) * depth_stride);
      for (int lane = 0; lane < kWidth; ++lane) out[p * kWidth + lane] = Widen(in[p * depth_stride + lane]);
    }
    return;
  }
  int64_t p = 0;
  if (depth_stride == 1) {  // a transpose: through a small square, so that reads are contiguous
    Acc square[kWidth][kStep];
    for (; p + kStep <= depth; p += kStep) {
      for (int64_t lane = 0; lane < lanes; ++lane) {
        for (int64_t q = 0; q < kStep; ++q) square[lane][q] = Widen(in[lane * lane_stride + p + q]);
      }
      for (int64_t q = 0; q < kStep; ++q) {
        for (int64_t lane = 0; lane < lanes; ++lane) out[(p + q) * kWidth + lane] = square[lane][q];
      }
    }
  }
  for (; p < depth; ++p) {
    for (int64_t lane = 0; lane < lanes; ++lane) {
      out[p * kWidth + lane] = Widen(in[lane * lane_stride + p * depth_stride]);
    }
  }
}

template <int kWidth, typename Acc>
void PackPanel(const ConstMatrix& in, int64_t lanes, int64_t depth, Acc* out) {
  const auto pack = [&](const auto* data) { PackPanel<kWidth>(data, in.row_stride, in.col_stride, lanes, depth, out); };
  switch (in.dtype) {
    case DType::kF32:
      return pack(static_cast<const float*>(in.data));
    case DType::kF64:
      return pack(static_cast<const double*>(in.data));
    case DType::kBF16:
      return pack(static_cast<const BF16*>(in.data));
    case DType::kF16:
      return pack(static_cast<const F16*>(in.data));
  }
}

template <typename Acc>
constexpr DType kAccType = sizeof(Acc) == 8 ? DType::kF64 : DType::kF32;

int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t RoundUp(int64_t a, int64_t b) { return (a + b - 1) / b * b; }

// A part of the contraction: out[rows, cols] (+)= lhs[rows, depth] * rhs[depth, cols], where out element (i, j)
// lies at data[i * row_stride + j * col_stride].
template <typename Acc>
struct Part {
  int64_t rows;
  int64_t cols;
  int64_t depth;
  ConstMatrix lhs;
  ConstMatrix rhs;
  Acc* out;
  int64_t out_row_stride;
  int64_t out_col_stride;
  bool add;
};

// How the operands of a block are read.
struct Reading {
  bool lhs_in_place;
  bool rhs_in_place;
};

// One tile whose result is too narrow or does not have contiguous rows: through a buffer.
template <typename Acc>
void TileByElement(const Part<Acc>& part, int64_t rows, int64_t cols, Panel<Acc> lhs, Panel<Acc> rhs, Acc* out) {
  using S = Simd<Acc>;
  Acc tile[kTileRows * S::kTileCols];
  TileOfRows<Acc, kTileRows>(rows, part.depth, lhs, rhs, tile, S::kTileCols, false);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) {
      Acc& element = out[i * part.out_row_stride + j * part.out_col_stride];
      element = tile[i * S::kTileCols + j] + (part.add ? element : Acc{0});
    }
  }
}

template <typename Acc>
void MultiplyPart(const Part<Acc>& part, Reading reading, Acc* lhs_scratch, Acc* rhs_scratch) {
  using S = Simd<Acc>;
  const int64_t depth = part.depth;
  if (!reading.lhs_in_place) {
    for (int64_t row = 0; row < part.rows; row += kTileRows) {
      PackPanel<kTileRows>(part.lhs.At(row, 0), Min(kTileRows, part.rows - row), depth, lhs_scratch + row * depth);
    }
  }
  const auto rhs_panel = [&](int64_t col) -> Panel<Acc> {
    const int64_t cols = Min(S::kTileCols, part.cols - col);
    if (reading.rhs_in_place && cols == S::kTileCols) {
      return {static_cast<const Acc*>(part.rhs.At(0, col).data), 0, part.rhs.row_stride};
    }
    PackPanel<S::kTileCols>(part.rhs.At(0, col).Transposed(), cols, depth, rhs_scratch);
    return {rhs_scratch, 0, S::kTileCols};
  };
  const auto tile = [&](int64_t row, int64_t col, Panel<Acc> rhs) {
    const int64_t rows = Min(kTileRows, part.rows - row);
    const int64_t cols = Min(S::kTileCols, part.cols - col);
    Panel<Acc> lhs = {lhs_scratch + row * depth, 1, kTileRows};
    if (reading.lhs_in_place) {
      lhs = {static_cast<const Acc*>(part.lhs.At(row, 0).data), part.lhs.row_stride, part.lhs.col_stride};
    }
    Acc* out = part.out + row * part.out_row_stride + col * part.out_col_stride;
    if (cols == S::kTileCols && part.out_col_stride == 1) {
      TileOfRows<Acc, kTileRows>(rows, depth, lhs, rhs, out, part.out_row_stride, part.add);
    } else {
      TileByElement(part, rows, cols, lhs, rhs, out);
    }
  };
  if (reading.rhs_in_place && depth <= kShallow) {
    for (int64_t row = 0; row < part.rows; row += kTileRows) {
      for (int64_t col = 0; col < part.cols; col += S::kTileCols) tile(row, col, rhs_panel(col));
    }
  } else {
    for (int64_t col = 0; col < part.cols; col += S::kTileCols) {
      const Panel<Acc> rhs = rhs_panel(col);
      for (int64_t row = 0; row < part.rows; row += kTileRows) tile(row, col, rhs);
    }
  }
}

template <typename Acc, typename T>
void Round(const Acc* in, T* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) Narrow(in[i], out + i);
}

template <typename Acc>
void RoundRow(const Acc* in, const Matrix& out, int64_t count) {
  switch (out.dtype) {
    case DType::kF32:
      return Round(in, static_cast<float*>(out.data), count);
    case DType::kF64:
      return Round(in, static_cast<double*>(out.data), count);
    case DType::kBF16:
      return Round(in, static_cast<BF16*>(out.data), count);
    case DType::kF16:
      return Round(in, static_cast<F16*>(out.data), count);
  }
}

template <typename Acc>
void Multiply(const Block& block, Allocator allocate) {
  using S = Simd<Acc>;
  const bool direct = block.out.dtype == kAccType<Acc>;
  Part<Acc> whole = {block.rows, block.cols, 0, block.lhs, block.rhs, nullptr, 0, 1, false};

  // Few rows against weights that are contiguous along the contraction: the weights become the lhs, which can
  // be read in place.
  const bool swap = block.rows <= S::kTileCols && block.rhs.dtype == kAccType<Acc> && block.rhs.row_stride == 1 &&
                    block.rhs.col_stride != 1;
  if (swap) {
    whole = {block.cols, block.rows, 0, block.rhs.Transposed(), block.lhs.Transposed(), nullptr, 1, 0, false};
  }
  const Reading reading = {
      whole.lhs.dtype == kAccType<Acc> && whole.lhs.col_stride == 1,
      whole.rhs.dtype == kAccType<Acc> && whole.rhs.col_stride == 1 &&
          (whole.rows <= 4 * kTileRows || block.depth <= kShallow),
  };

  const int64_t lhs_size = reading.lhs_in_place ? 0 : RoundUp(whole.rows, kTileRows) * kPartDepth;
  const int64_t rhs_size = S::kTileCols * kPartDepth;
  const int64_t out_size = direct ? 0 : block.rows * block.cols;
  Acc* lhs_scratch = static_cast<Acc*>(allocate(static_cast<size_t>(lhs_size + rhs_size + out_size) * sizeof(Acc)));
  Acc* rhs_scratch = lhs_scratch + lhs_size;
  Acc* out = direct ? static_cast<Acc*>(block.out.data) : rhs_scratch + rhs_size;
  const int64_t out_stride = direct ? block.out.row_stride : block.cols;
  whole.out = out;
  (swap ? whole.out_col_stride : whole.out_row_stride) = out_stride;

  const bool fill = block.bias != nullptr || block.depth == 0;
  if (fill) {
    for (int64_t row = 0; row < block.rows; ++row) {
      for (int64_t col = 0; col < block.cols; ++col) {
        out[row * out_stride + col] = block.bias ? static_cast<const Acc*>(block.bias)[col] : Acc{0};
      }
    }
  }
  for (int64_t at = 0; at < block.depth; at += kPartDepth) {
    Part<Acc> part = whole;
    part.depth = Min(kPartDepth, block.depth - at);
    part.lhs = whole.lhs.At(0, at);
    part.rhs = whole.rhs.At(at, 0);
    part.add = fill || at > 0;
    MultiplyPart(part, reading, lhs_scratch, rhs_scratch);
  }
  if (direct) return;
  for (int64_t row = 0; row < block.rows; ++row) {
    RoundRow(out + row * out_stride, block.out.At(row, 0), block.cols);
  }
}

}  // namespace

void JAX_GGEMM_INNER_PRODUCT(const Block& block, bool wide, Allocator allocate) {
  return wide ? Multiply<double>(block, allocate) : Multiply<float>(block, allocate);
}

}  // namespace jax_ggemm
