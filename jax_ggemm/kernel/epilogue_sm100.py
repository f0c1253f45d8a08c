"""The epilogue on Blackwell: from tensor memory through registers to global memory, with no buffer in between.

A thread holds neighbouring columns of one row. It writes them 32 bytes at a time: whole sectors of L2, with half of
the stores that 16 bytes would take.
"""

from __future__ import annotations

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import tcgen05

from jax_ggemm.kernel import rings
from jax_ggemm.kernel.config import KernelSpec
from jax_ggemm.kernel.config_sm100 import STAGING_BUFFERS, STAGING_ROWS, Sm100Config
from jax_ggemm.kernel.epilogue import Result
from jax_ggemm.kernel.schedule import WorkRing, WorkTile

WARPS = 4
"""Warps 0 to 3: a warp may read those lanes of tensor memory that its number modulo 4 gives it."""

_CHUNK = 64
"""Columns of a row that a thread holds at a time."""

_WIDE_BYTES = 32
_NARROW_BYTES = 16


@cute.jit
def takes_wide_stores(result: Result) -> Boolean:
    """Whether every row of the result starts at a multiple of 32 bytes."""
    pitch = Int64(result.columns) * (result.data.dtype.width // 8)
    return ((result.data.toint() | pitch) & (_WIDE_BYTES - 1)) == 0


@cute.jit
def add_bias(values: cute.Tensor, result: Result, row: Int32, column: Int32):
    """Adds a part of a row of bias to neighbouring columns, of which some may lie past the last."""
    per_load = 4
    start = Int64(row) * Int64(result.columns) + Int64(column)
    copy = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), Float32, num_bits_per_copy=128)
    for i in cutlass.range_constexpr(0, cute.size(values), per_load):
        if column + i < result.columns:
            # Columns come in eights, and so do the rows of bias.
            at = result.bias + cute.assume(start + i, divby=per_load)
            loaded = cute.make_rmem_tensor(per_load, Float32)
            cute.copy(copy, cute.make_tensor(at.align(16), cute.make_layout(per_load)), loaded)
            for j in cutlass.range_constexpr(per_load):
                values[i + j] += loaded[j]


@cute.jit
def store_row(values: cute.Tensor, result: Result, row: Int64, column: Int32, wide: Boolean):
    """Writes neighbouring columns of a row, those past the last left out.

    Args:
      values: float32, as many as fill a multiple of 32 bytes of the result.
      result: where to.
      row: of the result.
      column: the first one; a multiple of 16.
      wide: stores of 32 bytes are aligned.
    """
    converted = cute.make_rmem_tensor(values.layout, result.data.dtype)
    converted.store(values.load().to(result.data.dtype))
    start = row * Int64(result.columns) + Int64(column)
    if wide:
        _store(converted, result, start, column, _WIDE_BYTES)
    else:
        _store(converted, result, start, column, _NARROW_BYTES)


@cute.jit
def _store(values: cute.Tensor, result: Result, start: Int64, column: Int32, num_bytes: cutlass.Constexpr):
    """Writes values in pieces of so many bytes."""
    dtype = result.data.dtype
    size = dtype.width // 8
    per_store = num_bytes // size
    copy = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), dtype, num_bits_per_copy=8 * num_bytes)
    address = result.data.toint() + start * size
    for i in cutlass.range_constexpr(0, cute.size(values), per_store):
        if column + i < result.columns:
            to = cute.make_ptr(dtype, address + i * size, cute.AddressSpace.gmem, assumed_align=num_bytes)
            layout = cute.make_layout(per_store)
            cute.copy(copy, cute.make_tensor(values.iterator + i, layout), cute.make_tensor(to, layout))


