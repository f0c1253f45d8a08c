"""The grouped products in plain JAX: the "xla" implementation.

It takes every dtype that `jax.lax.ragged_dot` takes, runs on every platform and is differentiable in
every mode (it is made of gathers and one batched product, with no custom rule).

Each group's rows are cut into tiles of ceil(m / groups) rows. A group ends in at most one partial
tile, so at most 2 * groups tiles are needed whatever the sizes, and one batched product over the
tiles does the work: temporaries are O(m (k + n) + groups k n), and no [groups, m, k] array exists.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ggemm.products import Call, Operands, Product, accumulation_dtype

_DIRECT_DTYPES = frozenset(np.dtype(d) for d in (jnp.bfloat16, np.float16, np.float32, np.float64))
"""Dtypes that every backend's batched product takes as they are; others are widened first."""

_MAX_ROWS = 2**29
"""Row and slot indices go up to about 3 m, in int32."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Tiles:
    """Which rows each tile holds; an index past the end of its array means none."""

    tile_weight: jax.Array
    """(tiles,) index of the tile's weight matrix."""
    slot_row: jax.Array
    """(tiles, rows) index of the row in each slot."""
    row_slot: jax.Array
    """(m,) index of each row's slot in the flattened tiles."""


def _tile_counts(m: int, groups: int) -> tuple[int, int]:
    """The rows of a tile and the number of tiles that any sizes of `groups` groups need."""
    rows = (m + groups - 1) // groups
    if jax.export.is_symbolic_dim(m):
        return rows, 2 * groups
    # sum_i ceil(size_i / rows) <= m / rows + (groups that are not empty)
    return rows, m // rows + min(groups, m)


def group_ends(group_sizes: jax.Array, m: int) -> jax.Array:
    """The row at which each group ends: the running sum of the sizes, clamped to [0, m].

    Args:
      group_sizes: (groups,) int32.
      m: number of rows.

    Returns:
      (groups,) int32. The sum saturates at m, so that it cannot overflow.
    """
    sizes = jnp.clip(group_sizes, 0, m)
    return lax.associative_scan(lambda a, b: b + jnp.minimum(a, m - b), sizes)


