"""The collectives of expert parallelism, for use inside `jax.shard_map`, each with a gradient that is the same kind.

What one of them moves forwards, its gradient moves backwards once; sums over ranks run in the dtype that the caller
names, not in that of the rows. All are differentiable in reverse mode, any number of times.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ggemm.manual_axes import vary_alike

__all__ = ["exchange_chunks", "exchange_sizes", "gather_rows", "rounds_for", "scatter_sum", "sum_over", "vary_over"]


def exchange_sizes(sizes: jax.Array, axis: str) -> jax.Array:
    """Tells every rank how much it gets from each: (ranks,) sizes to send to (ranks,) sizes to receive."""
    return lax.all_to_all(sizes, axis, 0, 0, tiled=True)


def rounds_for(sizes: jax.Array, rows: int, axis: str) -> jax.Array:
    """The rounds of `rows` rows that the largest of all ranks' sizes needs, the same number on all of them."""
    return -(-lax.pmax(jnp.max(sizes), axis) // rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def exchange_chunks(chunks: jax.Array, rounds: jax.Array | None, rows: int, axis: str) -> jax.Array:
    """Sends chunk p to rank p, and receives chunk p from there.

    In rounds of `rows` rows of every chunk, so that chunks may have room for much more than they hold. Each is a plain
    all-to-all: `lax.ragged_all_to_all` is slower on GPUs, and fails there between processes
    (docs/expert_parallel.md).

    Args:
      chunks: (ranks, C, D); rows past those that count must be zeros.
      rounds: () int32, at least `rounds_for` the rows that count, and the same on all ranks; None for whole chunks.
      rows: of a chunk in one round, at most C; C if `rounds` is None.
      axis: the mesh axis.

    Returns:
      (ranks, C, D); rows past those that count are zeros.
    """

    def exchange(piece: jax.Array) -> jax.Array:
        return lax.all_to_all(piece, axis, 0, 0, tiled=True)

    if rounds is None:
        return exchange(chunks)
    room = chunks.shape[1] - rows

    def one_more(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        done, received = state
        start = jnp.minimum(done * rows, room)  # the last one sends some rows twice
        piece = exchange(lax.dynamic_slice_in_dim(chunks, start, rows, 1))
        return done + 1, lax.dynamic_update_slice_in_dim(received, piece, start, 1)

    first = lax.pad(exchange(chunks[:, :rows]), jnp.zeros((), chunks.dtype), ((0, 0, 0), (0, room, 0), (0, 0, 0)))
    done, first, rounds = vary_alike((jnp.ones_like(rounds), first, rounds))
    return lax.while_loop(lambda state: state[0] < rounds, one_more, (done, first))[1]


def _exchange_fwd(chunks: jax.Array, rounds: jax.Array | None, rows: int, axis: str) -> Any:
    return exchange_chunks(chunks, rounds, rows, axis), rounds


def _exchange_bwd(rows: int, axis: str, rounds: jax.Array | None, cotangent: jax.Array) -> Any:
    return exchange_chunks(cotangent, rounds, rows, axis), None


exchange_chunks.defvjp(_exchange_fwd, _exchange_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather_rows(rows: jax.Array, axis: str, dtype: np.dtype[Any]) -> jax.Array:
    """The rows of all ranks of a mesh axis, (n, D) to (ranks * n, D); the gradient is summed over ranks in `dtype`."""
    return lax.all_gather(rows, axis, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def scatter_sum(rows: jax.Array, axis: str, dtype: np.dtype[Any]) -> jax.Array:
    """The sum over ranks, in `dtype`, of each rank's own part: (ranks * n, D) to (n, D), in the dtype of the rows."""
    return lax.psum_scatter(rows.astype(dtype), axis, tiled=True).astype(rows.dtype)


def _gather_fwd(rows: jax.Array, axis: str, dtype: np.dtype[Any]) -> tuple[jax.Array, None]:
    return gather_rows(rows, axis, dtype), None


def _gather_bwd(axis: str, dtype: np.dtype[Any], _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    return (scatter_sum(cotangent, axis, dtype),)


def _scatter_fwd(rows: jax.Array, axis: str, dtype: np.dtype[Any]) -> tuple[jax.Array, None]:
    return scatter_sum(rows, axis, dtype), None


def _scatter_bwd(axis: str, dtype: np.dtype[Any], _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    return (gather_rows(cotangent, axis, dtype),)


gather_rows.defvjp(_gather_fwd, _gather_bwd)
scatter_sum.defvjp(_scatter_fwd, _scatter_bwd)


def vary_over(array: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """A replicated array as one that varies over `axes`; its gradient is then summed over them, in float32."""
    missing = tuple(axis for axis in axes if axis not in jax.typeof(array).mat.varying)
    if not missing:
        return array
    wide = lax.pcast(array.astype(jnp.promote_types(jnp.float32, array.dtype)), missing, to="varying")
    return wide.astype(array.dtype)


def sum_over(array: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The sum over mesh axes, in float32 for shorter floats; the array may be replicated over some of them."""
    if not axes:
        return array
    array = vary_over(array, axes)
    wide = jnp.promote_types(jnp.float32, array.dtype) if jnp.issubdtype(array.dtype, jnp.floating) else array.dtype
    return lax.psum(array.astype(wide), axes).astype(array.dtype)
