"""How tokens get to the ranks of their experts and back: the exchanges of expert parallelism.

An exchange runs inside `jax.shard_map`. It gets the rank's own tokens with their routing, brings them to the experts
(`LocalExperts`, the layer of one rank on whatever tokens are there), and brings the sums back. Counts, offsets and
permutations stay on the device; every gather's gradient is a gather. What each costs is in docs/expert_parallel.md.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jax_ggemm.collectives import (
    exchange_chunks,
    exchange_sizes,
    gather_rows,
    rounds_for,
    scatter_sum,
    sum_over,
    vary_over,
)
from jax_ggemm.exchange_plan import fit_rows, plan_chunks
from jax_ggemm.experts import ExpertOptions, experts
from jax_ggemm.layouts import ExpertParams
from jax_ggemm.manual_axes import vary_alike
from jax_ggemm.permute import combine, dispatch, sort_by_expert

__all__ = [
    "RECEIVED_NAME",
    "AllToAll",
    "Exchange",
    "Gather",
    "LocalExperts",
    "Replicated",
    "Ring",
    "Tokens",
    "ranks_per_token",
]

RECEIVED_NAME = "moe_received"
"""`checkpoint_name` of tokens that came from other ranks: a policy that saves them saves an exchange."""


class Tokens(NamedTuple):
    """Tokens with their routing.

    Attributes:
      x: (T, D).
      ids: (T, k) int32; an id that is no expert's counts for nothing.
      weights: (T, k) floating, float32 as a rule.
    """

    x: jax.Array
    ids: jax.Array
    weights: jax.Array


class LocalExperts(NamedTuple):
    """The experts of one rank.

    Attributes:
      params: of the E / ranks experts that the rank owns.
      options: how they compute.
      axis: the mesh axis over which the experts are spread; rank r owns the r-th run of them.
    """

    params: ExpertParams
    options: ExpertOptions
    axis: str

    @property
    def number(self) -> int:
        """The experts of this rank."""
        return int(self.params.gate_up.shape[0])

    def own_ids(self, ids: jax.Array) -> jax.Array:
        """Ids in the numbering of this rank; `number` for what is no expert of this rank."""
        local = ids - lax.axis_index(self.axis) * self.number
        return jnp.where((local >= 0) & (local < self.number), local, self.number)

    def rows(self, tokens: int, k: int) -> int:
        """The most rows that so many tokens can have here, if the experts of a token differ."""
        return max(1, tokens * min(k, self.number))

    def __call__(self, tokens: Tokens, max_rows: int) -> jax.Array:
        """The weighted sum of the experts of this rank for each token, (T, D); ids as `own_ids` gives them."""
        links_of = sort_by_expert(tokens.ids, self.number)
        links = links_of.first(max_rows)
        y = experts(dispatch(tokens.x, links), links_of.group_sizes, self.params, self.options)
        return combine(y, tokens.weights, links)


@runtime_checkable
class Exchange(Protocol):
    """What `ExpertParallel.exchange` takes. It must be hashable."""

    @property
    def split_tokens(self) -> bool:
        """Whether the ranks of the expert axis hold different tokens; else they all hold the same ones."""

    def __call__(self, tokens: Tokens, local: LocalExperts) -> tuple[jax.Array, jax.Array]:
        """Applies the experts of all ranks to this rank's tokens.

        Returns:
          (y, dropped): (T, D) in the dtype of x; () int32, the choices of this rank's experts or tokens that were
          dropped, each counted on one rank.
        """


def ranks_per_token(top_k: int, ranks: int) -> float:
    """The mean number of ranks that own one of a token's experts: P (1 - (1 - 1/P)^k), if routing is balanced."""
    return ranks * (1 - (1 - 1 / ranks) ** top_k)


