"""Reduces `ragged_dot_general` to the products of matrices, without copying where the layout allows it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

Matrices = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def _remaining(rank: int, *taken: Sequence[int]) -> tuple[int, ...]:
    return tuple(axis for axis in range(rank) if not any(axis in axes for axes in taken))


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
        (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = numbers.dot_dimension_numbers
        ragged, group = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
        if len(ragged) != 1:
            raise TypeError(f"ragged_dot_dimension_numbers must name one ragged dimension of lhs, got {ragged}")
        named = (
            ("lhs_contracting", lhs_contract, lhs.ndim),
            ("lhs_batch", lhs_batch, lhs.ndim),
            ("lhs_ragged", ragged, lhs.ndim),
            ("rhs_contracting", rhs_contract, rhs.ndim),
            ("rhs_batch", rhs_batch, rhs.ndim),
            ("rhs_group", group, rhs.ndim),
        )
        for name, axes, rank in named:
            if not all(0 <= axis < rank for axis in axes) or len(set(axes)) != len(axes):
                raise TypeError(f"{name} dimensions {tuple(axes)} must be distinct and in [0, {rank})")
        for side, one, other in (("lhs", lhs_contract, lhs_batch), ("rhs", rhs_contract, rhs_batch)):
            if set(one) & set(other):
                raise TypeError(f"{side} contracting dimensions {one} and batch dimensions {other} overlap")
        for kind, one, other in (("contracting", lhs_contract, rhs_contract), ("batch", lhs_batch, rhs_batch)):
            sizes = [lhs.shape[a] for a in one], [rhs.shape[a] for a in other]
            if sizes[0] != sizes[1]:
                raise TypeError(
                    f"{kind} dimensions must have equal sizes: lhs of shape {lhs.shape} has {sizes[0]}, "
                    f"rhs of shape {rhs.shape} has {sizes[1]}"
                )
        axes = cls(
            lhs_batch,
            lhs_contract,
            _remaining(lhs.ndim, lhs_batch, lhs_contract),
            rhs_batch,
            rhs_contract,
            _remaining(rhs.ndim, rhs_batch, rhs_contract, group),
            group,
            ragged[0],
        )
        if set(group) & {*rhs_contract, *rhs_batch}:
            raise TypeError(f"the rhs group dimension {group} must be neither contracting nor batch")
        wanted = 1 if ragged[0] in axes.lhs_free else 0
        if len(group) != wanted:
            kind = "free" if wanted else "contracting or batch"
            raise TypeError(f"a {kind} ragged dimension takes {wanted} group dimensions of rhs, got {group}")
        return axes

    def outer(self) -> tuple[int, ...]:
        """The axes of lhs that a full group_sizes has before its groups: batch, then outside the ragged one."""
        if self.ragged in self.lhs_batch:
            return self.lhs_batch[: self.lhs_batch.index(self.ragged)]
        family = self.lhs_free if self.ragged in self.lhs_free else self.lhs_contract
        return self.lhs_batch + family[: family.index(self.ragged)]


def _sizes(array: jax.Array, axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(array.shape[axis] for axis in axes)


def _map_outer(function: Matrices, depth: int, in_axes: tuple[int | None, ...], out_axis: int = 0) -> Matrices:
    for _ in range(depth):
        function = jax.vmap(function, in_axes=in_axes, out_axes=out_axis)
    return function


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
    sizes = jnp.minimum(group_sizes, m) * repeat

    has_prefix = group_sizes.ndim > 1
    function = _map_outer(matrices, len(outer), (0, None, 0 if has_prefix else None))
    function = _map_outer(function, len(batch), (0, 0, 0 if has_prefix else None))
    return function(rows, weights, sizes).reshape(
        *batch, *_sizes(lhs, axes.lhs_free), *_sizes(rhs, axes.rhs_free)
    )


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
    sizes = jnp.minimum(group_sizes, rows) * repeat

    function = matrices
    for _ in range(outer):
        mapped = jax.vmap(function)
        function = lambda a, b, s, mapped=mapped: mapped(a, b, s).sum(0)  # noqa: E731
    function = _map_outer(function, len(batch), (0, 0, 0 if has_prefix else None), out_axis=1)
    result = function(lhs2, rhs2, sizes)
    return result.reshape(group_sizes.shape[-1], *batch, *_sizes(lhs, axes.lhs_free), *_sizes(rhs, axes.rhs_free))
