"""The error of a grouped product on some of its rows, beside that of a dense product of the same dtype."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jax_ggemm.products import Product
from jax_ggemm.shapes import GroupedShape

_ROWS, _COLUMNS = 16, 256


@dataclasses.dataclass(frozen=True)
class Errors:
    """Errors relative to the root mean square of a row; the largest of all rows that were looked at.

    Attributes:
      grouped: of the grouped product.
      dense: of `jnp.dot` of the same rows and columns, in the operands' dtype.
    """

    grouped: float
    dense: float


def errors(shape: GroupedShape, product: Product, operands: tuple[jax.Array, jax.Array], result: jax.Array) -> Errors:
    """Compares a part of a result with float64: the last rows of the smallest group that has any, and of the largest.

    Args:
      shape: of the problem.
      product: which product.
      operands: lhs and rhs of the product, as `products.Product` has them.
      result: the product.

    Returns:
      The errors.
    """
    filled = sorted((size, group) for group, size in enumerate(shape.group_sizes) if size)
    ends = np.cumsum(shape.group_sizes)
    found = []
    for size, group in {filled[0], filled[-1]}:
        rows = (int(ends[group]) - size, int(ends[group]))
        lhs, rhs, part = _parts(product, operands, result, rows, group)
        exact = np.asarray(lhs, np.float64) @ np.asarray(rhs, np.float64)
        dense = jnp.dot(lhs, rhs, preferred_element_type=result.dtype)
        found.append((_largest(part, exact), _largest(dense, exact)))
    grouped, dense_errors = zip(*found, strict=True)
    return Errors(max(grouped), max(dense_errors))


def _parts(
    product: Product, operands: tuple[jax.Array, jax.Array], result: jax.Array, rows: tuple[int, int], group: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A (rows, contracted) and a (contracted, columns) matrix, and the part of the result that is their product."""
    lhs, rhs = operands
    first, last = rows
    if product is Product.DRHS:
        lhs, rhs = (_cut(array, first, last - first) for array in operands)
        return lhs[:, :_ROWS].T, rhs[:, :_COLUMNS], _cut(result, group, 1)[0, :_ROWS, :_COLUMNS]
    some = min(last - first, _ROWS)
    weights = _cut(rhs, group, 1)[0]
    weights = weights[:, :_COLUMNS] if product is Product.FORWARD else weights[:_COLUMNS].T
    return _cut(lhs, last - some, some), weights, _cut(result, last - some, some)[:, :_COLUMNS]


def _cut(array: jax.Array, start: int, size: int) -> jax.Array:
    """So many entries of the first axis; compiled once per size, not once per start."""
    return jax.lax.dynamic_slice_in_dim(array, np.int32(start), size)


def _largest(got: jax.Array, exact: np.ndarray) -> float:
    """The largest error of a row, relative to the root mean square of the exact row."""
    scale = np.sqrt(np.mean(exact**2, axis=1, keepdims=True))
    return float(np.max(np.sqrt(np.mean(((np.asarray(got, np.float64) - exact) / scale) ** 2, axis=1))))
