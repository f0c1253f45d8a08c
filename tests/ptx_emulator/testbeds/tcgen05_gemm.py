"""A small dense matrix product on tcgen05, with one and with two blocks per tile: a test bed of the emulator.

TMA fills two stages, tcgen05.mma multiplies them into tensor memory, tcgen05.ld brings the tile to registers, and each
thread writes one row. With two blocks (`cta_group::2`, a cluster of 2 x 1) each holds half of the rows of both
operands; the first block's barriers count both blocks' bytes, and its thread issues every product.

Roles: warps 0 to 3 write, warp 4 multiplies, warp 5 loads. Nothing here is tuned.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.utils.blackwell_helpers as blackwell
from cutlass import Float32, Int32, Int64, cute, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.memory import SmemAllocator

ARCH = "sm_100a"

_TILE_K = 64
_STAGES = 2
_MULTIPLY_WARP = 4
_LOAD_WARP = 5
_THREADS = 192
_CHUNK = 32
"""Columns that a thread holds at a time."""


@dataclasses.dataclass(frozen=True)
class Tcgen05Gemm:
    """out (m, n) float32 = a (m, k) b (n, k)^T of bfloat16, row-major; m, n, k are run-time values, k a multiple of 8.

    Host arguments: a stream, pointers to a, b and out, then m, n, k as int32. The grid has `ctas` blocks for every
    tile of 128 * ctas rows and 64 columns.
    """

    ctas: int = 1
    """Blocks that share a tile: 1 or 2."""

    @property
    def tile(self) -> tuple[int, int, int]:
        """Extents along m, n, k of the tile of a cluster."""
        return 128 * self.ctas, 64, _TILE_K

    @property
    def stage_bytes(self) -> int:
        """Bytes that fill a stage, of all blocks that share it."""
        return 2 * _TILE_K * (self.tile[0] + self.tile[1])

    def example_arguments(self) -> tuple[Any, ...]:
        """Arguments to compile with: only their types matter."""
        pointers = [
            cute.runtime.make_ptr(dtype, 256, cute.AddressSpace.gmem, assumed_align=16)
            for dtype in (cutlass.BFloat16, cutlass.BFloat16, Float32)
        ]
        return (cuda.CUstream(0), *pointers, *(Int32(8),) * 3)

    @cute.jit
    def __call__(
        self, stream: cuda.CUstream, a: cute.Pointer, b: cute.Pointer, out: cute.Pointer, m: Int32, n: Int32, k: Int32
    ):
        """Launches the kernel."""
        k = cute.assume(k, divby=8)
        group = tcgen05.CtaGroup.TWO if self.ctas == 2 else tcgen05.CtaGroup.ONE
        tiled_mma = blackwell.make_trivial_tiled_mma(
            cutlass.BFloat16, cutlass.BFloat16, OperandMajorMode.K, OperandMajorMode.K, Float32, group, self.tile[:2]
        )
        a_smem = blackwell.make_smem_layout_a(tiled_mma, self.tile, cutlass.BFloat16, _STAGES)
        b_smem = blackwell.make_smem_layout_b(tiled_mma, self.tile, cutlass.BFloat16, _STAGES)
        load = cpasync.CopyBulkTensorTileG2SOp(group)
        a_view = cute.make_tensor(a, cute.make_layout((m, k), stride=(Int64(k), 1)))
        b_view = cute.make_tensor(b, cute.make_layout((n, k), stride=(Int64(k), 1)))
        a_operand = cute.nvgpu.make_tiled_tma_atom_A(load, a_view, a_smem, self.tile, tiled_mma)
        b_operand = cute.nvgpu.make_tiled_tma_atom_B(load, b_view, b_smem, self.tile, tiled_mma)
        out_view = cute.make_tensor(out, cute.make_layout((m, n), stride=(Int64(n), 1)))

        @cute.struct
        class Storage:
            full: cute.struct.MemRange[cutlass.Int64, _STAGES]
            empty: cute.struct.MemRange[cutlass.Int64, _STAGES]
            done: cutlass.Int64
            tmem: Int32
            a: cute.struct.Align[cute.struct.MemRange[cutlass.BFloat16, cute.cosize(a_smem)], 1024]
            b: cute.struct.Align[cute.struct.MemRange[cutlass.BFloat16, cute.cosize(b_smem)], 1024]

        tiles = cute.ceil_div(m, self.tile[0]), cute.ceil_div(n, self.tile[1])
        self._kernel(
            Storage, (a_operand[0], a_operand[1], a_smem), (b_operand[0], b_operand[1], b_smem), tiled_mma, out_view, k
        ).launch(
            grid=(tiles[0] * self.ctas, tiles[1], 1),
            block=(_THREADS, 1, 1),
            cluster=(self.ctas, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def _kernel(
        self,
        storage_type: cutlass.Constexpr,
        a_operand: tuple,
        b_operand: tuple,
        tiled_mma: cute.TiledMma,
        out: cute.Tensor,
        k: Int32,
    ):
        a_tma, a_tensor, a_smem = a_operand
        b_tma, b_tensor, b_smem = b_operand
        block_x, block_y, _ = cute.arch.block_idx()
        rank = block_x % self.ctas
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        storage = SmemAllocator().allocate(storage_type)
        a_stages = storage.a.get_tensor(a_smem.outer, swizzle=a_smem.inner)
        b_stages = storage.b.get_tensor(b_smem.outer, swizzle=b_smem.inner)
        barriers = storage.full.data_ptr(), storage.empty.data_ptr(), storage.done.ptr
        if warp == _LOAD_WARP:
            cpasync.prefetch_descriptor(a_tma)
            cpasync.prefetch_descriptor(b_tma)
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(_STAGES):
                    cute.arch.mbarrier_init(barriers[0] + i, 1)
                    cute.arch.mbarrier_init(barriers[1] + i, 1)
                cute.arch.mbarrier_init(barriers[2], 1)
            cute.arch.mbarrier_init_fence()
        if warp == _MULTIPLY_WARP:
            cute.arch.alloc_tmem(self.tile[1], storage.tmem.ptr, is_two_cta=self.ctas == 2)
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=self.ctas == 2)
        self._meet()
        tmem = cute.arch.retrieve_tmem_ptr(Float32, 16, storage.tmem.ptr)
        acc = cute.make_tensor(tmem, tiled_mma.make_fragment_C(tiled_mma.partition_shape_C(self.tile[:2])).layout)

        k_tiles = cute.ceil_div(k, _TILE_K)
        place = (block_x // self.ctas, block_y)
        if warp == _LOAD_WARP:
            self._load(
                tiled_mma.get_slice(rank), (a_tma, a_tensor, a_stages), (b_tma, b_tensor, b_stages), barriers, place
            )
        if warp == _MULTIPLY_WARP and rank == 0:
            self._multiply(tiled_mma, (a_stages, b_stages), acc, barriers, k_tiles)
        if warp < _MULTIPLY_WARP:
            cute.arch.mbarrier_wait(barriers[2], 0)
            self._store(acc, out, (place[0] * self.tile[0] + rank * 128, place[1] * self.tile[1]))
        # Nobody leaves while a block of its cluster may still write to it.
        self._meet()
        if warp == _MULTIPLY_WARP:
            cute.arch.dealloc_tmem(tmem, self.tile[1], is_two_cta=self.ctas == 2)

    @cute.jit
    def _meet(self):
        """Waits for every thread of the cluster."""
        if cutlass.const_expr(self.ctas == 2):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    @cute.jit
    def _load(self, of_block: Any, a_operand: tuple, b_operand: tuple, barriers: tuple, place: tuple):
        """Fills the stages; run by one warp of each block."""
        full, empty, _ = barriers
        a_tma, a_tensor, a_stages = a_operand
        b_tma, b_tensor, b_stages = b_operand
        a_tiles = of_block.partition_A(cute.local_tile(a_tensor, (self.tile[0], _TILE_K), (place[0], None)))
        b_tiles = of_block.partition_B(cute.local_tile(b_tensor, (self.tile[1], _TILE_K), (place[1], None)))
        one = cute.make_layout(1)
        a_to, a_from = cpasync.tma_partition(
            a_tma, 0, one, cute.group_modes(a_stages, 0, 3), cute.group_modes(a_tiles, 0, 3)
        )
        b_to, b_from = cpasync.tma_partition(
            b_tma, 0, one, cute.group_modes(b_stages, 0, 3), cute.group_modes(b_tiles, 0, 3)
        )
        rank, _, _ = cute.arch.block_in_cluster_idx()
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, _STAGES)
        for k_tile in cutlass.range(cute.size(a_tiles, mode=[3]), unroll=1):
            cute.arch.mbarrier_wait(empty + state.index, state.phase)
            if rank == 0:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full + state.index, self.stage_bytes)
            barrier = full + state.index
            cute.copy(a_tma, a_from[None, k_tile], a_to[None, state.index], tma_bar_ptr=barrier)
            cute.copy(b_tma, b_from[None, k_tile], b_to[None, state.index], tma_bar_ptr=barrier)
            state.advance()
        # The last products have read the stages, and what they signal has come.
        for _ in cutlass.range_constexpr(_STAGES):
            cute.arch.mbarrier_wait(empty + state.index, state.phase)
            state.advance()

    @cute.jit
    def _multiply(self, tiled_mma: cute.TiledMma, stages: tuple, acc: cute.Tensor, barriers: tuple, k_tiles: Int32):
        """Multiplies the stages; run by one warp of the first block."""
        full, empty, done = barriers
        a = tiled_mma.make_fragment_A(stages[0])
        b = tiled_mma.make_fragment_B(stages[1])
        mask, group = (0b11, tcgen05.CtaGroup.TWO) if self.ctas == 2 else (None, tcgen05.CtaGroup.ONE)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, _STAGES)
        for k_tile in cutlass.range(k_tiles, unroll=1):
            cute.arch.mbarrier_wait(full + state.index, state.phase)
            for step in cutlass.range_constexpr(cute.size(a, mode=[2])):
                tiled_mma.set(tcgen05.Field.ACCUMULATE, k_tile > 0 or step > 0)
                at = (None, None, step, state.index)
                cute.gemm(tiled_mma, acc, a[at], b[at], acc)
            with cute.arch.elect_one():
                tcgen05.commit(empty + state.index, mask, group)
            state.advance()
        with cute.arch.elect_one():
            tcgen05.commit(done, mask, group)

    @cute.jit
    def _store(self, acc: cute.Tensor, out: cute.Tensor, origin: tuple):
        """Writes the block's 128 rows, one per thread."""
        atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(_CHUNK)), Float32)
        chunks = cute.flat_divide(acc[((None, None), 0, 0)], (128, _CHUNK))
        copy = tcgen05.make_tmem_copy(atom, chunks[None, None, 0, 0])
        thread, _, _ = cute.arch.thread_idx()
        of_thread = copy.get_slice(thread)
        from_tmem = of_thread.partition_S(chunks)
        to = of_thread.partition_D(cute.make_identity_tensor((128, _CHUNK)))
        row = origin[0] + thread
        for i in cutlass.range_constexpr(cute.size(chunks, mode=[3])):
            values = cute.make_rmem_tensor(to.shape, Float32)
            cute.copy(copy, from_tmem[None, None, None, 0, i], values)
            cute.arch.fence_view_async_tmem_load()  # also where no column of the chunk is in the result
            for j in cutlass.range_constexpr(cute.size(values)):
                column = origin[1] + i * _CHUNK + j
                if row < out.shape[0] and column < out.shape[1]:
                    out[row, column] = values[j]