@dataclasses.dataclass(frozen=True)
class AllToAll:
    """Sends each token to the ranks that own its experts: to each of them once, however many experts it has there.

    The rank that owns the experts weighs and sums them, and one row a token comes back from each such rank. Rows travel
    in as many rounds as the routing needs, one if it is balanced.

    Without `buffer_factor` nothing is ever dropped: a rank has room for all tokens of all ranks, ranks * T rows of
    tokens and ranks * T * min(k, experts per rank) rows of experts. With it there is room for

      * C = ceil(buffer_factor * T * min(1, k / ranks)) tokens from each rank to each: the last tokens of a rank that
        do not fit are not sent;
      * R = ceil(buffer_factor * T * k) rows of experts on each rank: the rows of the last tokens of every chunk that
        do not fit are not computed, in the order of the token in its chunk, then of the rank it comes from.

    A choice that is dropped adds exactly 0 to its token (the other weights stay as they are), has zero gradients, and
    is counted in `RoutingStats.dropped`.

    Attributes:
      buffer_factor: the buffers' size over what balanced routing needs; None for all that may come.
    """

    buffer_factor: float | None = None
    split_tokens: bool = dataclasses.field(default=True, init=False, repr=False)

    def __post_init__(self) -> None:
        factor: Any = self.buffer_factor
        if factor is None:
            return
        if isinstance(factor, bool) or not isinstance(factor, numbers.Real):
            raise TypeError(f"buffer_factor must be a number, or None to drop nothing; got {factor!r}")
        if not 0 < float(factor) < math.inf:
            raise ValueError(f"buffer_factor must be positive and finite, or None to drop nothing; got {factor!r}")

    def chunk_rows(self, tokens: int, k: int, ranks: int) -> int:
        """C: the most tokens that a rank of `tokens` tokens sends to another."""
        if self.buffer_factor is None:
            return tokens
        return min(tokens, math.ceil(self.buffer_factor * tokens * min(1.0, k / ranks)))

    def round_rows(self, tokens: int, k: int, ranks: int) -> int:
        """The rows of a chunk that are sent at once: with balanced routing all that count.

        That is their mean and four standard deviations where this is at most half of a chunk. Otherwise it is the whole
        chunk: asking whether there is another round costs a GPU more than the rows.
        """
        capacity, chance = self.chunk_rows(tokens, k, ranks), ranks_per_token(k, ranks) / ranks
        balanced = math.ceil(tokens * chance + 4 * math.sqrt(tokens * chance * (1 - chance)))
        return balanced if 2 * balanced <= capacity else capacity

    def expert_rows(self, tokens: int, k: int, ranks: int, experts_per_rank: int) -> int:
        """R: the rows that the experts of a rank have room for."""
        most = ranks * self.chunk_rows(tokens, k, ranks) * min(k, experts_per_rank)
        return most if self.buffer_factor is None else min(most, math.ceil(self.buffer_factor * tokens * k))

    def __call__(self, tokens: Tokens, local: LocalExperts) -> tuple[jax.Array, jax.Array]:
        """See `Exchange`."""
        axis, ranks, (number, k) = local.axis, lax.axis_size(local.axis), tokens.ids.shape
        capacity, max_rows = self.chunk_rows(number, k, ranks), self.expert_rows(number, k, ranks, local.number)
        plan = plan_chunks(tokens.ids, ranks, local.number, capacity)
        receive = exchange_sizes(plan.sizes, axis)
        at_once = self.round_rows(number, k, ranks)
        rounds = rounds_for(plan.sizes, at_once, axis) if at_once < capacity else None

        def send(rows: jax.Array) -> jax.Array:
            chunks = dispatch(rows, plan.links).reshape(ranks, capacity, rows.shape[1])
            received = exchange_chunks(chunks, rounds, at_once, axis)
            return checkpoint_name(received, RECEIVED_NAME).reshape(ranks * capacity, rows.shape[1])

        # Ids travel as floats beside the weights: one message, and exact below 2**24 experts.
        routing = send(jnp.concatenate([tokens.weights, tokens.ids.astype(tokens.weights.dtype)], axis=1))
        came = (lax.iota(jnp.int32, capacity) < receive[:, None]).reshape(-1, 1)
        ids = lax.stop_gradient(routing[:, k:]).astype(jnp.int32)
        ids = jnp.where(came, local.own_ids(ids), local.number)
        ids, overflow = fit_rows(ids, local.number, ranks, max_rows)
        y = local(Tokens(send(tokens.x), ids, routing[:, :k]), max_rows)
        back = exchange_chunks(y.reshape(ranks, capacity, y.shape[1]), rounds, at_once, axis)
        total = combine(back.reshape(ranks * capacity, y.shape[1]), None, plan.links)
        return total, plan.dropped + overflow


