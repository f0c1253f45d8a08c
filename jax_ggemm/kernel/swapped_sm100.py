"""The grouped products on Blackwell with operands swapped: for groups of a few rows.

A product of one block has 128 rows at least, or 64 at half speed, but as few columns as 16. So here the weights are its
A, with 128 columns of theirs as its rows, and tokens are its B. Little shared memory goes to tokens, and the rest holds
weights on their way.

The accumulator is the result transposed: a thread has one column and all rows of the tile. Neighbouring lanes trade
values, so that each stores two neighbouring columns, and half a warp a whole sector of a row at least.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.utils.blackwell_helpers as blackwell
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import tcgen05

from jax_ggemm.kernel import rings
from jax_ggemm.kernel.config import ceil_div
from jax_ggemm.kernel.epilogue import Result
from jax_ggemm.kernel.epilogue_sm100 import Epilogue
from jax_ggemm.kernel.loads_sm100 import Loads
from jax_ggemm.kernel.schedule import WorkRing, WorkTile
from jax_ggemm.kernel.sm100 import GroupedGemmSm100

_ROWS_AT_ONCE = 32
"""Rows of a tile that a thread holds at a time."""


class SwappedGemmSm100(GroupedGemmSm100):
    """The kernel of one `KernelSpec` whose configuration is `swapped`."""

    def _loads(self) -> Loads:
        return SwappedLoads(self.spec, self.tile_k, self.wide_boxes)

    def _epilogue(self) -> Epilogue:
        return SwappedEpilogue(self.spec)

    @property
    def _tokens(self) -> int:
        """Columns of a product, of which a tile has one or more."""
        return self.config.tile_m

    def _tiled_mma(self) -> cute.TiledMma:
        return blackwell.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            self.b_major,
            self.a_major,
            Float32,
            self.group,
            (self.config.tile_n, self._tokens),
        )

    def _tiles_of_product(self) -> tuple:
        """The tiles of a stage of lhs and of a stage of weights, as extents (of the weights, of tokens, contracted)."""
        tile = (self.config.tile_n, self._tokens)
        return (*tile, self.tile_k), (*tile, self.weight_tile[2])

    def _layouts(self, tiled_mma: cute.TiledMma) -> tuple:
        tile, weight_tile = self._tiles_of_product()
        config = self.config
        return (
            blackwell.make_smem_layout_b(tiled_mma, tile, self.dtype, config.stages * (config.tile_m // self._tokens)),
            blackwell.make_smem_layout_a(tiled_mma, weight_tile, self.dtype, config.weight_stages),
        )

    def _maps(self, views: tuple, layouts: tuple, load: Any, tiled_mma: cute.TiledMma, kind: Any) -> tuple:
        tile, weight_tile = self._tiles_of_product()
        make_a, make_b = cute.nvgpu.make_tiled_tma_atom_A, cute.nvgpu.make_tiled_tma_atom_B
        return (
            make_b(load, views[0], layouts[0], tile, tiled_mma, internal_type=kind),
            make_a(load, views[1], layouts[1], weight_tile, tiled_mma, internal_type=kind),
        )

    def _fragments(self, tiled_mma: cute.TiledMma, stages: tuple) -> tuple:
        return tiled_mma.make_fragment_B(stages[0]), tiled_mma.make_fragment_A(stages[1])

    def _product(self, tiled_mma: cute.TiledMma, to: cute.Tensor, a: cute.Tensor, b: cute.Tensor) -> None:
        cute.gemm(tiled_mma, to, b, a, to)

    def _accumulators(self, tiled_mma: cute.TiledMma) -> cute.Layout:
        """(atom, 1, 1, slots) of tensor memory."""
        shape = tiled_mma.partition_shape_C((self.config.tile_n, self.config.tile_m))
        return tiled_mma.make_fragment_C(cute.append(shape, self.config.slots)).layout


class SwappedLoads(Loads):
    """Loads the tiles of one block, where the weights are the product's A."""

    def _of_block(self, of_block: Any, a_tiles: cute.Tensor, b_tiles: cute.Tensor) -> tuple:
        return of_block.partition_B(a_tiles), of_block.partition_A(b_tiles)


