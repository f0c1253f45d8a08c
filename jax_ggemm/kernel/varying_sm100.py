"""The grouped products on Blackwell with operands swapped, and tiles as high as their groups: for groups of any size.

Tokens are columns of the product, of which an instruction takes any number of granules: 16 for one block, 32 for a pair
of blocks. Its instruction descriptor, a register, says how many. So a tile loads and multiplies the tokens that it has,
rounded up to a granule. The scheduler makes the tiles of a group as even as can be.

A tile is multiplied in parts of 256 tokens, the most that an instruction takes. Each part has a slot of tensor memory:
a tile of one part takes one slot, and the next tile the other one. Of a tile with two parts, the products start in the
first slot as soon as that is free, and those of the second catch up on the stages that were held.

No token has to do with another one: what a granule reads of the next group goes into columns that are not written.

In a pair, each block has 128 columns of the weights, and the first or the second half of the tokens of each part.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

from jax_ggemm.kernel import rings
from jax_ggemm.kernel.config import KernelSpec, ceil_div
from jax_ggemm.kernel.config_sm100 import ATOM_COLUMNS, Eviction, Sm100Config
from jax_ggemm.kernel.epilogue import Result
from jax_ggemm.kernel.epilogue_sm100 import Epilogue
from jax_ggemm.kernel.loads_sm100 import Loads
from jax_ggemm.kernel.schedule import WorkRing, WorkTile
from jax_ggemm.kernel.swapped_sm100 import SwappedEpilogue, SwappedGemmSm100

_LANES = 128
"""Columns of the weights that one block has: lanes of its tensor memory."""

_FORMATS = {cutlass.Float16: 0, cutlass.BFloat16: 1, Float32: 2}
"""Of the operands, in an instruction descriptor. float32 stands for TensorFloat-32, a kind of product of its own."""

_PRODUCT = """{{
.reg .pred accumulates;
setp.ne.b32 accumulates, {{$r4}}, 0;
tcgen05.mma.cta_group::{blocks}.kind::{kind} [{{$r0}}], {{$r1}}, {{$r2}}, {{$r3}}, accumulates;
}}"""


def instruction_descriptor(dtype: Any, weights_major: OperandMajorMode, blocks: int) -> int:
    """What products are told, but for the number of tokens (PTX ISA, tcgen05: the instruction descriptor of kind::f16).

    Args:
      dtype: of the operands.
      weights_major: along which axis the weights are contiguous. Tokens are contiguous along the contraction.
      blocks: that share a product.
    """
    float32_sums = 1 << 4
    formats = _FORMATS[dtype] << 7 | _FORMATS[dtype] << 10
    transposed = int(weights_major is OperandMajorMode.MN) << 15
    return float32_sums | formats | transposed | _LANES * blocks // 16 << 24


def with_tokens(descriptor: int, tokens: Int32) -> Int32:
    """The same, with the number of tokens: its eighth, from bit 17 on."""
    return descriptor | tokens << 14


def tokens_of(config: Sm100Config, rows: Int32, part: Int32) -> Int32:
    """How many tokens a part of a tile of so many rows multiplies: whole granules."""
    whole = ceil_div(rows, config.granule) * config.granule
    return cutlass.max(cutlass.min(whole - part * ATOM_COLUMNS, ATOM_COLUMNS), 0)


class VaryingGemmSm100(SwappedGemmSm100):
    """The kernel of one `KernelSpec` whose configuration is `varying`."""

    def __init__(self, spec: KernelSpec):
        super().__init__(spec)
        self.rows = _LANES  # of the product, in one block: columns of the result
        self.descriptor = instruction_descriptor(self.dtype, self.b_major, self.blocks)
        kind = "tf32" if self.dtype is Float32 else "f16"
        self.product = _PRODUCT.format(blocks=self.blocks, kind=kind)

    def _loads(self) -> Loads:
        return VaryingLoads(self.spec, self.tile_k, self.wide_boxes)

    def _epilogue(self) -> Epilogue:
        return VaryingEpilogue(self.spec)

    @property
    def _tokens(self) -> int:
        return self.config.granule

    def _accumulators(self, tiled_mma: cute.TiledMma) -> cute.Layout:
        """(atom, 1, granules of a slot, slots) of tensor memory."""
        shape = tiled_mma.partition_shape_C((self.config.tile_n, self.config.slot_columns))
        return tiled_mma.make_fragment_C(cute.append(shape, self.config.slots)).layout

    @cute.jit
    def _multiply(
        self, tiled_mma: cute.TiledMma, stages: tuple, acc: cute.Tensor, barriers: tuple, slots: tuple, work: WorkRing
    ):
        """Multiplies the stages; run by one warp of the first block."""
        full, _, _ = barriers
        slot_full, slot_empty = slots
        config = self.config
        operands = self._fragments(tiled_mma, stages)
        at, weights_at = rings.reader(config.stages), rings.reader(config.weight_stages)
        slot = rings.writer(config.slots)
        position = work.reader()
        tile = work.get(position)
        while tile.k_tiles >= 0:
            position.advance()
            if tile.k_tiles > 0:
                few, more = tokens_of(config, tile.rows, Int32(0)), tokens_of(config, tile.rows, Int32(1))
                slot_empty.wait(slot)
                first = slot.clone()
                started = Int32(0)
                if cutlass.const_expr(config.slots_per_tile > 1):
                    if more > 0:
                        # The epilogue may still read the second slot: see `GroupedGemmSm100._multiply`.
                        started = cutlass.min(tile.k_tiles, config.held_stages)
                        slot.advance()
                    self._start(acc, (first.index, few), operands, full, (at, weights_at), (started, tile.k_tiles))
                    if more > 0:
                        if started == tile.k_tiles:
                            slot_full.commit(first)
                        slot_empty.wait(slot)
                    at, weights_at = self._catch_up(
                        acc, (slot.index, more), operands, barriers, (at, weights_at), (started, tile.k_tiles)
                    )
                for k_tile in cutlass.range(started, tile.k_tiles, unroll=1):
                    full.wait(at)
                    self._add_part(acc, (first.index, few), operands, (at.index, weights_at.index, 0), k_tile)
                    if cutlass.const_expr(config.slots_per_tile > 1):  # noqa: SIM102 -- known when it is compiled
                        if more > 0:
                            if k_tile == tile.k_tiles - 1:
                                slot_full.commit(first)
                            self._add_part(acc, (slot.index, more), operands, (at.index, weights_at.index, 1), k_tile)
                    self._release(barriers, at, weights_at, k_tile, tile.k_tiles)
                    at.advance()
                    if self._closes(k_tile, tile.k_tiles):
                        weights_at.advance()
                slot_full.commit(slot)
                slot.advance()
            tile = work.get(position)

    @cute.jit
    def _start(self, acc: cute.Tensor, to: tuple, operands: tuple, full: Any, at: tuple, depth: tuple):
        """Adds the first stages of a tile to its first part; they are held. For the arguments, see `_catch_up`."""
        started, k_tiles = depth
        ahead, weights_ahead = at[0].clone(), at[1].clone()
        for k_tile in cutlass.range(started, unroll=1):
            full.wait(ahead)
            self._add_part(acc, to, operands, (ahead.index, weights_ahead.index, 0), k_tile)
            ahead.advance()
            if self._closes(k_tile, k_tiles):
                weights_ahead.advance()

    @cute.jit
    def _catch_up(
        self, acc: cute.Tensor, to: tuple, operands: tuple, barriers: tuple, at: tuple, depth: tuple
    ) -> tuple[Any, Any]:
        """Adds the stages that were held to the second part of a tile, and returns them.

        Args:
          acc: all accumulators.
          to: (the slot of the part, how many tokens it has).
          operands: all stages of tokens and of weights.
          barriers: of the stages.
          at: where the tile begins in the rings of tokens and of weights.
          depth: (tiles of the contraction that were held, all of them).

        Returns:
          Where both rings go on.
        """
        started, k_tiles = depth
        stage, weights_stage = at
        for k_tile in cutlass.range(started, unroll=1):
            self._add_part(acc, to, operands, (stage.index, weights_stage.index, 1), k_tile)
            self._release(barriers, stage, weights_stage, k_tile, k_tiles)
            stage.advance()
            if self._closes(k_tile, k_tiles):
                weights_stage.advance()
        return stage, weights_stage

    @cute.jit
    def _add_part(self, acc: cute.Tensor, to: tuple, operands: tuple, at: tuple, k_tile: Int32):
        """Adds the product of a tile of the contraction to a part of the accumulators, or starts them with it.

        Args:
          acc: all accumulators.
          to: (the slot of the part, how many tokens it has).
          operands: all stages of tokens and of weights.
          at: (which stage of tokens, which of weights, which part of the tokens).
          k_tile: which tile of the contraction.
        """
        all_tokens, weights = operands
        config = self.config
        granule = at[0] * config.granules + at[2] * (ATOM_COLUMNS // config.granule)
        address = acc[None, 0, 0, to[0]].iterator.toint()
        description = with_tokens(self.descriptor, to[1])
        steps = cute.size(all_tokens, mode=[2])
        first = (k_tile % config.weight_k_tiles) * steps
        with cute.arch.elect_one():
            for step in cutlass.range_constexpr(steps):
                a = tcgen05.smem_descriptor_to_int(weights[None, 0, first + step, at[1]].iterator)
                b = tcgen05.smem_descriptor_to_int(all_tokens[None, 0, step, granule].iterator)
                accumulates = Int32(k_tile > 0 or step > 0)
                cute.arch.inline_ptx(self.product, read_only_args=[address, a, b, description, accumulates])


class VaryingLoads(Loads):
    """Loads the tiles of one block: as many granules of tokens as a tile has."""

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
            of_weights = self._weights(of_block, b_operand, tile, place[0])
            granules = ceil_div(tile.rows, config.granule)
            for k_tile in cutlass.range(tile.k_tiles, unroll=1):
                empty.wait(at)
                opens = k_tile % per_stage == 0
                num_bytes = granules * config.granule_bytes
                if opens:
                    if cutlass.const_expr(per_stage > 1):
                        weights.wait(weights_at)
                    num_bytes += config.weight_stage_bytes
                if place[0] == 0:
                    full.expect(at, num_bytes * self.blocks)
                if opens:
                    to = (weights_at.index, full.at(at))
                    self._load_weights(b_operand, of_weights, (tile, place, k_tile // per_stage), to)
                    weights_at.advance()
                for i in cutlass.range(granules, unroll=1):
                    tokens = self._granule(of_block, a_operand, tile, i, place[0])
                    cute.copy(
                        a_operand[0],
                        tokens[1][None, k_tile],
                        tokens[0][None, at.index * config.granules + i],
                        tma_bar_ptr=full.at(at),
                        cache_policy=Int64(Eviction.NORMAL.value),
                    )
                at.advance()
            tile = work.get(position)
        self._finish((empty, weights), at, weights_at)

    def _weights(self, of_block: Any, operand: tuple, tile: WorkTile, rank: Int32) -> tuple:
        """What a block loads of the weights, by plain and by wide boxes; see `Loads._tiles`."""
        rows = cute.domain_offset((tile.column, 0), operand[1][None, None, tile.b_row])
        extent = (self.config.tile_n, self.tile_k * self.config.weight_k_tiles)
        tiles = of_block.partition_A(cute.local_tile(rows, extent, (0, None)))
        boxes = [] if self.wide_boxes is None else self.wide_boxes.parts(operand[3], tile, self.ragged_rows, rank)
        return self._partition(operand[0], operand[2], tiles), boxes

    def _granule(self, of_block: Any, operand: tuple, tile: WorkTile, index: Int32, rank: Int32) -> Any:
        """What a block loads of tokens, for a granule of its stage."""
        config = self.config
        own = config.granule // self.blocks
        part = index // (ATOM_COLUMNS // config.granule)
        # In front are the parts before this one, and the half that the first block has of it. Of its own granule a
        # block would take the rows behind those of the blocks before it.
        row = part * (ATOM_COLUMNS - ATOM_COLUMNS // self.blocks) + index * own
        row += rank * (tokens_of(config, tile.rows, part) // self.blocks - own)
        rows = cute.domain_offset((tile.a_row + row, 0), operand[1])
        tiles = of_block.partition_B(cute.local_tile(rows, (config.granule, self.tile_k), (0, None)))
        return self._partition(operand[0], operand[2], tiles)


class VaryingEpilogue(SwappedEpilogue):
    """Writes the tiles of one block: as many granules of tokens as a tile has."""

    @cute.jit
    def run(self, acc: cute.Tensor, slots: tuple, first_row: Int32, outputs: tuple, work: WorkRing):
        """Writes the tiles of the result; run by the warps of the epilogue. `first_row` is of the weights."""
        slot_full, slot_empty = slots
        result, _ = outputs
        granule, per_slot = self.config.granule, self.config.slot_columns // self.config.granule
        thread = cute.arch.thread_idx()[0]
        atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(granule)), Float32)
        chunks = acc[(None, None), 0, None, None]
        copy = tcgen05.make_tmem_copy(atom, chunks[None, None, 0, 0])
        of_thread = copy.get_slice(thread)
        from_tmem = of_thread.partition_S(chunks)
        coords = of_thread.partition_D(cute.make_identity_tensor((_LANES, granule)))
        slot = rings.reader(self.config.slots)
        position = work.reader()
        tile = work.get(position)
        while tile.k_tiles >= 0:
            position.advance()
            column = tile.column + first_row + thread
            bias = self._bias(result, tile, column)
            pieces = ceil_div(tile.rows, granule)
            for i in cutlass.range(pieces, unroll=1):
                values = cute.make_rmem_tensor(granule, Float32)
                values.fill(0.0)
                if tile.k_tiles > 0:
                    if i % per_slot == 0:
                        slot_full.wait(slot)
                    loaded = cute.make_tensor(values.iterator, cute.make_layout(coords.shape))
                    cute.copy(copy, from_tmem[None, None, None, i % per_slot, slot.index], loaded)
                    if i == pieces - 1 or i % per_slot == per_slot - 1:
                        cute.arch.fence_view_async_tmem_load()
                        slot_empty.arrive_at_first(slot)
                        slot.advance()
                    if cutlass.const_expr(self.has_bias):
                        for j in cutlass.range_constexpr(granule):
                            values[j] += bias
                if column < result.columns:
                    self._store_column(values, result, (tile.out_row + i * granule, column), tile.rows - i * granule)
            tile = work.get(position)

    @cute.jit
    def _store_column(self, values: cute.Tensor, result: Result, place: tuple, rows: Int32):
        """Writes values of one column: a warp whole sectors of a row.

        Args:
          values: float32, of neighbouring rows.
          result: where to.
          place: (row, column) of the first of them in the result.
          rows: how many to write, at most.
        """
        rounded = cute.make_rmem_tensor(values.layout, result.data.dtype)
        for j in cutlass.range_constexpr(cute.size(values)):
            rounded[j] = values[j].to(result.data.dtype)
        pitch = Int64(result.columns)
        at = result.data + Int64(place[0]) * pitch + Int64(place[1])
        to = cute.make_tensor(at, cute.make_layout(cute.size(values), stride=pitch))
        if rows >= cute.size(values):
            for j in cutlass.range_constexpr(cute.size(values)):
                to[j] = rounded[j]
        else:
            for j in cutlass.range_constexpr(cute.size(values)):
                if j < rows:
                    to[j] = rounded[j]
