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

__all__ = ["exchange_chunks", "exchange_sizes", "gather_rows", "scatter_sum", "sum_over", "vary_over"]


def exchange_sizes(sizes: jax.Array, axis: str) -> jax.Array:
    """Tells every rank how much it gets from each: (ranks,) sizes to send to (ranks,) sizes to receive."""
    return lax.all_to_all(sizes, axis, 0, 0, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def exchange_chunks(chunks: jax.Array, send: jax.Array, receive: jax.Array, axis: str) -> jax.Array:
    """Sends chunk p to rank p, and receives chunk p from there.

    Only the rows that count cross the network where the platform has a ragged all-to-all (NVIDIA and AMD GPUs, TPUs);
    elsewhere (CPU) whole chunks do.

    Args:
      chunks: (ranks, C, D); rows of chunk p past send[p] must be zeros.
      send: (ranks,) int32, the rows that count of each chunk.
      receive: (ranks,) int32, those of the chunks to come: `exchange_sizes(send, axis)`.
      axis: the mesh axis.

    Returns:
      (ranks, C, D); rows of chunk p past receive[p] are zeros.
    """
    chunks, send, receive = vary_alike((chunks, send, receive))
    return lax.platform_dependent(
        chunks,
        send,
        receive,
        cpu=functools.partial(_whole_chunks, axis),
        default=functools.partial(_rows_that_count, axis),
    )


def _whole_chunks(axis: str, chunks: jax.Array, send: jax.Array, receive: jax.Array) -> jax.Array:
    del send, receive
    return lax.all_to_all(chunks, axis, 0, 0, tiled=True)


def _rows_that_count(axis: str, chunks: jax.Array, send: jax.Array, receive: jax.Array) -> jax.Array:
    ranks, capacity, width = chunks.shape
    rows = chunks.reshape(ranks * capacity, width)
    starts = lax.iota(jnp.int32, ranks) * capacity
    mine = jnp.full_like(starts, lax.axis_index(axis) * capacity)  # where all my chunks lie at their receivers
    rows, empty, starts, mine = vary_alike((rows, jnp.zeros_like(rows), starts, mine))
    return lax.ragged_all_to_all(rows, empty, starts, send, mine, receive, axis_name=axis).reshape(chunks.shape)


def _exchange_fwd(chunks: jax.Array, send: jax.Array, receive: jax.Array, axis: str) -> Any:
    return exchange_chunks(chunks, send, receive, axis), (send, receive)


def _exchange_bwd(axis: str, sizes: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> Any:
    send, receive = sizes
    return exchange_chunks(cotangent, receive, send, axis), None, None


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
