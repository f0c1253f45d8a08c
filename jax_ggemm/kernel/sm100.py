"""The grouped products on Blackwell: TMA loads, tcgen05 products into tensor memory, a persistent grid.

A block has seven warps, and a tile is of one block or of a pair of blocks (`cta_group::2`), whose first multiplies:

    warp 6     schedule --work ring--+--> warp 5        TMA loads --stages--> warp 4   products
                                     +--> warp 4                                 |
                                     +--> warps 0 to 3  epilogue <--tensor memory+

Barriers, with who arrives on them and how often:

    stage full       of the first block: 1, and the bytes of both blocks' loads
    stage empty      of each block: 1, by the commit of the products that read the stage; with `multicast_sm100`, one
                     from each tile of the cluster
    weights empty    of each block: 1, by the same commit, where a stage of weights holds more than one tile of the
                     contraction. What fills it is counted by the full barrier of the stage that opens it.
    slot full        of each block: 1, by the commit of the last product into the slot
    slot empty       of the first block: 4 for each block, one from each warp of the epilogue

`operands` says how one tensor map serves every group.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.utils.blackwell_helpers as blackwell
from cutlass import Boolean, Float32, Int32, cute, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.memory import SmemAllocator

from jax_ggemm.kernel import epilogue_sm100, operands, rings
from jax_ggemm.kernel.config import KernelSpec
from jax_ggemm.kernel.config_sm100 import ATOM_COLUMNS, K_TILE_BYTES, Sm100Config
from jax_ggemm.kernel.dynamic_sm100 import ANSWER_BYTES, BARRIERS, DynamicScheduler, Requests
from jax_ggemm.kernel.epilogue import Result
from jax_ggemm.kernel.loads_sm100 import Loads
from jax_ggemm.kernel.rings import Barriers
from jax_ggemm.kernel.schedule import FIELDS, RING_DEPTH, Extents, Scheduler, WorkRing
from jax_ggemm.kernel.staged_sm100 import Staging
from jax_ggemm.kernel.wide_boxes import WideBoxes
from jax_ggemm.products import Product

_MULTIPLY_WARP = 4
_LOAD_WARP = 5
_SCHEDULE_WARP = 6
_WARPS = 7
_READERS = 6


class GroupedGemmSm100:
    """The kernel of one `KernelSpec`."""

    def __init__(self, spec: KernelSpec):
        assert isinstance(spec.config, Sm100Config)
        self.spec = spec
        self.config = spec.config
        self.dtype = operands.DTYPES[spec.in_dtype.name]
        self.out_dtype = operands.DTYPES[spec.out_dtype.name]
        self.tile_k = K_TILE_BYTES // spec.in_dtype.itemsize
        self.tile = (spec.config.tile_m, spec.config.tile_n, self.tile_k)
        self.weight_tile = (*self.tile[:2], self.tile_k * spec.config.weight_k_tiles)
        self.blocks = spec.config.blocks
        self.cluster = spec.config.cluster_blocks
        self.rows = spec.config.tile_m // self.blocks
        self.group = tcgen05.CtaGroup.TWO if self.blocks == 2 else tcgen05.CtaGroup.ONE
        deals = DynamicScheduler if spec.config.dynamic else Scheduler
        self.scheduler: Any = deals(spec.config, spec.product, self.tile_k, self.cluster, spec.config.multicast)
        self.epilogue = self._epilogue()
        self.ragged_rows = spec.product.rows_are_ragged
        # Row-major operands are contiguous along the contraction, column-major ones across it.
        self.a_major = OperandMajorMode.K if self.ragged_rows else OperandMajorMode.MN
        self.b_major = OperandMajorMode.K if spec.product is Product.DLHS else OperandMajorMode.MN
        self.wide_boxes: Any = WideBoxes.of(spec.config, spec.product is Product.DLHS, self.tile_k)
        self.loads = self._loads()

    def example_arguments(self) -> tuple[Any, ...]:
        """Arguments to compile with: only their types matter."""
        return operands.example_arguments(self.spec, bias_align=16)

    @cute.jit
    def __call__(self, stream: cuda.CUstream, *arguments: Any):
        """Launches the kernel.

        Args:
          stream: to launch on.
          *arguments: pointers to lhs, rhs, group_sizes, group_offset, bias and the result, then the `Extents`.
        """
        lhs, rhs, sizes, offsets, bias, out = arguments[:6]
        m, k, n, *others = arguments[6:]
        k, n = cute.assume(k, divby=8), cute.assume(n, divby=8)
        extents = Extents(m, k, n, *others)
        a_view, b_view = operands.views(self.spec.product, lhs, rhs, extents)

        tiled_mma = self._tiled_mma()
        a_smem, b_smem = self._layouts(tiled_mma)
        load = cpasync.CopyBulkTensorTileG2SOp(self.group)
        # The TMA unit rounds float32 to what the products take of it.
        kind = cutlass.TFloat32 if self.dtype is Float32 else None
        (a_tma, a_tensor), (b_tma, b_tensor) = self._maps((a_view, b_view), (a_smem, b_smem), load, tiled_mma, kind)
        wide: Any = None
        if cutlass.const_expr(self.wide_boxes is not None):
            wide = self.wide_boxes.tensor_map(b_view, b_smem.inner, load, kind)
        columns = k if cutlass.const_expr(self.spec.product is Product.DLHS) else n
        result = Result(out, columns, bias, k)
        staging: Any = None
        if cutlass.const_expr(self.epilogue.staged):
            rows, matrices = (m * extents.batch, 1) if self.ragged_rows else (k, extents.weights * extents.batch)
            staging = Staging.plan(result, rows, matrices, epilogue_sm100.WARPS)
        config = self.config

        @cute.struct
        class Storage:
            stage_barriers: cute.struct.MemRange[cutlass.Int64, 2 * config.stages]
            weight_barriers: cute.struct.MemRange[cutlass.Int64, config.weight_stages]
            slot_barriers: cute.struct.MemRange[cutlass.Int64, 2 * config.slots]
            ring_barriers: cute.struct.MemRange[cutlass.Int64, 2 * RING_DEPTH]
            ring: cute.struct.Align[cute.struct.MemRange[Int32, FIELDS * RING_DEPTH], 16]
            tmem: Int32
            request_barriers: cute.struct.MemRange[cutlass.Int64, BARRIERS if config.dynamic else 0]
            answer: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, ANSWER_BYTES if config.dynamic else 0], 16]
            a: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(a_smem)], 1024]
            b: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(b_smem)], 1024]
            staging: cute.struct.Align[
                cute.struct.MemRange[cutlass.Uint8, config.staging_bytes if self.epilogue.staged else 0], 1024
            ]

        self.storage = Storage
        self._kernel(
            (a_tma, a_tensor, a_smem),
            (b_tma, b_tensor, b_smem, wide),
            tiled_mma,
            (sizes, offsets),
            (result, staging),
            extents,
        ).launch(
            grid=(self._grid(extents), 1, 1),
            block=(32 * _WARPS, 1, 1),
            cluster=(self.cluster, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    def _grid(self, e: Extents) -> Any:
        """Blocks to launch."""
        if self.config.dynamic:
            return self.scheduler.grid(e)
        return cutlass.max(e.multiprocessors // self.cluster, 1) * self.cluster

    def _loads(self) -> Loads:
        """What loads the tiles."""
        return Loads(self.spec, self.tile_k, self.wide_boxes)

    def _epilogue(self) -> epilogue_sm100.Epilogue:
        """What writes the tiles."""
        return epilogue_sm100.Epilogue(self.spec)

    def _tiled_mma(self) -> cute.TiledMma:
        """The product of a tile: lhs is its A, the weights are its B."""
        atom = (self.config.tile_m, min(self.config.tile_n, ATOM_COLUMNS))
        return blackwell.make_trivial_tiled_mma(
            self.dtype, self.dtype, self.a_major, self.b_major, Float32, self.group, atom
        )

    def _layouts(self, tiled_mma: cute.TiledMma) -> tuple:
        """The stages of lhs and of the weights in shared memory."""
        config = self.config
        return (
            blackwell.make_smem_layout_a(tiled_mma, self.tile, self.dtype, config.stages),
            blackwell.make_smem_layout_b(tiled_mma, self.weight_tile, self.dtype, config.weight_stages),
        )

    def _maps(self, views: tuple, layouts: tuple, load: Any, tiled_mma: cute.TiledMma, kind: Any) -> tuple:
        """The tensor maps of lhs and of the weights."""
        make_a, make_b = cute.nvgpu.make_tiled_tma_atom_A, cute.nvgpu.make_tiled_tma_atom_B
        return (
            make_a(load, views[0], layouts[0], self.tile, tiled_mma, internal_type=kind),
            make_b(load, views[1], layouts[1], self.weight_tile, tiled_mma, internal_type=kind),
        )

    def _fragments(self, tiled_mma: cute.TiledMma, stages: tuple) -> tuple:
        """The stages of lhs and of the weights as the products take them."""
        return tiled_mma.make_fragment_A(stages[0]), tiled_mma.make_fragment_B(stages[1])

    def _product(self, tiled_mma: cute.TiledMma, to: cute.Tensor, a: cute.Tensor, b: cute.Tensor) -> None:
        """One instruction."""
        cute.gemm(tiled_mma, to, a, b, to)

    @cute.kernel
    def _kernel(
        self,
        a_operand: tuple,
        b_operand: tuple,
        tiled_mma: cute.TiledMma,
        groups: tuple,
        outputs: tuple,
        extents: Extents,
    ):
        a_tma, a_tensor, a_smem = a_operand
        b_tma, b_tensor, b_smem, wide = b_operand
        rank = cute.arch.block_idx()[0] % self.blocks
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == _LOAD_WARP:
            self.loads.prefetch(a_tma, b_tma, wide)

        storage = SmemAllocator().allocate(self.storage)
        a_stages = storage.a.get_tensor(a_smem.outer, swizzle=a_smem.inner)
        b_stages = storage.b.get_tensor(b_smem.outer, swizzle=b_smem.inner)
        if cutlass.const_expr(self.wide_boxes is not None):
            wide = (*wide, storage.b.get_tensor(self.wide_boxes.smem(), swizzle=b_smem.inner))
        if cutlass.const_expr(self.epilogue.staged):
            c_tma, c_tensor, c_smem = outputs[1]
            buffers = cute.recast_ptr(storage.staging.data_ptr(), c_smem.inner, dtype=self.out_dtype)
            outputs = (outputs[0], Staging(c_tma, c_tensor, cute.make_tensor(buffers, c_smem.outer)))
        work = WorkRing.create(
            storage.ring.get_tensor(cute.make_layout((FIELDS, RING_DEPTH))),
            storage.ring_barriers.data_ptr(),
            reader_warps=_READERS,
        )
        config = self.config
        barriers, slots, requests = self._barriers(storage)
        if warp == _LOAD_WARP:
            self._initialise(barriers, slots, requests)
        cute.arch.mbarrier_init_fence()
        if warp == _MULTIPLY_WARP:
            cute.arch.alloc_tmem(config.tmem_columns, storage.tmem.ptr, is_two_cta=self.blocks == 2)
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=self.blocks == 2)
        self._meet()
        tmem = cute.arch.retrieve_tmem_ptr(Float32, 16, storage.tmem.ptr)
        acc = cute.make_tensor(tmem, self._accumulators(tiled_mma))

        if warp == _SCHEDULE_WARP:
            self._schedule(groups, extents, work, requests)
        if warp == _LOAD_WARP:
            self.loads.run(
                tiled_mma.get_slice(rank),
                (a_tma, a_tensor, a_stages),
                (b_tma, b_tensor, b_stages, wide),
                barriers,
                (rank, extents.n),
                work,
            )
        if warp == _MULTIPLY_WARP:
            if rank == 0:
                self._multiply(tiled_mma, (a_stages, b_stages), acc, barriers, slots, work)
            else:
                self._follow(work)
        if warp < epilogue_sm100.WARPS:
            self.epilogue.run(acc, slots, rank * self.rows, outputs, work)
        # Nobody leaves, or frees tensor memory, while a block of its cluster may still use it.
        self._meet()
        if warp == _MULTIPLY_WARP:
            cute.arch.dealloc_tmem(tmem, config.tmem_columns, is_two_cta=self.blocks == 2)

    def _barriers(self, storage: Any) -> tuple[tuple[Barriers, ...], tuple[Barriers, ...], Requests | None]:
        """(full, empty, weights empty) of the stages, (full, empty) of the slots, and who asks for tiles."""
        config = self.config
        stages, slots = storage.stage_barriers.data_ptr(), storage.slot_barriers.data_ptr()
        teams = (self.blocks, config.multicast)
        return (
            (
                Barriers(stages, config.stages, *teams),
                Barriers(stages + config.stages, config.stages, *teams),
                Barriers(storage.weight_barriers.data_ptr(), config.weight_stages, *teams),
            ),
            (Barriers(slots, config.slots, *teams), Barriers(slots + config.slots, config.slots, *teams)),
            Requests.create(storage.answer.data_ptr(), storage.request_barriers.data_ptr(), self.cluster)
            if config.dynamic
            else None,
        )

    @cute.jit
    def _initialise(self, barriers: tuple, slots: tuple, requests: Any):
        """Sets the barriers up; run by one warp."""
        full, empty, weights = barriers
        full.create(1)
        empty.create(self.config.multicast)
        weights.create(1)
        slots[0].create(1)
        slots[1].create(epilogue_sm100.WARPS * self.blocks)
        if cutlass.const_expr(requests is not None):
            requests.initialise()

    @cute.jit
    def _schedule(self, groups: tuple, extents: Extents, work: WorkRing, requests: Any):
        """Finds the tiles of this block; run by one warp."""
        if cutlass.const_expr(requests is not None):
            self.scheduler.take(groups, extents, work, requests)
        else:
            self.scheduler.run(groups[0], groups[1], extents, work)

    @cute.jit
    def _meet(self):
        """Waits for every thread of the cluster."""
        if cutlass.const_expr(self.cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    def _accumulators(self, tiled_mma: cute.TiledMma) -> cute.Layout:
        """(atom, 1, atoms of a slot, slots) of tensor memory."""
        shape = tiled_mma.partition_shape_C((self.config.tile_m, self.config.slot_columns))
        return tiled_mma.make_fragment_C(cute.append(shape, self.config.slots)).layout

    @cute.jit
    def _follow(self, work: WorkRing):
        """Reads the tiles that the first block of the pair multiplies."""
        position = work.reader()
        tile = work.get(position)
        while tile.k_tiles >= 0:
            position.advance()
            tile = work.get(position)

    @cute.jit
    def _multiply(
        self, tiled_mma: cute.TiledMma, stages: tuple, acc: cute.Tensor, barriers: tuple, slots: tuple, work: WorkRing
    ):
        """Multiplies the stages; run by one warp of the first block."""
        full, _, _ = barriers
        slot_full, slot_empty = slots
        config = self.config
        a, b = self._fragments(tiled_mma, stages)
        at, weights_at = rings.reader(config.stages), rings.reader(config.weight_stages)
        slot = rings.writer(config.slots)
        position = work.reader()
        tile = work.get(position)
        while tile.k_tiles >= 0:
            position.advance()
            if tile.k_tiles > 0:
                slot_empty.wait(slot)
                started = Int32(0)
                first = acc[None, 0, None, slot.index]
                if cutlass.const_expr(config.splits_accumulator):
                    # The epilogue may still read the second half: the first starts on some stages, which are held,
                    # and the second catches up on them.
                    started = cutlass.min(tile.k_tiles, config.held_stages)
                    ahead, weights_ahead = at.clone(), weights_at.clone()
                    for k_tile in cutlass.range(started, unroll=1):
                        full.wait(ahead)
                        tiled_mma = self._add(tiled_mma, first, (a, b), 0, (ahead.index, weights_ahead.index), k_tile)
                        ahead.advance()
                        if self._closes(k_tile, tile.k_tiles):
                            weights_ahead.advance()
                    first_slot = slot.clone()
                    if started == tile.k_tiles:
                        slot_full.commit(first_slot)
                    slot.advance()
                    slot_empty.wait(slot)
                    second = acc[None, 0, None, slot.index]
                    for k_tile in cutlass.range(started, unroll=1):
                        tiled_mma = self._add(tiled_mma, second, (a, b), 1, (at.index, weights_at.index), k_tile)
                        self._release(barriers, at, weights_at, k_tile, tile.k_tiles)
                        at.advance()
                        if self._closes(k_tile, tile.k_tiles):
                            weights_at.advance()
                for k_tile in cutlass.range(started, tile.k_tiles, unroll=1):
                    full.wait(at)
                    tiled_mma = self._add(tiled_mma, first, (a, b), 0, (at.index, weights_at.index), k_tile)
                    if cutlass.const_expr(config.splits_accumulator):
                        if k_tile == tile.k_tiles - 1:
                            slot_full.commit(first_slot)
                        tiled_mma = self._add(tiled_mma, second, (a, b), 1, (at.index, weights_at.index), k_tile)
                    self._release(barriers, at, weights_at, k_tile, tile.k_tiles)
                    at.advance()
                    if self._closes(k_tile, tile.k_tiles):
                        weights_at.advance()
                slot_full.commit(slot)
                slot.advance()
            tile = work.get(position)

    @cute.jit
    def _closes(self, k_tile: Int32, k_tiles: Int32) -> Boolean:
        """Whether a tile of the contraction is the last of its stage of weights."""
        per_stage = self.config.weight_k_tiles
        return k_tile % per_stage == per_stage - 1 or k_tile == k_tiles - 1

    @cute.jit
    def _release(
        self,
        barriers: tuple,
        at: pipeline.PipelineState,
        weights_at: pipeline.PipelineState,
        k_tile: Int32,
        k_tiles: Int32,
    ):
        """Gives the stages of a tile of the contraction back, once the products so far have read them."""
        _, empty, weights = barriers
        empty.commit_to_cluster(at)
        if cutlass.const_expr(self.config.weight_k_tiles > 1):  # noqa: SIM102 -- known when the kernel is compiled
            if self._closes(k_tile, k_tiles):
                weights.commit(weights_at)

    @cute.jit
    def _add(
        self,
        tiled_mma: cute.TiledMma,
        acc: cute.Tensor,
        fragments: tuple,
        part: cutlass.Constexpr,
        at: tuple,
        k_tile: Int32,
    ) -> cute.TiledMma:
        """Adds the product of one tile of the contraction to a part of the accumulators, or starts them with it."""
        a, b = fragments
        steps = cute.size(a, mode=[2])
        atoms = cute.size(acc, mode=[1])
        first = (k_tile % self.config.weight_k_tiles) * steps
        for step in cutlass.range_constexpr(steps):
            tiled_mma.set(tcgen05.Field.ACCUMULATE, k_tile > 0 or step > 0)
            for i in cutlass.range_constexpr(atoms):
                to = acc[None, i]
                self._product(tiled_mma, to, a[None, 0, step, at[0]], b[None, part * atoms + i, first + step, at[1]])
        return tiled_mma
