"""The epilogue: from accumulators in registers to global memory, rows and columns past the ends left alone.

Whole tiles go through buffers in shared memory, from where the TMA unit writes them while the next tile is multiplied.
Tiles that end with their group are stored from registers, row by row.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, Int64, cute, pipeline
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.tensor_utils import LayoutEnum

from jax_ggemm.kernel.config import STAGING_BUFFERS, STAGING_COLUMNS


@dataclasses.dataclass(frozen=True)
class Result:
    """Where a kernel writes: a row-major matrix, and what is added to it."""

    data: Any
    columns: Any
    bias: Any
    """Pointer to a (weights, columns) float32 matrix, read only where the kernel was compiled with bias."""
    matrix_rows: Any
    """Where rows are contracted: the rows of each matrix of the result."""


@cute.jit
def add_bias(acc: cute.Tensor, coords: cute.Tensor, result: Result, row: Int32, column: Int32):
    """Adds a row of bias to every row of the accumulators."""
    bias = cute.make_tensor(
        result.bias + (Int64(row) * Int64(result.columns) + Int64(column)), cute.make_layout(result.columns - column)
    )
    for i in cutlass.range_constexpr(cute.size(acc, mode=[2])):
        for c in cutlass.range_constexpr(2):
            for a in cutlass.range_constexpr(cute.size(acc, mode=[0, 2])):
                at = coords[(c, 0, a), 0, i][1]
                value = Float32(0)
                if column + at < result.columns:
                    value = bias[at]
                for j in cutlass.range_constexpr(cute.size(acc, mode=[1])):
                    for r in cutlass.range_constexpr(2):
                        acc[(c, r, a), j, i] += value


@cute.jit
def _transpose_in_quad(values: cute.Tensor):
    """Transposes the 4 x 4 matrix whose row j is the four values of the j-th of four neighbouring lanes."""
    lane = cute.arch.lane_idx()
    for bit in cutlass.range_constexpr(2):
        step = 1 << bit
        upper = (lane & step) != 0
        for j in cutlass.range_constexpr(4):
            if cutlass.const_expr(j & step == 0):
                low = values[j]
                high = values[j | step]
                sent = high
                if upper:
                    sent = low
                got = cute.arch.shuffle_sync_bfly(sent, step)
                if upper:
                    low = got
                else:
                    high = got
                values[j] = low
                values[j | step] = high


@cute.jit
def store(acc: cute.Tensor, coords: cute.Tensor, result: Result, origin: tuple, rows: Int32):
    """Writes a tile; run by the threads that hold its accumulators.

    A warpgroup's accumulators give each thread two neighbouring columns out of every eight. Four lanes that share
    a row trade them, so that each has eight neighbouring columns of a 16-bit result: one 16-byte store.

    Args:
      acc: the thread's accumulators, ((2, 2, n / 8), tiles of m, tiles of n).
      coords: their (row, column) in the tile, in the same layout.
      result: where to.
      origin: (row, column) of the tile in the result.
      rows: how many rows of the tile are written.
    """
    dtype = result.data.dtype
    atoms = cute.size(acc, mode=[0, 2])
    quad_lane = cute.arch.lane_idx() % 4
    copy = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), dtype, num_bits_per_copy=128 if dtype.width == 16 else 64)
    per_store = 8 if dtype.width == 16 else 2

    converted = cute.make_rmem_tensor(acc.layout, dtype)
    converted.store(acc.load().to(dtype))
    for j in cutlass.range_constexpr(cute.size(acc, mode=[1])):
        for r in cutlass.range_constexpr(2):
            row = coords[(0, r, 0), j, 0][0]
            row_start = Int64(origin[0] + row) * Int64(result.columns)
            for i in cutlass.range_constexpr(cute.size(acc, mode=[2])):
                group = 4 if dtype.width == 16 else 1
                for a in cutlass.range_constexpr(0, atoms, group):
                    values = cute.make_rmem_tensor(per_store, dtype)
                    for b in cutlass.range_constexpr(group):
                        for c in cutlass.range_constexpr(2):
                            values[2 * b + c] = converted[(c, r, a + b), j, i]
                    column = coords[(0, 0, a), j, i][1]
                    if cutlass.const_expr(group == 4):
                        _transpose_in_quad(cute.recast_tensor(values, Int32))
                        column += 6 * quad_lane  # from two columns a lane to eight
                    column += origin[1]
                    if row < rows and column < result.columns:
                        # Both are multiples of per_store: columns of the result come in eights.
                        at = result.data + cute.assume(row_start + Int64(column), divby=per_store)
                        cute.copy(copy, values, cute.make_tensor(at, cute.make_layout(per_store)))


def staging(result: Result, rows: Any, matrices: Any, box: tuple[int, int], buffers: int) -> tuple:
    """A tensor map of the result, its (row, column, matrix) view, and the layout of buffers of a box of it."""
    columns, dtype = result.columns, result.data.dtype
    shape = (rows, columns, matrices)
    view = cute.make_tensor(
        result.data, cute.make_layout(shape, stride=(Int64(columns), 1, Int64(rows) * Int64(columns)))
    )
    layout = hopper.make_smem_layout_epi(dtype, LayoutEnum.ROW_MAJOR, box, buffers)
    buffer = cute.slice_(layout, (None, None, 0))
    tma, tensor = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), view, buffer, box)
    return tma, tensor, layout


@cute.jit
def store_staged(acc: cute.Tensor, tiled_mma: cute.TiledMma, thread: Int32, out: tuple, origin: tuple):
    """Writes a whole tile through shared memory and the TMA unit, which goes on while the next tile is multiplied.

    Args:
      acc: the thread's accumulators.
      tiled_mma: what gave them; its warpgroups are stacked along m.
      thread: of the threads that call this, 128 for each warpgroup.
      out: (tensor map, its (m, n, matrix) view, the buffers).
      origin: (row, column, matrix) of the tile.
    """
    tma, view, buffers = out
    threads = cute.size(tiled_mma)
    barrier = pipeline.NamedBarrier(barrier_id=1, num_threads=threads)
    dtype = buffers.element_type
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype)
    copy = cute.make_tiled_copy_S(atom, cute.make_tiled_copy_C_atom(atom, tiled_mma))
    of_thread = copy.get_slice(thread)
    to = of_thread.partition_D(buffers)
    values = copy.retile(acc)
    piece = cute.make_rmem_tensor(cute.shape(of_thread.partition_S(buffers))[:3], Float32)
    rounded = cute.make_rmem_tensor(piece.layout, dtype)
    pieces = cute.size(values) // cute.size(piece)
    tile = cute.local_tile(
        cute.domain_offset((origin[0], origin[1]), view[None, None, origin[2]]),
        (cute.size(buffers, mode=[0]), STAGING_COLUMNS),
        (0, None),
    )
    from_smem, to_gmem = cpasync.tma_partition(
        tma, 0, cute.make_layout(1), cute.group_modes(buffers, 0, 2), cute.group_modes(tile, 0, 2)
    )
    first_warp = cute.arch.make_warp_uniform(thread // 32) == 0
    for i in cutlass.range_constexpr(pieces):
        for j in cutlass.range_constexpr(cute.size(piece)):
            piece[j] = values[i * cute.size(piece) + j]
        rounded.store(piece.load().to(dtype))
        cute.copy(copy, rounded, to[None, None, None, i % STAGING_BUFFERS])
        cute.arch.fence_proxy("async.shared", space="cta")
        barrier.arrive_and_wait()
        if first_warp:
            cute.copy(tma, from_smem[None, i % STAGING_BUFFERS], to_gmem[None, i])
            cute.arch.cp_async_bulk_commit_group()
            # The buffer that the next piece goes to has been read.
            cute.arch.cp_async_bulk_wait_group(STAGING_BUFFERS - 1, read=True)
        barrier.arrive_and_wait()


@cute.jit
def finish_staged(thread: Int32):
    """Waits until the buffers have been read; called before a block ends."""
    if cute.arch.make_warp_uniform(thread // 32) == 0:
        cute.arch.cp_async_bulk_wait_group(0, read=True)
