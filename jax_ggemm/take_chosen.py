"""The scores of the chosen experts, with a gradient that does not scatter. For the router; knows nothing else."""

from __future__ import annotations

import jax
import jax.numpy as jnp

__all__ = ["take_chosen"]


@jax.custom_vjp
def take_chosen(scores: jax.Array, ids: jax.Array) -> jax.Array:
    """scores[t, ids[t, j]]. The ids of a token differ, so the gradient is a sum of selects, not JAX's scatter-add."""
    return jnp.take_along_axis(scores, ids, axis=1, mode="promise_in_bounds")


def _take_chosen_fwd(scores: jax.Array, ids: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return take_chosen(scores, ids), (ids, jnp.zeros_like(scores, shape=(0, scores.shape[1])))


def _take_chosen_bwd(residuals: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, None]:
    ids, like = residuals
    experts = jnp.arange(like.shape[1], dtype=ids.dtype)
    gradient = jnp.zeros((ids.shape[0], like.shape[1]), cotangent.dtype)
    for j in range(ids.shape[1]):  # unrolled: one fused pass over (T, E), nothing of size (T, top_k, E)
        gradient = gradient + jnp.where(ids[:, j, None] == experts, cotangent[:, j, None], 0.0)
    return gradient, None


take_chosen.defvjp(_take_chosen_fwd, _take_chosen_bwd)
