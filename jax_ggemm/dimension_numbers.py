"""Reduces `ragged_dot_general` to the products of matrices, without copying where the layout allows it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

Matrices = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def _remaining(rank: int, taken: Sequence[int]) -> tuple[int, ...]:
    return tuple(axis for axis in range(rank) if axis not in taken)


def _sizes(array: jax.Array, axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(array.shape[axis] for axis in axes)


def _check_axes(name: str, axes: Sequence[int], array: jax.Array) -> None:
    if len(set(axes)) != len(axes) or not all(0 <= axis < array.ndim for axis in axes):
        raise TypeError(
            f"{name} dimensions must be distinct and in [0, {array.ndim}) for shape {array.shape}, got {tuple(axes)}"
        )


def _check_equal(name: str, lhs_sizes: Sequence[int], rhs_sizes: Sequence[int]) -> None:
    if lhs_sizes != rhs_sizes:
        raise TypeError(f"{name} dimensions must have equal sizes; lhs has {lhs_sizes} and rhs has {rhs_sizes}")


@dataclasses.dataclass(frozen=True)
class Axes:
    """The axes of both operands by role, checked.

    Raises:
      TypeError: from `of`, for dimension numbers that do not fit the operands.
    """

    lhs_batch: tuple[int, ...]
    lhs_contract: tuple[int, ...]
    lhs_free: tuple[int, ...]
    rhs_batch: tuple[int, ...]
    rhs_contract: tuple[int, ...]
    rhs_free: tuple[int, ...]
    rhs_group: tuple[int, ...]
    ragged: int

    @classmethod
    def of(cls, lhs: jax.Array, rhs: jax.Array, numbers: lax.RaggedDotDimensionNumbers) -> Axes:
        """Sorts the axes of the operands by role."""
        if not isinstance(numbers, lax.RaggedDotDimensionNumbers):
            raise TypeError(
                f"ragged_dot_dimension_numbers must be a lax.RaggedDotDimensionNumbers, got {type(numbers).__name__}"
            )
        lhs_contract, rhs_contract, lhs_batch, rhs_batch, ragged, group = (
            tuple(axes)
            for axes in (
                *itertools.chain(*numbers.dot_dimension_numbers),
                numbers.lhs_ragged_dimensions,
                numbers.rhs_group_dimensions,
            )
        )
        if len(ragged) != 1:
            raise TypeError(f"ragged_dot_dimension_numbers must name one ragged dimension of lhs, got {ragged}")
        _check_axes("lhs ragged", ragged, lhs)
        _check_axes("lhs contracting and batch", lhs_contract + lhs_batch, lhs)
        _check_axes("rhs contracting, batch and group", rhs_contract + rhs_batch + group, rhs)
        _check_equal("contracting", _sizes(lhs, lhs_contract), _sizes(rhs, rhs_contract))
        _check_equal("batch", _sizes(lhs, lhs_batch), _sizes(rhs, rhs_batch))
        axes = cls(
            lhs_batch=lhs_batch,
            lhs_contract=lhs_contract,
            lhs_free=_remaining(lhs.ndim, lhs_batch + lhs_contract),
            rhs_batch=rhs_batch,
            rhs_contract=rhs_contract,
            rhs_free=_remaining(rhs.ndim, rhs_batch + rhs_contract + group),
            rhs_group=group,
            ragged=ragged[0],
        )
        wanted = 1 if axes.ragged in axes.lhs_free else 0
        if len(group) != wanted:
            kind = "free" if wanted else "contracting or batch"
            raise TypeError(f"a {kind} ragged dimension takes {wanted} group dimension(s) of rhs, got {group}")
        return axes

    def outer(self) -> tuple[int, ...]:
        """The axes of lhs that a full group_sizes has before its groups: batch, then outside the ragged one."""
        if self.ragged in self.lhs_batch:
            return self.lhs_batch[: self.lhs_batch.index(self.ragged)]
        family = self.lhs_free if self.ragged in self.lhs_free else self.lhs_contract
        return self.lhs_batch + family[: family.index(self.ragged)]


def _map_outer(function: Matrices, depth: int, in_axes: tuple[int | None, ...], out_axis: int = 0) -> Matrices:
    for _ in range(depth):
        function = jax.vmap(function, in_axes=in_axes, out_axes=out_axis)
    return function


def _map_and_sum(function: Matrices) -> Matrices:
    mapped = jax.vmap(function)
    return lambda lhs, rhs, sizes: mapped(lhs, rhs, sizes).sum(0)


def ragged_free(axes: Axes, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, matrices: Matrices) -> jax.Array:
    """Mode 1, a free ragged dimension: [b..., m..., k...] x [g, b..., k..., n...] -> [b..., m..., n...].

    Args:
      axes: the axes by role.
      lhs: any rank.
      rhs: any rank.
      group_sizes: (g,), or with the axes `axes.outer()` in front.
      matrices: the product (m, k) x (g, k, n) x (g,) -> (m, n) or, where the weights of `rhs` have their
        free axes in front, (m, k) x (g, n, k) x (g,) -> (m, n); see `weights_are_transposed`.

    Returns:
      The result in the axis order of `lax.dot_general`.
    """
    outer = axes.lhs_free[: axes.lhs_free.index(axes.ragged)]
    inner = axes.lhs_free[len(outer) + 1 :]
    m, repeat = lhs.shape[axes.ragged], math.prod(_sizes(lhs, inner))
    k, n = math.prod(_sizes(lhs, axes.lhs_contract)), math.prod(_sizes(rhs, axes.rhs_free))
    batch, outer_shape = _sizes(lhs, axes.lhs_batch), _sizes(lhs, outer)

    rows = lhs.transpose(axes.lhs_batch + outer + (axes.ragged,) + inner + axes.lhs_contract)
    rows = rows.reshape(*batch, *outer_shape, m * repeat, k)
    transposed = weights_are_transposed(axes)
    last = axes.rhs_free + axes.rhs_contract if transposed else axes.rhs_contract + axes.rhs_free
    weights = rhs.transpose(axes.rhs_batch + axes.rhs_group + last)
    weights = weights.reshape(*batch, rhs.shape[axes.rhs_group[0]], *((n, k) if transposed else (k, n)))
    sizes = jnp.clip(group_sizes, 0, m) * repeat

    has_prefix = group_sizes.ndim > 1
    function = _map_outer(matrices, len(outer), (0, None, 0 if has_prefix else None))
    function = _map_outer(function, len(batch), (0, 0, 0 if has_prefix else None))
    return function(rows, weights, sizes).reshape(*batch, *_sizes(lhs, axes.lhs_free), *_sizes(rhs, axes.rhs_free))


def weights_are_transposed(axes: Axes) -> bool:
    """True where the free axes of the weights lie outside their contracting axes, so that (g, n, k) is a view."""
    return bool(axes.rhs_free) and max(axes.rhs_free) < min(axes.rhs_contract, default=-1)


def ragged_contracting(
    axes: Axes, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, matrices: Matrices
) -> jax.Array:
    """Mode 2, a contracting ragged dimension: [b..., m..., k...] x [b..., k..., n...] -> [g, b..., m..., n...].

    Args:
      axes: the axes by role.
      lhs: any rank.
      rhs: any rank.
      group_sizes: (g,), or with the axes `axes.outer()` in front.
      matrices: the product (rows, m) x (rows, n) x (g,) -> (g, m, n).

    Returns:
      The result: the groups, then the axis order of `lax.dot_general`.
    """
    position = axes.lhs_contract.index(axes.ragged)
    has_prefix = group_sizes.ndim > 1
    rows = lhs.shape[axes.ragged]
    batch = _sizes(lhs, axes.lhs_batch)
    # Sizes that hold for every outer index: the outer axes go inside the ragged one, where a group stays in one piece.
    outer = position if has_prefix else 0
    repeat = math.prod(_sizes(lhs, axes.lhs_contract)) // (rows or 1)
    if has_prefix:
        repeat = math.prod(_sizes(lhs, axes.lhs_contract[position + 1 :]))

    def arrange(array: jax.Array, batch_axes: Sequence[int], contract: Sequence[int], free: Sequence[int]) -> jax.Array:
        mapped = tuple(contract[:outer])
        rest = tuple(axis for axis in contract if axis not in mapped and axis != contract[position])
        array = array.transpose(*batch_axes, *mapped, contract[position], *rest, *free)
        shape = array.shape
        lead = shape[: len(batch) + outer]
        return array.reshape(*lead, rows * repeat, math.prod(shape[len(shape) - len(free) :]))

    lhs2 = arrange(lhs, axes.lhs_batch, axes.lhs_contract, axes.lhs_free)
    rhs2 = arrange(rhs, axes.rhs_batch, axes.rhs_contract, axes.rhs_free)
    sizes = jnp.clip(group_sizes, 0, rows) * repeat

    function = matrices
    for _ in range(outer):
        function = _map_and_sum(function)
    function = _map_outer(function, len(batch), (0, 0, 0 if has_prefix else None), out_axis=1)
    result = function(lhs2, rhs2, sizes)
    return result.reshape(group_sizes.shape[-1], *batch, *_sizes(lhs, axes.lhs_free), *_sizes(rhs, axes.rhs_free))
