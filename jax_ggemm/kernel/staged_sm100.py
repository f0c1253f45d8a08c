"""Results that leave through shared memory and the TMA unit: what the epilogue does without, to compare it with.

Each warp of the epilogue has buffers of its own, of 32 rows of 128 bytes. A thread writes its row, in pieces of 16
bytes that are swizzled as the TMA unit takes them, and the warp stores the box while it fills the other buffer. Where
the rows of a warp end with their group, they are stored from registers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync

from jax_ggemm.kernel import epilogue
from jax_ggemm.kernel.config_sm100 import STAGING_BUFFERS, STAGING_COLUMNS, STAGING_ROWS
from jax_ggemm.kernel.epilogue import Result

_PIECE = 16
"""Bytes of a row that lie together."""


@dataclasses.dataclass(frozen=True)
class Staging:
    """The way of a block's results through shared memory."""

    tma: Any
    view: cute.Tensor
    """(row, column, matrix) of the result, for the TMA unit."""
    buffers: cute.Tensor
    """(row, column, buffer) in shared memory, of all warps."""

    @staticmethod
    def plan(result: Result, rows: Any, matrices: Any, warps: int) -> tuple[Any, ...]:
        """The tensor map, its view, and the buffers' layout.

        Args:
          result: a matrix, or several.
          rows: of a matrix.
          matrices: one behind the other.
          warps: that have buffers.
        """
        return epilogue.staging(result, rows, matrices, (STAGING_ROWS, STAGING_COLUMNS), warps * STAGING_BUFFERS)

    @cute.jit
    def put(self, values: cute.Tensor, origin: tuple[Any, ...], turn: Int32):
        """Writes the rows of one warp; called by all its lanes.

        Args:
          values: of the lane's row, float32.
          origin: (row, column, matrix) of the first of them.
          turn: which of the warp's buffers.
        """
        dtype = self.buffers.element_type
        thread = cute.arch.thread_idx()[0]
        lane = cute.arch.lane_idx()
        buffer = cute.arch.make_warp_uniform(thread // 32) * STAGING_BUFFERS + turn
        converted = cute.make_rmem_tensor(values.layout, dtype)
        converted.store(values.load().to(dtype))
        # The store before the last has read this buffer.
        cute.arch.cp_async_bulk_wait_group(STAGING_BUFFERS - 1, read=True)
        cute.arch.sync_warp()
        per_piece = _PIECE * 8 // dtype.width
        row = self.buffers.iterator.toint() + (buffer * STAGING_ROWS + lane) * (STAGING_COLUMNS * dtype.width // 8)
        copy = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), dtype, num_bits_per_copy=8 * _PIECE)
        layout = cute.make_layout(per_piece)
        for i in cutlass.range_constexpr(STAGING_COLUMNS // per_piece):
            at = row + (i ^ lane % 8) * _PIECE
            to = cute.make_ptr(dtype, at, cute.AddressSpace.smem, assumed_align=_PIECE)
            cute.copy(copy, cute.make_tensor(converted.iterator + i * per_piece, layout), cute.make_tensor(to, layout))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        box = (STAGING_ROWS, STAGING_COLUMNS)
        of_matrix = cute.domain_offset((origin[0], origin[1]), self.view[None, None, origin[2]])
        from_smem, to_gmem = cpasync.tma_partition(
            self.tma,
            0,
            cute.make_layout(1),
            cute.group_modes(self.buffers, 0, 2),
            cute.group_modes(cute.local_tile(of_matrix, box, (0, 0)), 0, 2),
        )
        cute.copy(self.tma, from_smem[None, buffer], to_gmem)
        cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def finish(self):
        """Waits until the buffers have been read; called before a block ends."""
        cute.arch.cp_async_bulk_wait_group(0, read=True)
