"""The epilogue on Blackwell: from rows in registers to global memory, with no buffer in between.

A thread holds neighbouring columns of one row. It writes them 32 bytes at a time: whole sectors of L2, with half of
the stores that 16 bytes would take.
"""

from __future__ import annotations

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from jax_ggemm.kernel.epilogue import Result

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
