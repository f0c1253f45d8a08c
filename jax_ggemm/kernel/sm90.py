"""The grouped products on Hopper: TMA loads, warpgroup products, a persistent grid.

A block has three warpgroups. Of the first, warp 0 loads tiles of both operands into a ring of stages, and warp 1
runs the scheduler. The other two multiply, and write the result.

    warp 1     schedule --work ring--+--> warp 0    TMA loads --stages--+
                                     +--> warps 4 to 11  products <-----+  --> epilogue

Blocks may come in pairs, that are dealt two tiles of a group at a time. Where one lies below the other, each loads half
of the tile of rhs that both multiply with, for both (TMA multicast). A stage is filled when the products of both blocks
have read what was in it, so that the two go at one pace. This is why a tile that is half empty can be multiplied by
half as many products: alone, its block would run ahead of the others of its group, which would find their weights no
longer in L2.

`operands` says how one tensor map serves every group.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.utils.hopper_helpers as hopper
from cutlass import Int16, Int32, Int64, cute, pipeline
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from jax_ggemm.kernel import epilogue, operands
from jax_ggemm.kernel.config import (
    LOW_ROWS,
    STAGING_BUFFERS,
    STAGING_COLUMNS,
    TILE_K,
    KernelSpec,
    Sm90Config,
    ceil_div,
)
from jax_ggemm.kernel.exchange import BARRIERS, Exchange, exchange_bytes
from jax_ggemm.kernel.schedule import (
    FIELDS,
    RECEIVES,
    RING_DEPTH,
    SENDS,
    SILENT,
    TOGETHER,
    Extents,
    Scheduler,
    WorkRing,
    WorkTile,
)
from jax_ggemm.products import Product

_WARPGROUP = 128
_LOAD_WARP = 0
_SCHEDULE_WARP = 1
_CONSUMERS = 2
_THREADS = (1 + _CONSUMERS) * _WARPGROUP
_LOAD_REGISTERS = 40
_PRODUCT_REGISTERS = 232

_SPARE_BLOCKS = 16
"""One block in so many may be left out for full rounds."""


@cute.jit
def _take(acc: cute.Tensor):
    """Makes what follows use the accumulators as they are now, after the wait for the products.

    The compiler sees no connection between the two. It would move conversions before the wait, and ptxas would then
    wait for each single product.
    """
    for i in cutlass.range_constexpr(cute.size(acc)):
        acc[i] = cute.arch.inline_ptx(
            "mov.b32 {$w0}, {$r0};", write_only_types=[cutlass.Float32], read_only_args=[acc[i]]
        )


class GroupedGemmSm90:
    """The kernel of one `KernelSpec`."""

    def __init__(self, spec: KernelSpec):
        assert isinstance(spec.config, Sm90Config)
        self.spec = spec
        self.config = spec.config
        self.dtype = operands.DTYPES[spec.in_dtype.name]
        self.out_dtype = operands.DTYPES[spec.out_dtype.name]
        self.tile = (spec.config.tile_m, spec.config.tile_n, TILE_K)
        self.scheduler = Scheduler(spec.config, spec.product)
        self.ragged_rows = spec.product.rows_are_ragged
        self.pairs = self.scheduler.pairs
        self.shares = self.scheduler.shares
        self.low_tiles = self.ragged_rows and spec.config.has_low_tiles
        # The TMA unit writes what it can: tiles that do not end with their group, of elements that stmatrix takes.
        self.staged = spec.out_dtype.itemsize == 2 and spec.config.warpgroups == (2, 1)
        # Row-major operands are contiguous along the contraction, column-major ones across it.
        self.a_layout = LayoutEnum.ROW_MAJOR if self.ragged_rows else LayoutEnum.COL_MAJOR
        self.b_layout = LayoutEnum.ROW_MAJOR if spec.product is Product.DLHS else LayoutEnum.COL_MAJOR

    def example_arguments(self) -> tuple[Any, ...]:
        """Arguments to compile with: only their types matter."""
        return operands.example_arguments(self.spec, bias_align=4)

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

        tiled_mma = self._tiled_mma(self.config.warpgroups)
        low_mma = self._tiled_mma((1, _CONSUMERS)) if cutlass.const_expr(self.low_tiles) else None
        a_smem = hopper.make_smem_layout_a(self.a_layout, self.tile, self.dtype, self.config.stages)
        b_smem = hopper.make_smem_layout_b(self.b_layout, self.tile, self.dtype, self.config.stages)
        load = cpasync.CopyBulkTensorTileG2SOp()
        a_tma, a_tensor = self._tensor_map(load, a_view, a_smem, self.tile[0])
        b_tma, b_tensor = self._tensor_map(load, b_view, b_smem, self.tile[1])
        to_both = None
        if cutlass.const_expr(self.pairs):
            load, half = cpasync.CopyBulkTensorTileG2SMulticastOp(), self.tile[1] // 2
            half_smem = hopper.make_smem_layout_b(self.b_layout, (self.tile[0], half, TILE_K), self.dtype, 1)
            to_both = tuple(self._tensor_map(load, b_view, half_smem, half))

        columns = k if cutlass.const_expr(self.spec.product is Product.DLHS) else n
        result = epilogue.Result(out, columns, bias, k)
        staging = None
        if cutlass.const_expr(self.staged):
            rows, matrices = (m * extents.batch, 1) if self.ragged_rows else (k, extents.weights * extents.batch)
            box = (self.tile[0], STAGING_COLUMNS)
            staging = epilogue.staging(result, rows, matrices, box, STAGING_BUFFERS)

        c_bytes = self._c_bytes(staging)

        @cute.struct
        class Storage:
            stage_barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.config.stages]
            ring_barriers: cute.struct.MemRange[cutlass.Int64, 2 * RING_DEPTH]
            exchange_barriers: cute.struct.MemRange[cutlass.Int64, BARRIERS]
            ring: cute.struct.Align[cute.struct.MemRange[Int32, FIELDS * RING_DEPTH], 16]
            a: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(a_smem)], 1024]
            b: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(b_smem)], 1024]
            # Of the result on its way to global memory, and of the sums on their way to the other block of a pair.
            c: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, c_bytes], 1024]

        self.storage = Storage
        self._kernel(
            (a_tma, a_tensor, a_smem),
            (b_tma, b_tensor, b_smem),
            to_both,
            (tiled_mma, low_mma),
            (sizes, offsets),
            (result, staging),
            extents,
        ).launch(
            grid=(self._teams(extents, columns) * self.config.cluster, 1, 1),
            block=(_THREADS, 1, 1),
            cluster=(self.config.cluster, 1, 1) if cutlass.const_expr(self.config.cluster > 1) else None,
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.jit
    def _teams(self, extents: Extents, columns: Int32) -> Int32:
        """Blocks, or pairs of blocks, to launch: one for each multiprocessor, or for each two.

        Where groups are so small that each is one row of tiles, if rows are spread, only as many as make every round of
        tiles full, so that all of them read weights to the end. That must cost few blocks: rows may not be spread.
        """
        teams = cutlass.max(extents.multiprocessors // self.config.cluster, 1)
        if cutlass.const_expr(self.ragged_rows):  # noqa: SIM102 (decided when the kernel is compiled)
            if 2 * Int64(extents.m) <= Int64(extents.groups) * self.config.tile_m:
                deals = Int64(extents.groups) * Int64(extents.batch)
                deals *= ceil_div(ceil_div(columns, self.config.tile_n), self.config.cluster)
                if deals > teams:
                    rounds = (deals + teams - 1) // teams
                    full = Int32((deals + rounds - 1) // rounds)
                    if (teams - full) * _SPARE_BLOCKS <= teams:
                        teams = full
        return teams

    def _tiled_mma(self, warpgroups: tuple[int, int]) -> cute.TiledMma:
        """The product of a stage, which so many warpgroups divide along m and n."""
        return hopper.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            self.a_layout.sm90_mma_major_mode(),
            self.b_layout.sm90_mma_major_mode(),
            cutlass.Float32,
            (*warpgroups, 1),
            tiler_mn=(LOW_ROWS, self.config.tile_n // warpgroups[1]),
        )

    def _c_bytes(self, staging: tuple | None) -> int:
        """Shared memory that results leave through."""
        staged = 0 if staging is None else cute.cosize(staging[2]) * self.out_dtype.width // 8
        return max(staged, exchange_bytes(_CONSUMERS * _WARPGROUP) if self.shares else 0)

    @staticmethod
    def _tensor_map(load: Any, view: cute.Tensor, smem: cute.ComposedLayout, extent: int) -> Any:
        return cpasync.make_tiled_tma_atom(load, view, cute.slice_(smem, (None, None, 0)), (extent, TILE_K))

    @cute.kernel
    def _kernel(
        self,
        a_operand: tuple,
        b_operand: tuple,
        b_to_both: Any,
        products: tuple,
        groups: tuple,
        outputs: tuple,
        extents: Extents,
    ):
        a_tma, a_tensor, a_smem = a_operand
        b_tma, b_tensor, b_smem = b_operand
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == _LOAD_WARP:
            cpasync.prefetch_descriptor(a_tma)
            cpasync.prefetch_descriptor(b_tma)

        storage = SmemAllocator().allocate(self.storage)
        a_stages = storage.a.get_tensor(a_smem.outer, swizzle=a_smem.inner)
        b_stages = storage.b.get_tensor(b_smem.outer, swizzle=b_smem.inner)
        result, staging = outputs
        if cutlass.const_expr(self.staged):
            c_tma, c_tensor, c_smem = staging
            buffers = cute.recast_ptr(storage.c.data_ptr(), c_smem.inner, dtype=self.out_dtype)
            staging = (c_tma, c_tensor, cute.make_tensor(buffers, c_smem.outer))
        slots = storage.ring.get_tensor(cute.make_layout((FIELDS, RING_DEPTH)))
        consumer_warps = _CONSUMERS * _WARPGROUP // 32
        ring = WorkRing.create(slots, storage.ring_barriers.data_ptr(), reader_warps=consumer_warps + 1)
        # Each block of a pair may fill a stage of both: it is empty once the products of both have read theirs.
        readers = 2 if self.pairs else 1
        stages = pipeline.PipelineTmaAsync.create(
            barrier_storage=storage.stage_barriers.data_ptr(),
            num_stages=self.config.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, readers * consumer_warps),
            tx_count=(self.tile[0] + self.tile[1]) * TILE_K * self.dtype.width // 8,
            cta_layout_vmnk=cute.make_layout((1, readers, 1, 1)),
            defer_sync=True,
        )
        exchange = None
        if cutlass.const_expr(self.shares):
            buffers = cute.recast_ptr(storage.c.data_ptr(), dtype=cutlass.Float32)
            exchange = Exchange.create(buffers, storage.exchange_barriers.data_ptr(), _CONSUMERS * _WARPGROUP)
        cute.arch.mbarrier_init_fence()
        self._sync_cluster()

        if warp < _WARPGROUP // 32:
            cute.arch.setmaxregister_decrease(_LOAD_REGISTERS)
            if warp == _SCHEDULE_WARP:
                self.scheduler.run(groups[0], groups[1], extents, ring)
            if warp == _LOAD_WARP:
                self._load((a_tma, a_tensor, a_stages), (b_tma, b_tensor, b_stages), b_to_both, stages, ring)
        else:
            cute.arch.setmaxregister_increase(_PRODUCT_REGISTERS)
            writing = (result, staging, exchange)
            self._multiply(products, thread - _WARPGROUP, (a_stages, b_stages), stages, ring, writing)
        if cutlass.const_expr(self.config.cluster > 1):
            # A block's shared memory stays while the other of its pair may still reach for it.
            self._sync_cluster()

    @cute.jit
    def _sync_cluster(self):
        """Waits for all threads of the blocks that work together."""
        if cutlass.const_expr(self.config.cluster == 1):
            cute.arch.sync_threads()
        else:
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def _load(
        self,
        a_operand: tuple,
        b_operand: tuple,
        b_to_both: Any,
        stages: pipeline.PipelineTmaAsync,
        ring: WorkRing,
    ):
        """Fills the stages with the tiles of both operands; run by one warp."""
        a_tma, a_tensor, a_stages = a_operand
        b_tma, b_tensor, b_stages = b_operand
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.config.stages)
        position = ring.reader()
        tile = ring.get(position)
        while tile.k_tiles >= 0:
            position.advance()
            if cutlass.const_expr(self.ragged_rows):
                a_rows = cute.domain_offset((tile.a_row, 0), a_tensor)
            else:
                a_rows = cute.domain_offset(
                    (tile.a_column, 0), operands.rows_of_group(a_tensor, tile.a_row, tile.depth)
                )
            a_to, a_from = self._partition(a_tma, a_stages, a_rows, self.tile[0])
            b_to, b_from = self._partition(b_tma, b_stages, self._of_tile(b_tensor, tile, tile.column), self.tile[1])
            if cutlass.const_expr(self.pairs):
                rank, half = cute.arch.block_idx()[0] % 2, self.tile[1] // 2
                stages_of_half = cute.local_tile(b_stages, (half, TILE_K, self.config.stages), (rank, 0, 0))
                to_both, halves = b_to_both
                rows = self._of_tile(halves, tile, tile.column + rank * half)
                half_to, half_from = self._partition(to_both, stages_of_half, rows, half)
            for k_tile in cutlass.range(tile.k_tiles, unroll=1):
                stages.producer_acquire(state)
                barrier = stages.producer_get_barrier(state)
                cute.copy(a_tma, a_from[None, k_tile], a_to[None, state.index], tma_bar_ptr=barrier)
                together = cutlass.Boolean(False)
                if cutlass.const_expr(self.pairs):
                    together = tile.role >= TOGETHER
                    if together:
                        half_at = half_to[None, state.index]
                        cute.copy(
                            to_both, half_from[None, k_tile], half_at, tma_bar_ptr=barrier, mcast_mask=Int16(0b11)
                        )
                if not together:
                    cute.copy(b_tma, b_from[None, k_tile], b_to[None, state.index], tma_bar_ptr=barrier)
                stages.producer_commit(state)
                state.advance()
            tile = ring.get(position)
        stages.producer_tail(state)

    def _of_tile(self, b_tensor: cute.Tensor, tile: WorkTile, column: Int32) -> cute.Tensor:
        """The tile of rhs as (column, contracted), from a column on."""
        if self.ragged_rows:
            return cute.domain_offset((column, 0), b_tensor[None, None, tile.b_row])
        return cute.domain_offset((column, 0), operands.rows_of_group(b_tensor, tile.b_row, tile.depth))

    @staticmethod
    def _partition(tma: cute.CopyAtom, smem: cute.Tensor, rows: cute.Tensor, extent: int) -> Any:
        """(shared memory by stage, global memory by tile of the contraction), as the TMA unit takes them."""
        tiles = cute.local_tile(rows, (extent, TILE_K), (0, None))
        return cpasync.tma_partition(
            tma, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(tiles, 0, 2)
        )

    @cute.jit
    def _multiply(
        self,
        products: tuple,
        thread: Int32,
        operands: tuple,
        stages: pipeline.PipelineTmaAsync,
        ring: WorkRing,
        outputs: tuple,
    ):
        """Multiplies the stages, and writes the tiles of the result; run by the consumer warpgroups."""
        a_stages, b_stages = operands
        whole_mma, low_mma = products
        whole = self._part(whole_mma, thread, a_stages, b_stages, self.tile[0])
        low = None
        if cutlass.const_expr(self.low_tiles):
            low_stages = cute.local_tile(a_stages, (LOW_ROWS, TILE_K, self.config.stages), (0, 0, 0))
            low = self._part(low_mma, thread, low_stages, b_stages, LOW_ROWS)
        read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.config.stages)
        position = ring.reader()
        tile = ring.get(position)
        while tile.k_tiles >= 0:
            position.advance()
            if cutlass.const_expr(self.low_tiles):
                if tile.rows > LOW_ROWS:
                    read = self._make_tile(whole, thread, stages, read, outputs, tile)
                else:
                    read = self._make_tile(low, thread, stages, read, outputs, tile)
            else:
                read = self._make_tile(whole, thread, stages, read, outputs, tile)
            tile = ring.get(position)
        if cutlass.const_expr(self.staged):
            epilogue.finish_staged(thread)

    @staticmethod
    def _part(
        tiled_mma: cute.TiledMma, thread: Int32, a_stages: cute.Tensor, b_stages: cute.Tensor, rows: int
    ) -> tuple:
        """What this thread's warpgroup multiplies: (product, fragments of lhs and of rhs, places of its results)."""
        group = cute.arch.make_warp_uniform(thread // _WARPGROUP)
        of_group = tiled_mma.get_slice(cute.make_layout(_CONSUMERS, stride=_WARPGROUP)(group))
        a = tiled_mma.make_fragment_A(of_group.partition_A(a_stages))
        b = tiled_mma.make_fragment_B(of_group.partition_B(b_stages))
        columns = cute.size(b_stages, mode=[0])
        coords = tiled_mma.get_slice(thread).partition_C(cute.make_identity_tensor((rows, columns)))
        tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
        return tiled_mma, a, b, coords

    @cute.jit
    def _make_tile(
        self,
        part: tuple,
        thread: Int32,
        stages: pipeline.PipelineTmaAsync,
        read: pipeline.PipelineState,
        outputs: tuple,
        tile: WorkTile,
    ) -> pipeline.PipelineState:
        """Multiplies one tile, and writes it; returns the position behind its stages."""
        tiled_mma, a, b, coords = part
        acc = cute.make_rmem_tensor(coords.shape, cutlass.Float32)
        release = read.clone()
        acc.fill(0.0)
        warpgroup.fence()
        for k_tile in cutlass.range(tile.k_tiles, unroll=1):
            stages.consumer_wait(read)
            for step in cutlass.range_constexpr(cute.size(a, mode=[2])):
                at = (None, None, step, read.index)
                cute.gemm(tiled_mma, acc, a[at], b[at], acc)
            warpgroup.commit_group()
            read.advance()
            # One product stays in flight; the stage before it is free.
            if k_tile > 0:
                warpgroup.wait_group(1)
                stages.consumer_release(release)
                release.advance()
        warpgroup.wait_group(0)
        _take(acc)
        if tile.k_tiles > 0:
            stages.consumer_release(release)
            if cutlass.const_expr(self.shares):
                self._exchange(acc, thread, outputs[2], tile.role)
            if cutlass.const_expr(self.spec.has_bias):
                epilogue.add_bias(acc, coords, outputs[0], tile.depth, tile.column)
        if tile.role != SENDS and tile.role != SILENT:  # noqa: PLR1714 (a kernel has no `in`)
            self._store(tiled_mma, thread, (acc, coords), outputs, tile)
        return read

    @cute.jit
    def _exchange(self, acc: cute.Tensor, thread: Int32, exchange: Exchange, role: Int32):
        """Adds up what the blocks of a pair hold, where they share a tile."""
        if role == SENDS:
            exchange.send(acc, thread)
        if role == RECEIVES:
            if cutlass.const_expr(self.staged):
                epilogue.finish_staged(thread)
            exchange.receive(acc, thread)

    @cute.jit
    def _store(self, tiled_mma: cute.TiledMma, thread: Int32, tile_of_result: tuple, outputs: tuple, tile: WorkTile):
        """Writes a tile of the result, the way that it can be."""
        acc, coords = tile_of_result
        result, staging, _ = outputs
        whole = cute.size(acc) * _CONSUMERS * _WARPGROUP == self.tile[0] * self.tile[1]
        if cutlass.const_expr(not self.ragged_rows):
            if cutlass.const_expr(self.staged):
                epilogue.store_staged(acc, tiled_mma, thread, staging, (tile.a_column, tile.column, tile.out_row))
            else:
                first = tile.out_row * result.matrix_rows + tile.a_column
                epilogue.store(acc, coords, result, (first, tile.column), tile.rows)
        elif cutlass.const_expr(self.staged and whole):
            if tile.rows == self.tile[0]:
                epilogue.store_staged(acc, tiled_mma, thread, staging, (tile.out_row, tile.column, 0))
            else:
                epilogue.store(acc, coords, result, (tile.out_row, tile.column), tile.rows)
        else:
            epilogue.store(acc, coords, result, (tile.out_row, tile.column), tile.rows)
