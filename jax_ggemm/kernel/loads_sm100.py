"""The loads of the kernels for Blackwell: tiles of both operands into the stages, by the TMA unit."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Int32, Int64, cute, pipeline
from cutlass.cute.nvgpu import cpasync

from jax_ggemm.kernel import operands, rings
from jax_ggemm.kernel.config import KernelSpec
from jax_ggemm.kernel.config_sm100 import Eviction, Sm100Config
from jax_ggemm.kernel.schedule import WorkRing, WorkTile
from jax_ggemm.kernel.wide_boxes import WideBoxes


class Loads:
    """Loads the tiles of one block."""

    def __init__(self, spec: KernelSpec, tile_k: int, wide_boxes: WideBoxes | None):
        assert isinstance(spec.config, Sm100Config)
        self.config = spec.config
        self.tile_k = tile_k
        self.blocks = spec.config.blocks
        self.ragged_rows = spec.product.rows_are_ragged
        self.wide_boxes: Any = wide_boxes

    @cute.jit
    def prefetch(self, a_tma: cute.CopyAtom, b_tma: cute.CopyAtom, wide: Any):
        """Fetches the tensor maps; run by one warp."""
        cpasync.prefetch_descriptor(a_tma)
        cpasync.prefetch_descriptor(b_tma)
        if cutlass.const_expr(self.wide_boxes is not None):
            cpasync.prefetch_descriptor(wide[0])

    def _of_block(self, of_block: Any, a_tiles: cute.Tensor, b_tiles: cute.Tensor) -> tuple:
        """What a block loads of tiles of lhs and of the weights."""
        return of_block.partition_A(a_tiles), of_block.partition_B(b_tiles)

    @cute.jit
    def run(self, of_block: Any, a_operand: tuple, b_operand: tuple, barriers: tuple, place: tuple, work: WorkRing):
        """Fills the stages with the tiles of both operands; run by one warp of each block."""
        full, empty, weights = barriers
        config = self.config
        per_stage = config.weight_k_tiles
        at, weights_at = rings.writer(config.stages), rings.writer(config.weight_stages)
        position = work.reader()
        tile = work.get(position)
        while tile.k_tiles >= 0:
            position.advance()
            a_tiles, b_tiles, boxes = self._tiles(of_block, a_operand, b_operand, tile, place[0])
            for k_tile in cutlass.range(tile.k_tiles, unroll=1):
                empty.wait(at)
                opens = k_tile % per_stage == 0
                num_bytes = Int32(config.stage_bytes * self.blocks)
                if opens:
                    if cutlass.const_expr(per_stage > 1):
                        weights.wait(weights_at)
                    num_bytes += config.weight_stage_bytes * self.blocks
                if place[0] == 0:
                    full.expect(at, num_bytes)
                self._load_lhs(a_operand[0], a_tiles, k_tile, (at.index, full.at(at)))
                if opens:
                    to = (weights_at.index, full.at(at))
                    self._load_weights(b_operand, (b_tiles, boxes), (tile, place, k_tile // per_stage), to)
                    weights_at.advance()
                at.advance()
            tile = work.get(position)
        self._finish((empty, weights), at, weights_at)

    @cute.jit
    def _finish(self, emptied: tuple, at: pipeline.PipelineState, weights_at: pipeline.PipelineState):
        """Waits until what the last products signal has come; `emptied` is (of the stages, of those of weights)."""
        empty, weights = emptied
        for _ in cutlass.range_constexpr(self.config.stages):
            empty.wait(at)
            at.advance()
        if cutlass.const_expr(self.config.weight_k_tiles > 1):
            for _ in cutlass.range_constexpr(self.config.weight_stages):
                weights.wait(weights_at)
                weights_at.advance()

    def _tiles(self, of_block: Any, a_operand: tuple, b_operand: tuple, tile: WorkTile, rank: Int32) -> tuple:
        """What a block loads of a tile: of each operand (shared memory by stage, global memory by tile of the
        contraction), and the same of the wide boxes.
        """
        a_tensor, b_tensor = a_operand[1], b_operand[1]
        if self.ragged_rows:
            a_rows = cute.domain_offset((tile.a_row, 0), a_tensor)
            b_rows = cute.domain_offset((tile.column, 0), b_tensor[None, None, tile.b_row])
        else:
            a_rows = cute.domain_offset((tile.a_column, 0), operands.rows_of_group(a_tensor, tile.a_row, tile.depth))
            b_rows = cute.domain_offset((tile.column, 0), operands.rows_of_group(b_tensor, tile.b_row, tile.depth))
        a_tiles, b_tiles = self._of_block(
            of_block,
            cute.local_tile(a_rows, (self.config.tile_m, self.tile_k), (0, None)),
            cute.local_tile(b_rows, (self.config.tile_n, self.tile_k * self.config.weight_k_tiles), (0, None)),
        )
        boxes = [] if self.wide_boxes is None else self.wide_boxes.parts(b_operand[3], tile, self.ragged_rows, rank)
        return (
            self._partition_lhs(a_operand[0], a_operand[2], a_tiles),
            self._partition(b_operand[0], b_operand[2], b_tiles),
            boxes,
        )

    def _load_lhs(self, tma: cute.CopyAtom, tiles: tuple, k_tile: Int32, to: tuple) -> None:
        """Fills a stage of lhs."""
        policy = Int64(Eviction.NORMAL.value)
        cute.copy(tma, tiles[1][None, k_tile], tiles[0][None, to[0]], tma_bar_ptr=to[1], cache_policy=policy)

    @cute.jit
    def _load_weights(self, operand: tuple, tiles: tuple, what: tuple, to: tuple):
        """Fills a stage of weights, with wide boxes where they end within the rows of the weights."""
        plain, boxes = tiles
        tile, (rank, contiguous), stage = what
        index, barrier = to
        policy = Int64(self.config.weight_eviction.value)
        fits = Boolean(False)
        if cutlass.const_expr(self.wide_boxes is not None):
            fits = self.wide_boxes.fits(tile, rank, stage, contiguous)
        if fits:
            for box_to, box_from in boxes:
                cute.copy(
                    operand[3][0],
                    box_from[None, stage],
                    box_to[None, index],
                    tma_bar_ptr=barrier,
                    cache_policy=policy,
                )
        else:
            cute.copy(
                operand[0], plain[1][None, stage], plain[0][None, index], tma_bar_ptr=barrier, cache_policy=policy
            )

    def _partition_lhs(self, tma: cute.CopyAtom, smem: cute.Tensor, tiles: cute.Tensor) -> Any:
        """The same as `_partition`, of lhs."""
        return self._partition(tma, smem, tiles)

    @staticmethod
    def _partition(tma: cute.CopyAtom, smem: cute.Tensor, tiles: cute.Tensor) -> Any:
        """(shared memory by stage, global memory by tile of the contraction), as the TMA unit takes them."""
        return cpasync.tma_partition(
            tma, 0, cute.make_layout(1), cute.group_modes(smem, 0, 3), cute.group_modes(tiles, 0, 3)
        )
