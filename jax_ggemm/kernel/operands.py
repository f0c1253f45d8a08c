"""Views of the operands that serve every group with one tensor map each.

* Where rows are ragged, a tile of lhs starts at any row. It may read rows of the next group, which give rows of the
  result that are not written.
* Where rows are contracted, tiles end where their group ends, at any row. The view has a further axis whose stride
  takes an address that went past the end of the group back to its start, modulo 2^64: coordinates past the group are
  out of bounds, and the TMA unit fills them with zeros. No row of another group is read, so that a NaN stays where
  it is.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, cute

from jax_ggemm.kernel.config import KernelSpec
from jax_ggemm.kernel.schedule import Extents
from jax_ggemm.products import Product

DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16, "float32": Float32}
"""The DSL's types, by the names of NumPy's."""

_RAGGED_ROWS = 2**30
_TURN = 2**64 // _RAGGED_ROWS
"""_RAGGED_ROWS steps of this many elements return to the same address."""


def _ragged(data: cute.Pointer, columns: Any) -> cute.Tensor:
    """A matrix as (column, row, turn, end), for `rows_of_group`."""
    row = Int64(columns)
    return cute.make_tensor(
        data,
        cute.make_layout((columns, _RAGGED_ROWS, 2**31 - 1, 2**31 - 1), stride=(1, row, Int64(_TURN) - row, row)),
    )


def rows_of_group(view: cute.Tensor, first: Int32, rows: Int32) -> cute.Tensor:
    """The (column, row) view of a group's rows, in which every row past the last is out of bounds."""
    return cute.domain_offset((0, _RAGGED_ROWS - rows), view[None, None, _RAGGED_ROWS, first + rows])


def rows_of_segmented_group(view: cute.Tensor, segment: Int32, first: Int32, rows: Int32) -> cute.Tensor:
    """The same of a view whose columns are (element, segment), from a segment on."""
    return cute.domain_offset((0, segment, _RAGGED_ROWS - rows), view[None, None, None, _RAGGED_ROWS, first + rows])


def views(product: Product, lhs: cute.Pointer, rhs: cute.Pointer, e: Extents) -> tuple[cute.Tensor, cute.Tensor]:
    """The operands as (m or n, contracted, ...), for one tensor map each."""
    if not product.rows_are_ragged:
        return _ragged(lhs, e.k), _ragged(rhs, e.n)
    lhs_rows = cutlass.max(e.m, e.lhs_step * e.batch)
    matrices = cutlass.max(e.weights, e.rhs_step * e.batch)
    k, n = Int64(e.k), Int64(e.n)
    matrix = cute.assume(k * n, divby=8)
    n = cute.assume(n, divby=8)
    k = cute.assume(k, divby=8)
    if product is Product.FORWARD:
        a_shape, a_stride = (lhs_rows, e.k), (k, 1)
        b_shape, b_stride = (e.n, e.k, matrices), (1, n, matrix)
    else:
        a_shape, a_stride = (lhs_rows, e.n), (n, 1)
        b_shape, b_stride = (e.k, e.n, matrices), (n, 1, matrix)
    return (
        cute.make_tensor(lhs, cute.make_layout(a_shape, stride=a_stride)),
        cute.make_tensor(rhs, cute.make_layout(b_shape, stride=b_stride)),
    )


def example_arguments(spec: KernelSpec, bias_align: int) -> tuple[Any, ...]:
    """Arguments to compile a kernel with: only their types matter.

    Args:
      spec: the kernel.
      bias_align: bytes that rows of bias are aligned to.

    Returns:
      The stream, the pointers to lhs, rhs, group_sizes, group_offset, bias and the result, then the `Extents`.
    """
    in_dtype, out_dtype = DTYPES[spec.in_dtype.name], DTYPES[spec.out_dtype.name]
    pointers = [(in_dtype, 16), (in_dtype, 16), (Int32, 4), (Int32, 4), (Float32, bias_align), (out_dtype, 16)]
    return (
        cuda.CUstream(0),
        *(cute.runtime.make_ptr(dtype, 256, cute.AddressSpace.gmem, assumed_align=align) for dtype, align in pointers),
        *(Int32(8),) * Extents.COUNT,
    )
