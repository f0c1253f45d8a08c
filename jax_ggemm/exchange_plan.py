"""Who goes where in a routed all-to-all, and what finds no room. Knows integers only, and runs on the device."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_ggemm.permute import Links, sort_by_expert

__all__ = ["Plan", "fit_rows", "plan_chunks"]


class Plan(NamedTuple):
    """Which tokens of a rank go where.

    Attributes:
      links: between the T * k slots and the ranks * C rows of the chunks.
      sizes: (ranks,) int32, the tokens in each chunk.
      dropped: () int32, the choices whose rank their token was not sent to.
    """

    links: Links
    sizes: jax.Array
    dropped: jax.Array


def plan_chunks(ids: jax.Array, ranks: int, experts_per_rank: int, capacity: int) -> Plan:
    """Each token once to each rank that owns experts of it; at most `capacity` tokens to a rank."""
    slots = ids.size
    owner = jnp.where((ids >= 0) & (ids < ranks * experts_per_rank), ids // experts_per_rank, ranks)
    same = owner[:, :, None] == owner[:, None, :]
    earlier = jnp.tril(jnp.ones(same.shape[1:], bool), -1)
    by_rank = sort_by_expert(jnp.where(jnp.any(same & earlier, axis=2), ranks, owner), ranks)
    starts = jnp.cumsum(by_rank.group_sizes) - by_rank.group_sizes
    sizes = jnp.minimum(by_rank.group_sizes, capacity)

    at = lax.iota(jnp.int32, capacity)
    rows = jnp.minimum(starts[:, None] + at, slots - 1)
    order = jnp.where(at < sizes[:, None], by_rank.order[rows], slots).reshape(-1)
    rank = jnp.minimum(owner, ranks - 1)
    place = by_rank.inverse - starts[rank]
    sent = (by_rank.inverse < by_rank.num_rows) & (place < capacity)
    inverse = jnp.where(sent, rank * capacity + place, ranks * capacity)
    reached = jnp.any(same & sent[:, None, :], axis=2)
    dropped = jnp.sum((owner < ranks) & ~reached, dtype=jnp.int32)
    return Plan(Links(order, inverse), sizes, dropped)


def fit_rows(ids: jax.Array, nobody: int, ranks: int, max_rows: int) -> tuple[jax.Array, jax.Array]:
    """Gives the id `nobody` to the choices that `max_rows` rows have no room for; returns how many too.

    Those with the least place in their chunk come first, so that no rank pays for another.
    """
    if ids.shape[0] * min(ids.shape[1], nobody) <= max_rows:  # the experts of a token differ
        return ids, jnp.zeros_like(ids, shape=())
    k = ids.shape[1]
    by_place = (ids < nobody).reshape(ranks, -1, k).swapaxes(0, 1)
    fits = (jnp.cumsum(by_place.reshape(-1)) <= max_rows).reshape(by_place.shape) & by_place
    fits = fits.swapaxes(0, 1).reshape(ids.shape)
    overflow = jnp.sum((ids < nobody) & ~fits, dtype=jnp.int32)
    return jnp.where(fits, ids, nobody), overflow
