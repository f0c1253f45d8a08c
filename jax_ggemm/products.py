"""The three grouped products, as values.

The gradient of each product is made of the other two, so this one small description is what the
gradient rules, the batching rule and every implementation share.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class Product(enum.Enum):
    """Which of the three products, named by its role in the forward and backward pass of `ragged_dot`.

    Shapes are per batch element, with w the number of weight matrices held by the call.
    """

    FORWARD = "forward"
    """lhs (m, k), rhs (w, k, n) -> (m, n): a row of lhs times the weights of the row's group."""
    DLHS = "dlhs"
    """lhs (m, n), rhs (w, k, n) -> (m, k): the same with the weights transposed, read in place."""
    DRHS = "drhs"
    """lhs (m, k), rhs (m, n) -> (w, k, n): a product per group, contracted over the group's rows."""

    @property
    def rows_are_ragged(self) -> bool:
        """True where the result has a row per row of lhs, False where the rows are contracted."""
        return self is not Product.DRHS


@dataclasses.dataclass(frozen=True)
class Call:
    """Everything about one grouped product that is known when it is traced."""

    product: Product
    out_dtype: np.dtype
    num_weights: int
    """Weight matrices of the call: groups [offset, offset + num_weights) of group_sizes."""
    precision: lax.PrecisionLike
    implementation: str | Implementation | None
    """None for the best one, or the name of one, or an object."""

    @property
    def names_an_algorithm(self) -> bool:
        """True where the precision is more than a `lax.Precision` or a pair of them: it says how to multiply."""
        precisions = self.precision if isinstance(self.precision, tuple) else (self.precision,)
        return not all(precision is None or isinstance(precision, lax.Precision) for precision in precisions)

    def becomes(self, product: Product, out_dtype: np.dtype) -> Call:
        """The call of another product over the same groups."""
        return dataclasses.replace(self, product=product, out_dtype=np.dtype(out_dtype))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
    """The arrays of one call.

    Under `vmap` every array has the same number of leading batch axes, each of full length or of
    length 1 where the array is not batched: nothing is repeated in memory.
    """

    lhs: jax.Array
    rhs: jax.Array
    group_sizes: jax.Array
    """(groups,) int32. A negative size counts as 0; rows past m are cut off."""
    group_offset: jax.Array
    """() int32: the group that the first weight matrix belongs to."""
    bias: jax.Array | None = None
    """(w, columns of the result), added to the rows of each group; not for DRHS."""

    @property
    def batch_rank(self) -> int:
        """The number of leading batch axes."""
        return self.group_sizes.ndim - 1

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """The batch axes of the result."""
        rank = self.batch_rank
        arrays = jax.tree.leaves(self)
        return jnp.broadcast_shapes(*(array.shape[:rank] for array in arrays))

    def out_shape(self, call: Call) -> tuple[int, ...]:
        """The shape of the result of `call` on these operands."""
        core: tuple[int, ...]
        match call.product:
            case Product.FORWARD:
                core = (self.lhs.shape[-2], self.rhs.shape[-1])
            case Product.DLHS:
                core = (self.lhs.shape[-2], self.rhs.shape[-2])
            case Product.DRHS:
                core = (call.num_weights, self.lhs.shape[-1], self.rhs.shape[-1])
        return self.batch_shape + core


@runtime_checkable
class Implementation(Protocol):
    """What `implementation=` takes beside a name. It must be hashable."""

    name: str

    def unsupported(self, call: Call, operands: Operands) -> str | None:
        """Why this implementation cannot take the call, or None where it can."""

    def __call__(self, call: Call, operands: Operands) -> jax.Array:
        """Runs the product; every operand may carry batch axes, of full length or of length 1."""


def accumulation_dtype(*dtypes: np.dtype) -> np.dtype:
    """The dtype that sums are kept in for operands and results of these dtypes.

    float32, or float64 if one of them is; complex alike; integers and bool in 32 bits, or 64 if one
    of them has 64.
    """

    def any_is(kind: type) -> bool:
        return any(jnp.issubdtype(dtype, kind) for dtype in dtypes)

    wide = any(dtype.itemsize == (16 if jnp.issubdtype(dtype, jnp.complexfloating) else 8) for dtype in dtypes)
    if any_is(jnp.complexfloating):
        return np.dtype(np.complex128 if wide else np.complex64)
    if any_is(jnp.floating):
        return np.dtype(np.float64 if any(dtype == np.float64 for dtype in dtypes) else np.float32)
    if any_is(jnp.signedinteger) or not any_is(jnp.unsignedinteger):
        return np.dtype(np.int64 if wide else np.int32)
    return np.dtype(np.uint64 if wide else np.uint32)
