"""What the exchanges of expert parallelism send, as formulas; docs/expert_parallel.md explains them.

Bytes are what one rank sends to others for one layer, as ring algorithms send it. Left out are the router's own
all-reduces (two of E values), and the one of a number that tells the rounds of `AllToAll`. Balanced routing: each of a
token's k choices is on any rank with equal chance.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_ggemm.exchanges import AllToAll, Exchange, Gather, Replicated, Ring, ranks_per_token

__all__ = ["Cost", "LayerSizes", "cost"]

_FLOAT32 = 4


@dataclasses.dataclass(frozen=True)
class LayerSizes:
    """The sizes that decide what an exchange costs.

    Attributes:
      tokens: T, of one rank.
      features: D.
      top_k: k.
      ranks: P, of the expert axis.
      experts_per_rank: E / P.
      itemsize: bytes of an activation.
      skew: the rows of the busiest rank over the mean.
    """

    tokens: int
    features: int
    top_k: int
    ranks: int
    experts_per_rank: int
    itemsize: int = 2
    skew: float = 1.0


class Cost(NamedTuple):
    """What an exchange costs one rank in one layer.

    Attributes:
      forward: bytes sent in the forward pass.
      backward: bytes sent in the backward pass.
      messages: to other ranks, in both passes together.
      token_rows: rows of D values that tokens from other ranks take in memory.
      expert_rows: rows of D and of the experts' width that the products take.
    """

    forward: float
    backward: float
    messages: int
    token_rows: int
    expert_rows: int


def cost(exchange: Exchange, sizes: LayerSizes) -> Cost:
    """The cost of an exchange.

    Args:
      exchange: one of `jax_ggemm.exchanges`.
      sizes: of the layer.

    Raises:
      TypeError: for another exchange.
    """
    tokens, ranks, k = sizes.tokens, sizes.ranks, sizes.top_k
    others = ranks - 1
    x = sizes.features * sizes.itemsize
    routing = 2 * k * _FLOAT32  # ids and weights
    slots = min(k, sizes.experts_per_rank)
    match exchange:
        case AllToAll():
            chunk = exchange.chunk_rows(tokens, k, ranks)
            at_once = exchange.round_rows(tokens, k, ranks)
            fullest = min(chunk, sizes.skew * tokens * ranks_per_token(k, ranks) / ranks)
            rounds = max(1, math.ceil(fullest / at_once))
            rows = others * rounds * at_once
            return Cost(
                forward=rows * (2 * x + routing) + others * _FLOAT32,
                backward=rows * (2 * x + routing),
                messages=(6 * rounds + 1) * others,
                token_rows=ranks * chunk,
                expert_rows=exchange.expert_rows(tokens, k, ranks, sizes.experts_per_rank),
            )
        case Gather():
            total = sizes.features * _sum_size(exchange.sum_dtype, sizes)
            return Cost(
                forward=others * tokens * (x + routing + total),
                backward=others * tokens * (x + total + k * _FLOAT32),
                messages=7 * others,
                token_rows=ranks * tokens,
                expert_rows=ranks * tokens * slots,
            )
        case Ring():
            total = ranks * sizes.features * _sum_size(exchange.sum_dtype, sizes)
            return Cost(
                forward=tokens * (others * (x + routing) + total),
                backward=tokens * (others * (x + k * _FLOAT32) + total),
                messages=7 * others + 2,
                token_rows=ranks * tokens,
                expert_rows=tokens * slots,
            )
        case Replicated():
            reduced = 2 * others / ranks * tokens * _FLOAT32
            return Cost(
                forward=reduced * sizes.features,
                backward=reduced * (sizes.features + k),
                messages=6 * others,
                token_rows=0,
                expert_rows=tokens * slots,
            )
    raise TypeError(f"the cost of {exchange!r} is not known")


def _sum_size(dtype: DTypeLike | None, sizes: LayerSizes) -> int:
    """Bytes of a value in a sum over ranks."""
    return max(_FLOAT32, sizes.itemsize) if dtype is None else jnp.dtype(dtype).itemsize
