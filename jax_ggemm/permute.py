"""Rows of tokens to rows sorted by expert, and back. Knows integers and rows; nothing of routers or weights' matrices.

Two maps tie the (T, k) slots of a routing to the N = T * k rows in expert order: `order` (row -> slot) and its inverse
(slot -> row). With w the weights, x one row a token and y one row a slot, everything here is a derivative of one form,

    F(x, w, y) = sum over slots (t, j) that have an expert of  w[t, j] * <x[t], y[inverse[t, j]]>

namely `_spread` = dF/dy, `_collect` = dF/dx and `_pair` = dF/dw. So the gradients of each are calls of the other two:
gathers through one of the maps, never a scatter-add, and differentiable in reverse mode as often as wanted.
Products and sums are in float32 (float64 for float64 operands) whatever the operands are.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ggemm.manual_axes import vary_alike

__all__ = ["Links", "Permutation", "combine", "dispatch", "sort_by_expert"]


class Links(NamedTuple):
    """Which of R rows belongs to which of T * k slots, where either may have no partner.

    Attributes:
      order: (R,) int32, the slot t * k + j of each row; T * k or more where it has none.
      inverse: (T, k) int32, the row of each slot; R or more where it has none.
    """

    order: jax.Array
    inverse: jax.Array

    @property
    def links(self) -> Links:
        """Itself."""
        return self


class Permutation(NamedTuple):
    """The rows of a routing in expert order; N = T * k of them, those without an expert last.

    Attributes:
      order: (N,) int32, the slot t * k + j of each row.
      inverse: (T, k) int32, the row of each slot.
      group_sizes: (E,) int32, rows per expert.
      num_rows: () int32, rows that have an expert: the sum of `group_sizes`.
    """

    order: jax.Array
    inverse: jax.Array
    group_sizes: jax.Array
    num_rows: jax.Array

    @property
    def links(self) -> Links:
        """The rows and slots that have an expert, linked."""
        return self.first(self.order.shape[0])

    def first(self, rows: int) -> Links:
        """The links of the first `rows` rows, for a routing that has no more of them."""
        slots = self.order.shape[0]
        order = jnp.where(lax.iota(jnp.int32, rows) < self.num_rows, self.order[:rows], slots)
        return Links(order, jnp.where(self.inverse < self.num_rows, self.inverse, rows))


def sort_by_expert(ids: jax.Array, num_experts: int) -> Permutation:
    """Sorts the slots of a routing by expert, in token order within an expert.

    Args:
      ids: (T, k) integers of any dtype. An id outside [0, num_experts) belongs to no expert.
      num_experts: E.

    Returns:
      The permutation; one stable sort, and everything else read off it.

    Raises:
      TypeError: for a wrong dtype or rank.
      ValueError: if `num_experts` is negative.
    """
    if ids.ndim != 2 or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"ids must be integers of shape (tokens, k), got {ids.dtype} of shape {ids.shape}")
    if num_experts < 0:
        raise ValueError(f"num_experts must not be negative, got {num_experts}")
    if ids.dtype.itemsize < 4:
        ids = ids.astype(jnp.int32)  # int8 could not be compared with more than 127 experts
    # Foreign ids first become E. Counting them as they are would be wrong: jnp.bincount puts -1 into bin 0.
    keys = jnp.where((ids >= 0) & (ids < num_experts), ids, num_experts).astype(jnp.int32).reshape(-1)
    slots = lax.iota(jnp.int32, keys.size)
    keys, order = lax.sort((keys, slots), num_keys=1, is_stable=True)
    inverse = jnp.zeros_like(order).at[order].set(slots, unique_indices=True, mode="promise_in_bounds")
    # Unrolled binary search: a dozen gathers in one kernel, no loop on the device, no scatter-add of N ones.
    starts = jnp.searchsorted(keys, jnp.arange(num_experts + 1, dtype=jnp.int32), method="scan_unrolled")
    starts = starts.astype(jnp.int32)
    return Permutation(order, inverse.reshape(ids.shape), jnp.diff(starts), starts[num_experts])


def dispatch(x: jax.Array, permutation: Permutation | Links) -> jax.Array:
    """Gathers the rows of tokens in expert order.

    Args:
      x: (T, D) floating.
      permutation: of the T tokens' slots.

    Returns:
      (N, D) in the dtype of x: row i is x[order[i] // k], or 0 where it has no expert. The gradient is a gather and a
      sum over k in float32. With `Links` of R rows, (R, D).

    Raises:
      TypeError: for a wrong dtype or rank, or sizes that do not fit.
    """
    x = jnp.asarray(x)
    _check_rows("x", x, permutation.inverse.shape[0], "token")
    x, links = vary_alike((x, permutation.links))
    return _spread(x, None, links, np.dtype(x.dtype))


def combine(y: jax.Array, weights: jax.Array | None, permutation: Permutation | Links, dtype: Any = None) -> jax.Array:
    """Sums the rows of each token, weighted.

    Args:
      y: (N, D) floating, rows in expert order; (R, D) with `Links` of R rows.
      weights: (T, k) floating, float32 as a rule; None for a plain sum.
      permutation: of the T tokens' slots.
      dtype: of the result; that of y if None.

    Returns:
      (T, D): sum over j of weights[t, j] * y[inverse[t, j]], in float32, j ascending, cast at the end. A slot without
      an expert adds exactly 0 and its weight gets a gradient of exactly 0, whatever y, the weight or the cotangent
      hold there (NaN and Inf too).

    Raises:
      TypeError: for a wrong dtype or rank, or sizes that do not fit.
    """
    y = jnp.asarray(y)
    _check_rows("y", y, permutation.order.shape[0], "slot")
    shape = permutation.inverse.shape
    if weights is not None:
        weights = jnp.asarray(weights)
        if weights.shape != shape or not jnp.issubdtype(weights.dtype, jnp.floating):
            raise TypeError(f"weights must be floating of shape {shape}, got {weights.dtype} of shape {weights.shape}")
    y, weights, links = vary_alike((y, weights, permutation.links))
    return _collect(y, weights, links, np.dtype(y.dtype if dtype is None else dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _spread(x: jax.Array, weights: jax.Array | None, links: Links, dtype: np.dtype[Any]) -> jax.Array:
    """Row i is x[t] (times weights[t, j]) for the slot (t, j) = order[i]: (T, D) to (R, D)."""
    order, k = links.order, links.inverse.shape[1]
    rows = _gather(x, order // k)
    if weights is not None:
        rows = _wide(rows, weights) * _gather(_wide(weights, rows).reshape(-1), order)[:, None]
    return jnp.where((order < links.inverse.size)[:, None], rows.astype(dtype), 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _collect(y: jax.Array, weights: jax.Array | None, links: Links, dtype: np.dtype[Any]) -> jax.Array:
    """Sums y[inverse[t, j]] (times weights[t, j]) over j: (R, D) to (T, D)."""
    inverse = links.inverse
    kind = jnp.promote_types(jnp.float32, y.dtype if weights is None else jnp.promote_types(y.dtype, weights.dtype))
    total = jnp.zeros((inverse.shape[0], y.shape[1]), kind)
    for j in range(inverse.shape[1]):  # unrolled: k gathers fuse into one pass that holds nothing of size (T, k, D)
        row = inverse[:, j]
        term = _gather(y, row).astype(kind)
        if weights is not None:
            term = term * weights[:, j, None].astype(kind)
        total = total + jnp.where((row < y.shape[0])[:, None], term, 0)
    return total.astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _pair(x: jax.Array, y: jax.Array, links: Links, dtype: np.dtype[Any]) -> jax.Array:
    """<x[t], y[inverse[t, j]]>: (T, D) and (R, D) to (T, k)."""
    rows = _gather(y, links.inverse)
    products = jnp.sum(_wide(x, y)[:, None, :] * _wide(rows, x), axis=-1)
    return jnp.where(links.inverse < y.shape[0], products, 0).astype(dtype)


def _spread_fwd(x: jax.Array, weights: jax.Array | None, links: Links, dtype: np.dtype[Any]) -> Any:
    # Without weights only the dtype of x is needed later, and an empty slice is what can carry it.
    return _spread(x, weights, links, dtype), (x[:0] if weights is None else x, weights, links)


def _spread_bwd(_: np.dtype[Any], residuals: Any, cotangent: jax.Array) -> Any:
    x, weights, links = residuals
    dx = _collect(cotangent, weights, links, np.dtype(x.dtype))
    return dx, None if weights is None else _pair(x, cotangent, links, np.dtype(weights.dtype)), None


def _collect_fwd(y: jax.Array, weights: jax.Array | None, links: Links, dtype: np.dtype[Any]) -> Any:
    return _collect(y, weights, links, dtype), (y[:0] if weights is None else y, weights, links)


def _collect_bwd(_: np.dtype[Any], residuals: Any, cotangent: jax.Array) -> Any:
    y, weights, links = residuals
    dy = _spread(cotangent, weights, links, np.dtype(y.dtype))
    return dy, None if weights is None else _pair(cotangent, y, links, np.dtype(weights.dtype)), None


def _pair_fwd(x: jax.Array, y: jax.Array, links: Links, dtype: np.dtype[Any]) -> Any:
    return _pair(x, y, links, dtype), (x, y, links)


def _pair_bwd(_: np.dtype[Any], residuals: Any, cotangent: jax.Array) -> Any:
    x, y, links = residuals
    dx = _collect(y, cotangent, links, np.dtype(x.dtype))
    return dx, _spread(x, cotangent, links, np.dtype(y.dtype)), None


_spread.defvjp(_spread_fwd, _spread_bwd)
_collect.defvjp(_collect_fwd, _collect_bwd)
_pair.defvjp(_pair_fwd, _pair_bwd)


def _gather(array: jax.Array, indices: jax.Array) -> jax.Array:
    """array[indices]; where there is no partner to gather, some row, which the caller masks."""
    return array.at[indices].get(mode="clip", wrap_negative_indices=False)


def _wide(array: jax.Array, other: jax.Array) -> jax.Array:
    """Casts to the dtype in which `array` and `other` are multiplied and summed: float32 or wider."""
    return array.astype(jnp.promote_types(jnp.float32, jnp.promote_types(array.dtype, other.dtype)))


def _check_rows(name: str, rows: jax.Array, number: int, what: str) -> None:
    if rows.ndim != 2 or rows.shape[0] != number:
        raise TypeError(f"{name} must have shape ({number}, features), one row a {what}, got {rows.shape}")
    if not jnp.issubdtype(rows.dtype, jnp.floating):
        raise TypeError(f"{name} must be floating, got {rows.dtype}")