class SwappedEpilogue(Epilogue):
    """Writes the tiles of one block, whose accumulators are the result transposed."""

    @cute.jit
    def run(self, acc: cute.Tensor, slots: tuple, first_row: Int32, outputs: tuple, work: WorkRing):
        """Writes the tiles of the result; run by the warps of the epilogue."""
        slot_full, slot_empty = slots
        result, _ = outputs
        tile_m, tile_n = self.config.tile_m, self.config.tile_n
        thread = cute.arch.thread_idx()[0]
        at_once = min(tile_m, _ROWS_AT_ONCE)
        atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(at_once)), Float32)
        chunks = cute.flat_divide(acc[(None, None), 0, 0, None], (tile_n, at_once))[None, None, 0, None, None]
        copy = tcgen05.make_tmem_copy(atom, chunks[None, None, 0, 0])
        of_thread = copy.get_slice(thread)
        from_tmem = of_thread.partition_S(chunks)
        coords = of_thread.partition_D(cute.make_identity_tensor((tile_n, at_once)))
        slot = rings.reader(self.config.slots)
        position = work.reader()
        tile = work.get(position)
        while tile.k_tiles >= 0:
            position.advance()
            column = tile.column + thread
            pieces = ceil_div(cutlass.min(tile.rows, tile_m), at_once)
            if tile.k_tiles > 0:
                slot_full.wait(slot)
            bias = self._bias(result, tile, column)
            for i in cutlass.range(pieces, unroll=1):
                values = cute.make_rmem_tensor(at_once, Float32)
                values.fill(0.0)
                if tile.k_tiles > 0:
                    loaded = cute.make_tensor(values.iterator, cute.make_layout(coords.shape))
                    cute.copy(copy, from_tmem[None, None, None, i, slot.index], loaded)
                    if i == pieces - 1:
                        cute.arch.fence_view_async_tmem_load()
                        slot_empty.arrive_at_first(slot)
                    for j in cutlass.range_constexpr(at_once):
                        values[j] += bias
                self._store_columns(values, result, (tile.out_row, i * at_once), tile.rows, column)
            if tile.k_tiles > 0:
                slot.advance()
            tile = work.get(position)

    @cute.jit
    def _bias(self, result: Result, tile: WorkTile, column: Int32) -> Float32:
        """What is added to a column of a tile."""
        bias = Float32(0)
        if cutlass.const_expr(self.has_bias):  # noqa: SIM102 -- known when the kernel is compiled
            if tile.k_tiles > 0 and column < result.columns:
                at = Int64(tile.depth) * Int64(result.columns) + Int64(column)
                bias = cute.make_tensor(result.bias + at, cute.make_layout(1))[0]
        return bias

    @cute.jit
    def _store_columns(self, values: cute.Tensor, result: Result, place: tuple, rows: Int32, column: Int32):
        """Writes values of one column and neighbouring rows.

        Args:
          values: float32.
          result: where to.
          place: (first row of the tile in the result, first row of the values in the tile).
          rows: of the tile.
          column: of the values.
        """
        dtype = result.data.dtype
        copy = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), dtype, num_bits_per_copy=2 * dtype.width)
        odd = cute.arch.lane_idx() % 2
        for j in cutlass.range_constexpr(0, cute.size(values), 2):
            # The even lane takes the first of two rows, and the odd lane the second.
            sent = values[j + 1] if odd == 0 else values[j]
            got = cute.arch.shuffle_sync_bfly(sent, 1)
            pair = cute.make_rmem_tensor(2, Float32)
            pair[0] = values[j] if odd == 0 else got
            pair[1] = got if odd == 0 else values[j + 1]
            row = place[1] + j + odd
            if row < rows and column < result.columns:
                rounded = cute.make_rmem_tensor(2, dtype)
                rounded.store(pair.load().to(dtype))
                at = Int64(place[0] + row) * Int64(result.columns) + Int64(column - odd)
                to = result.data + cute.assume(at, divby=2)
                cute.copy(copy, rounded, cute.make_tensor(to, cute.make_layout(2)))