def _make_tiles(call: Call, m: int, group_sizes: jax.Array, group_offset: jax.Array) -> _Tiles:
    groups = group_sizes.shape[0]
    rows, tiles = _tile_counts(m, groups)
    ends = group_ends(group_sizes, m)
    starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    tile_ends = jnp.cumsum((ends - starts + rows - 1) // rows)
    tile_starts = jnp.concatenate([jnp.zeros_like(tile_ends[:1]), tile_ends[:-1]])

    tile = jnp.arange(tiles, dtype=jnp.int32)
    tile_group = jnp.searchsorted(tile_ends, tile, side="right")
    weight = tile_group - group_offset
    tile_used = (tile_group < groups) & (weight >= 0) & (weight < call.num_weights)

    in_range = jnp.minimum(tile_group, groups - 1)
    first_row = starts[in_range] + (tile - tile_starts[in_range]) * rows
    slot_row = first_row[:, None] + jnp.arange(rows, dtype=jnp.int32)[None]
    slot_used = tile_used[:, None] & (slot_row < ends[in_range][:, None])

    row = jnp.arange(m, dtype=jnp.int32)
    row_group = jnp.searchsorted(ends, row, side="right")
    row_weight = row_group - group_offset
    row_used = (row_group < groups) & (row_weight >= 0) & (row_weight < call.num_weights)
    in_range = jnp.minimum(row_group, groups - 1)
    row_slot = tile_starts[in_range] * rows + row - starts[in_range]

    # Unused entries get indices past the end that are still unique: the gathers below promise it.
    slot = jnp.arange(tiles * rows, dtype=jnp.int32).reshape(tiles, rows)
    return _Tiles(
        tile_weight=jnp.where(tile_used, weight, call.num_weights),
        slot_row=jnp.where(slot_used, slot_row, m + slot),
        row_slot=jnp.where(row_used, row_slot, tiles * rows + row),
    )


def _take_unique(array: jax.Array, index: jax.Array) -> jax.Array:
    """array[index] along the first axis, 0 where the index is past the end."""
    return array.at[index].get(mode="fill", fill_value=0, unique_indices=True)


def _take_weights(weights: jax.Array, tiles: _Tiles, dtype: np.dtype) -> jax.Array:
    """The weights of each tile, as `dtype`. The gradient of this gather adds the tiles of a group up in `dtype`."""
    return weights.astype(dtype).at[tiles.tile_weight].get(mode="clip", indices_are_sorted=True)


def _batched_dot(call: Call, lhs: jax.Array, rhs: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Product of each tile of lhs with that of rhs, in the accumulation dtype."""
    dtype = accumulation_dtype(lhs.dtype, rhs.dtype, call.out_dtype)
    if lhs.dtype != rhs.dtype or lhs.dtype not in _DIRECT_DTYPES:
        lhs, rhs = lhs.astype(dtype), rhs.astype(dtype)
    dimension_numbers = (((contract[0],), (contract[1],)), ((0,), (0,)))
    return lax.dot_general(lhs, rhs, dimension_numbers, precision=call.precision, preferred_element_type=dtype)


def _ragged_rows(call: Call, operands: Operands) -> jax.Array:
    """FORWARD and DLHS."""
    m = operands.lhs.shape[0]
    tiles = _make_tiles(call, m, operands.group_sizes, operands.group_offset)
    wide = accumulation_dtype(operands.lhs.dtype, operands.rhs.dtype, call.out_dtype)
    # Where JAX differentiates these lines itself, the gradient of the weights is a sum over tiles: in `wide`.
    rhs_dtype = wide if call.implementation == "xla" else operands.rhs.dtype
    contract = (2, 1) if call.product is Product.FORWARD else (2, 2)
    result = _batched_dot(
        call, _take_unique(operands.lhs, tiles.slot_row), _take_weights(operands.rhs, tiles, rhs_dtype), contract
    )
    if operands.bias is not None:
        result += _take_weights(operands.bias, tiles, wide)[:, None]
    slots = result.shape[0] * result.shape[1]
    return _take_unique(result.reshape(slots, result.shape[2]), tiles.row_slot).astype(call.out_dtype)


def _ragged_contraction(call: Call, operands: Operands) -> jax.Array:
    """DRHS."""
    tiles = _make_tiles(call, operands.lhs.shape[0], operands.group_sizes, operands.group_offset)
    partial = _batched_dot(
        call, _take_unique(operands.lhs, tiles.slot_row), _take_unique(operands.rhs, tiles.slot_row), (1, 1)
    )
    result = jnp.zeros_like(partial, shape=(call.num_weights, *partial.shape[1:]))
    result = result.at[tiles.tile_weight].add(partial, mode="drop", indices_are_sorted=True)
    return result.astype(call.out_dtype)


def unsupported(call: Call, operands: Operands) -> str | None:
    """Why plain JAX cannot take the call, or None where it can."""
    del call
    m = operands.lhs.shape[0]
    if not jax.export.is_symbolic_dim(m) and m > _MAX_ROWS:
        return f"lhs has {m} rows; its int32 slot indices allow {_MAX_ROWS}"
    return None


def _unbatched(call: Call, operands: Operands) -> jax.Array:
    if 0 in (operands.lhs.shape[0], operands.group_sizes.shape[0], call.num_weights):
        # Like lhs, so that it varies over the mesh axes that lhs varies over.
        return jnp.zeros_like(operands.lhs, shape=operands.out_shape(call), dtype=call.out_dtype)
    if call.product.rows_are_ragged:
        return _ragged_rows(call, operands)
    return _ragged_contraction(call, operands)


def grouped_product(call: Call, operands: Operands) -> jax.Array:
    """One grouped product in plain JAX.

    Args:
      call: the product.
      operands: its arrays, with or without batch axes.

    Returns:
      The result, with the full batch axes in front.
    """
    if operands.batch_rank == 0:
        return _unbatched(call, operands)
    # An axis of length 1 belongs to an operand that is not batched: mapped over as such, not repeated.
    (length, *_) = operands.batch_shape
    is_batched = jax.tree.map(lambda array: array.shape[0] != 1 or length == 1, operands)
    squeezed = jax.tree.map(lambda array, batched: array if batched else array[0], operands, is_batched)
    in_axes = jax.tree.map(lambda batched: 0 if batched else None, is_batched)
    return jax.vmap(functools.partial(grouped_product, call), in_axes=(in_axes,))(squeezed)