@dataclasses.dataclass(frozen=True)
class Gather:
    """Gathers the tokens of all ranks; each rank computes what its experts add, and the sums are scattered back.

    Nothing is dropped: a rank has room for ranks * T tokens and ranks * T * min(k, experts per rank) rows.

    Attributes:
      sum_dtype: of the sums over ranks, forwards and backwards; float32 at least if None. bfloat16 halves the bytes
        that come back, and rounds more often.
    """

    sum_dtype: DTypeLike | None = None
    split_tokens: bool = dataclasses.field(default=True, init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sum_dtype", _checked_dtype(self.sum_dtype))

    def __call__(self, tokens: Tokens, local: LocalExperts) -> tuple[jax.Array, jax.Array]:
        """See `Exchange`."""
        gather = functools.partial(gather_rows, axis=local.axis)
        dtype = _sum_dtype(self.sum_dtype, tokens.x.dtype)
        weights = checkpoint_name(gather(tokens.weights, dtype=np.dtype(tokens.weights.dtype)), RECEIVED_NAME)
        x = checkpoint_name(gather(tokens.x, dtype=dtype), RECEIVED_NAME)
        ids = checkpoint_name(lax.all_gather(tokens.ids, local.axis, tiled=True), RECEIVED_NAME)
        ids = local.own_ids(ids)
        y = local(Tokens(x, ids, weights), local.rows(*ids.shape))
        return scatter_sum(y, local.axis, dtype), _none_dropped(tokens)


@dataclasses.dataclass(frozen=True)
class Ring:
    """Passes the tokens of each rank around the ring of ranks, and their sums behind them.

    The same bytes as `Gather` in ranks - 1 steps, each of which overlaps with the products of the step before; a rank
    holds the tokens of one rank at a time, T * min(k, experts per rank) rows. Nothing is dropped.

    Attributes:
      sum_dtype: of the sums that travel, as for `Gather`. The gradient of x travels in the dtype of x.
    """

    sum_dtype: DTypeLike | None = None
    split_tokens: bool = dataclasses.field(default=True, init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sum_dtype", _checked_dtype(self.sum_dtype))

    def __call__(self, tokens: Tokens, local: LocalExperts) -> tuple[jax.Array, jax.Array]:
        """See `Exchange`."""
        ranks, dtype = lax.axis_size(local.axis), _sum_dtype(self.sum_dtype, tokens.x.dtype)
        shift = [(rank, (rank + 1) % ranks) for rank in range(ranks)]

        def onward(tree: Any) -> Any:
            return jax.tree.map(lambda array: lax.ppermute(array, local.axis, shift), tree)

        # Not the rows of each step, but its tokens are kept for the gradient: ranks * T of them.
        @jax.checkpoint
        def add(total: jax.Array, tokens: Tokens) -> jax.Array:
            own = tokens._replace(ids=local.own_ids(tokens.ids))
            return total + local(own, local.rows(*tokens.ids.shape)).astype(dtype)

        def step(carry: tuple[jax.Array, Tokens], _: None) -> tuple[tuple[jax.Array, Tokens], None]:
            total, tokens = carry
            return (onward(add(total, tokens)), onward(tokens)), None

        start = vary_alike((jnp.zeros_like(tokens.x, dtype=dtype), tokens, local.params.down[:0]))[:2]
        (total, tokens), _ = lax.scan(step, start, length=ranks - 1)
        return onward(add(total, tokens)).astype(tokens.x.dtype), _none_dropped(tokens)


@dataclasses.dataclass(frozen=True)
class Replicated:
    """For tokens that every rank of the expert axis holds (decoding): only the sums are exchanged. Nothing is dropped.

    A rank has room for T * min(k, experts per rank) rows.
    """

    split_tokens: bool = dataclasses.field(default=False, init=False, repr=False)

    def __call__(self, tokens: Tokens, local: LocalExperts) -> tuple[jax.Array, jax.Array]:
        """See `Exchange`."""
        axes = (local.axis,)
        x, weights = vary_over(tokens.x, axes), vary_over(tokens.weights, axes)
        y = local(Tokens(x, local.own_ids(tokens.ids), weights), local.rows(*tokens.ids.shape))
        return sum_over(y, axes), _none_dropped(tokens)


def _none_dropped(tokens: Tokens) -> jax.Array:
    return jnp.zeros_like(tokens.ids, shape=())


def _checked_dtype(dtype: DTypeLike | None) -> np.dtype[Any] | None:
    """The dtype of a sum, which must be one of floats; None stays."""
    if dtype is None:
        return None
    if not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
        raise TypeError(f"sum_dtype must be a dtype of floats or None, got {dtype!r}")
    return np.dtype(jnp.dtype(dtype))


def _sum_dtype(wanted: DTypeLike | None, dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(jnp.promote_types(jnp.float32, dtype) if wanted is None else jnp.dtype(wanted))