class Epilogue:
    """Writes the tiles of one block."""

    def __init__(self, spec: KernelSpec):
        assert isinstance(spec.config, Sm100Config)
        self.config = spec.config
        self.has_bias = spec.has_bias
        self.ragged_rows = spec.product.rows_are_ragged
        self.rows = spec.config.tile_m // spec.config.blocks
        self.staged = spec.config.stages_results_of(spec.out_dtype)

    @cute.jit
    def run(self, acc: cute.Tensor, slots: tuple, first_row: Int32, outputs: tuple, work: WorkRing):
        """Writes the tiles of the result; run by the warps of the epilogue.

        Args:
          acc: (atom, 1, atoms of a slot, slots) of tensor memory.
          slots: (full, empty) barriers.
          first_row: of the block, in a tile.
          outputs: the result, and its `Staging` or None.
          work: the tiles.
        """
        slot_full, slot_empty = slots
        result, staging = outputs
        config = self.config
        thread = cute.arch.thread_idx()[0]
        copy, from_tmem, coords = self._from_tmem(acc, thread)
        per_load = _CHUNK * 128 // self.rows
        row, offset = coords[0]
        row += first_row
        first_of_warp = cute.arch.make_warp_uniform(thread // 32) * (self.rows // WARPS) + first_row
        wide = config.wide_stores and takes_wide_stores(result)
        pieces = config.slot_columns // per_load
        slot = rings.reader(config.slots)
        position = work.reader()
        tile = work.get(position)
        while tile.k_tiles >= 0:
            position.advance()
            has_rows = first_of_warp < tile.rows
            for part in cutlass.range_constexpr(config.slots_per_tile):
                if tile.k_tiles > 0:
                    slot_full.wait(slot)
                for i in cutlass.range(pieces if has_rows else 0, unroll=1):
                    values = cute.make_rmem_tensor(_CHUNK, Float32)
                    values.fill(0.0)
                    column = tile.column + part * config.slot_columns + i * per_load + offset
                    if tile.k_tiles > 0:
                        loaded = cute.make_tensor(values.iterator, cute.make_layout(coords.shape))
                        cute.copy(copy, from_tmem[None, None, None, i, slot.index], loaded)
                        if i == pieces - 1:
                            # Nothing is left to read: the next product may start while this one is written.
                            cute.arch.fence_view_async_tmem_load()
                            slot_empty.arrive_at_first(slot)
                        if cutlass.const_expr(self.has_bias):
                            add_bias(values, result, tile.depth, column)
                    self._store(values, outputs, tile, (row, first_of_warp, column), (i % STAGING_BUFFERS, wide))
                if tile.k_tiles > 0:
                    if not has_rows:
                        slot_empty.arrive_at_first(slot)
                    slot.advance()
            tile = work.get(position)
        if cutlass.const_expr(self.staged):
            staging.finish()

    def _from_tmem(self, acc: cute.Tensor, thread: Int32) -> tuple:
        """How a thread reads its columns: the copy, (..., chunk, slot) of tensor memory, and their places in a tile."""
        # Of 64 rows a warp has 16, and half of its lanes take every other chunk.
        per_load = _CHUNK * 128 // self.rows
        op = tcgen05.Ld32x32bOp if self.rows == 128 else tcgen05.Ld16x32bx2Op
        atom = cute.make_copy_atom(op(tcgen05.Repetition(_CHUNK)), Float32)
        columns = cute.group_modes(acc[(None, None), 0, None, None], 1, 3)
        chunks = cute.flat_divide(columns, (self.rows, per_load))[None, None, 0, None, None]
        copy = tcgen05.make_tmem_copy(atom, chunks[None, None, 0, 0])
        of_thread = copy.get_slice(thread)
        from_tmem = of_thread.partition_S(chunks)
        coords = of_thread.partition_D(cute.make_identity_tensor((self.rows, per_load)))
        return copy, from_tmem, coords

    @cute.jit
    def _store(self, values: cute.Tensor, outputs: tuple, tile: WorkTile, at: tuple, how: tuple):
        """Writes neighbouring columns of a row, where the tile has it.

        Args:
          values: of the thread.
          outputs: the result, and its `Staging` or None.
          tile: whose values they are.
          at: (row of the thread, first row of its warp, column), in the tile and in the result.
          how: (which buffer of the warp, whether stores of 32 bytes are aligned).
        """
        result, staging = outputs
        row, first_of_warp, column = at
        first, matrix = tile.out_row, Int32(0)
        if cutlass.const_expr(not self.ragged_rows):
            first, matrix = tile.a_column, tile.out_row
        whole = Boolean(False)
        if cutlass.const_expr(self.staged):
            whole = first_of_warp + STAGING_ROWS <= tile.rows
            if whole:
                staging.put(values, (first + first_of_warp, column, matrix), how[0])
        if not whole and row < tile.rows:
            if cutlass.const_expr(not self.ragged_rows):
                first += matrix * result.matrix_rows
            store_row(values, result, Int64(first) + Int64(row), column, how[1])
