"""The router: scores, choice of experts, weights, statistics. Pure jax.numpy; knows nothing of experts or sorting.

Everything here runs in float32 whatever the dtype of the logits, on the device, with static shapes. A token of padding
and a token whose logits are NaN never change what other tokens get; see `route`.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_ggemm.collectives import sum_over
from jax_ggemm.take_chosen import take_chosen

__all__ = ["Renormalize", "Router", "Routing", "RoutingStats", "identity", "load_balance_loss", "normalized_sigmoid"]
__all__ += ["renormalize", "route", "routing_stats", "update_selection_bias"]


def identity(values: jax.Array) -> jax.Array:
    """Returns its argument: as `score`, choose on the logits; as `weigh`, do not renormalise."""
    return values


@dataclasses.dataclass(frozen=True)
class Renormalize:
    """s / (sum(s) + eps). eps (1e-20 in DeepSeek-V3 and GLM-4) keeps a token finite whose chosen scores underflow."""

    eps: float = 1e-20

    def __call__(self, chosen: jax.Array) -> jax.Array:
        """Returns the weights of the chosen scores, along the last axis."""
        # Of the size of the sum, so that its square, which the gradient divides by, does not underflow.
        unit = lax.stop_gradient(jnp.sum(chosen, axis=-1, keepdims=True) + self.eps)
        scaled = chosen / unit
        return scaled / (jnp.sum(scaled, axis=-1, keepdims=True) + self.eps / unit)


renormalize = Renormalize()


def as_int(name: str, value: Any) -> int:
    """The value as an int; NumPy's integers will do, but bool will not, for which it raises TypeError."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{name} must be an int, got {value!r}")


def normalized_sigmoid(logits: jax.Array) -> jax.Array:
    """Sigmoid scores that sum to one over the experts: the probabilities in DeepSeek-V3's balance loss (eq. 19)."""
    return renormalize(jax.nn.sigmoid(logits))


@dataclasses.dataclass(frozen=True)
class Router:
    """How logits become experts and weights.

    ==============================  ==========================================================================
    model                           router
    ==============================  ==========================================================================
    Qwen3                           `Router(8)`
    Qwen3, norm_topk_prob=False     `Router(8, weigh=identity)`
    Mixtral                         `Router(2, score=identity, weigh=jax.nn.softmax)`
    gpt-oss                         `Router(4, score=identity, weigh=jax.nn.softmax)`
    DeepSeek-V3 (+ selection bias)  `Router(8, score=jax.nn.sigmoid, num_groups=8, top_groups=4, scale=2.5,
                                    probabilities=normalized_sigmoid)`
    GLM-4.5 (+ selection bias)      `Router(8, score=jax.nn.sigmoid, scale=2.5)`
    DeepSeek-V4 (+ selection bias)  `Router(6, score=lambda x: jnp.sqrt(jax.nn.softplus(x)), scale=1.5)`
    ==============================  ==========================================================================

    `from jax_ggemm.routing import Router, identity, normalized_sigmoid` has the names above.

    Attributes:
      top_k: experts per token.
      score: logits (T, E) to scores (T, E), both float32, before the choice.
      weigh: the scores of the chosen experts, (T, top_k), to their weights.
      num_groups: equal groups of adjacent experts for a group-limited choice; 1 for none.
      top_groups: groups that a token may choose from: those with the best sum of their `group_best` best scores.
      group_best: 2 in DeepSeek-V3, 1 in DeepSeek-V2.
      scale: factor on the weights ("routed scaling factor").
      probabilities: logits to those of the load-balancing loss; `normalized_sigmoid` in DeepSeek-V3.
    """

    top_k: int
    score: Callable[[jax.Array], jax.Array] = jax.nn.softmax
    weigh: Callable[[jax.Array], jax.Array] = renormalize
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 2
    scale: float = 1.0
    probabilities: Callable[[jax.Array], jax.Array] = jax.nn.softmax

    def __post_init__(self) -> None:
        for name in ("top_k", "num_groups", "top_groups", "group_best"):
            value = as_int(name, getattr(self, name))
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
            object.__setattr__(self, name, value)
        for name in ("score", "weigh", "probabilities"):
            if not callable(getattr(self, name)):
                raise TypeError(f"{name} must be a function, e.g. jax.nn.softmax; got {getattr(self, name)!r}")
        if self.top_groups > self.num_groups:
            raise ValueError(f"top_groups must be at most num_groups={self.num_groups}, got {self.top_groups}")

    def check(self, num_experts: int) -> None:
        """Raises ValueError unless the groups divide `num_experts` and offer a token at least `top_k` of them."""
        if num_experts % self.num_groups:
            raise ValueError(f"num_groups must divide the {num_experts} experts, got {self.num_groups}")
        offered = num_experts // self.num_groups * self.top_groups
        if self.top_k > offered:
            raise ValueError(
                f"top_k must be at most {offered} with {num_experts} experts and {self.top_groups} of"
                f" {self.num_groups} groups, got {self.top_k}"
            )


class Routing(NamedTuple):
    """`route`'s result: (T, top_k) int32 ids, best first, and float32 weights; E ("no expert") and 0 for padding."""

    ids: jax.Array
    weights: jax.Array


class RoutingStats(NamedTuple):
    """`routing_stats`'s result; tokens of padding are in none of it.

    Attributes:
      counts: (E,) int32, the choices that fell on each expert.
      num_tokens: () int32, the tokens that count.
      mean_probabilities: (E,) float32, the mean of the router's probabilities over these tokens.
      load_balance_loss: () float32, see `load_balance_loss`.
      z_loss: () float32, the mean over tokens of logsumexp(logits)^2 (ST-MoE, arXiv:2202.08906, eq. 5).
      dropped: () int32, the choices that a buffer had no room for: 0 but for `AllToAll` with a buffer factor.
    """

    counts: jax.Array
    num_tokens: jax.Array
    mean_probabilities: jax.Array
    load_balance_loss: jax.Array
    z_loss: jax.Array
    dropped: jax.Array


def route(
    logits: jax.Array,
    router: Router,
    *,
    selection_bias: jax.Array | None = None,
    token_mask: jax.Array | None = None,
) -> Routing:
    """Chooses the experts of each token and weighs them.

    Of equal scores the lower expert index wins. A token with a NaN score gets valid ids (the lowest) and NaN as each
    weight: the fault stays visible in this token's output and reaches no other token's.

    Args:
      logits: (T, E) floating array; float32 is what routers are trained in.
      router: the rule.
      selection_bias: (E,), added to the scores for the choice alone; the weights come from the unbiased scores. It
        gets no gradient (DeepSeek-V3, arXiv:2412.19437, eq. 16).
      token_mask: (T,) bool, False for a token of padding.

    Returns:
      The ids and weights.

    Raises:
      TypeError: for a wrong dtype or rank, or sizes that do not fit.
      ValueError: if the router does not fit the number of experts.
    """
    logits = _check_logits(logits, token_mask)
    num_experts = logits.shape[1]
    router.check(num_experts)
    if selection_bias is not None and selection_bias.shape != (num_experts,):
        raise TypeError(
            f"selection_bias must have shape ({num_experts},), one value an expert, got {selection_bias.shape}"
        )

    scores = router.score(_visible(logits, token_mask))
    if scores.shape != logits.shape:
        raise TypeError(f"router.score must return shape {logits.shape}, got {scores.shape}")
    choice = lax.stop_gradient(scores)
    if selection_bias is not None:
        choice = choice + lax.stop_gradient(selection_bias).astype(choice.dtype)
    # top_k orders NaN by its sign bit and -0.0 below 0.0: neither may decide which expert is chosen.
    broken = jnp.any(jnp.isnan(choice), axis=1, keepdims=True)
    choice = jnp.where(broken | (choice == 0), 0.0, choice)
    if router.top_groups < router.num_groups:
        choice = _limit_groups(choice, router)
    ids = lax.top_k(choice, router.top_k)[1].astype(jnp.int32)

    weights = router.weigh(take_chosen(scores, ids)) * router.scale
    weights = jnp.where(broken, jnp.nan, weights)
    if token_mask is not None:
        ids = jnp.where(token_mask[:, None], ids, num_experts)
        weights = jnp.where(token_mask[:, None], weights, 0.0)
    return Routing(ids, weights)


def routing_stats(
    logits: jax.Array,
    counts: jax.Array,
    router: Router,
    *,
    token_mask: jax.Array | None = None,
    axes: tuple[str, ...] = (),
) -> RoutingStats:
    """Computes what training wants to know of a routing, in float32.

    Args:
      logits: (T, E) floating array, as given to `route`.
      counts: (E,) int32, the choices that fell on each expert: `permute.sort_by_expert(ids, E).group_sizes`.
      router: the rule; its `probabilities` count here.
      token_mask: (T,) bool, False for a token of padding.
      axes: inside `jax.shard_map`, the mesh axes that tokens are split over; counts are those of all ranks.

    Returns:
      The statistics. Gradients reach the logits through `mean_probabilities` and both losses.

    Raises:
      TypeError: for a wrong dtype or rank, or sizes that do not fit.
    """
    logits = _check_logits(logits, token_mask)
    if counts.shape != logits.shape[1:]:
        raise TypeError(f"counts must have shape {logits.shape[1:]}, one value an expert, got {counts.shape}")
    visible = _visible(logits, token_mask)
    probabilities = router.probabilities(visible)
    squares = jax.nn.logsumexp(visible, axis=1) ** 2
    mask = jnp.ones(squares.shape, bool) if token_mask is None else token_mask
    num_tokens = sum_over(jnp.sum(mask, dtype=jnp.int32), axes)
    share = 1.0 / jnp.maximum(num_tokens, 1).astype(visible.dtype)
    mean_probabilities = sum_over(jnp.sum(jnp.where(mask[:, None], probabilities, 0.0), axis=0), axes) * share
    z_loss = sum_over(jnp.sum(jnp.where(mask, squares, 0.0)), axes) * share
    balance = load_balance_loss(counts, mean_probabilities)
    return RoutingStats(counts, num_tokens, mean_probabilities, balance, z_loss, jnp.zeros((), jnp.int32))


def load_balance_loss(counts: jax.Array, mean_probabilities: jax.Array) -> jax.Array:
    """E * sum_e f_e P_e: 1 for a balanced router, up to E for one that always chooses the same expert.

    Over several devices call it with the sum of their counts and the token-weighted mean of their probabilities.

    Args:
      counts: (E,) integers; f_e is the share of expert e in their sum, which is tokens * top_k.
      mean_probabilities: (E,) floating, P_e.

    Returns:
      () float32. The form is Switch Transformer's (arXiv:2101.03961, eq. 4), with f over all top_k choices.
    """
    counts = lax.stop_gradient(counts).astype(mean_probabilities.dtype)
    share = counts / jnp.maximum(jnp.sum(counts), 1.0)
    return counts.shape[0] * jnp.sum(share * mean_probabilities)


def update_selection_bias(bias: jax.Array, counts: jax.Array, rate: float | jax.Array) -> jax.Array:
    """Raises the selection bias of experts with less than the mean load and lowers the others' (DeepSeek-V3).

    Args:
      bias: (E,) floating.
      counts: (E,) integers, choices per expert over the whole batch: sum them over data-parallel devices first.
      rate: the step; 0.001 in DeepSeek-V3 (arXiv:2412.19437, section 4.2).

    Returns:
      (E,): bias + rate * sign(mean(counts) - counts), in the dtype of `bias`.

    Raises:
      TypeError: if the shapes differ.
    """
    if bias.ndim != 1 or bias.shape != counts.shape:
        raise TypeError(f"bias and counts must have one shape (E,), got {bias.shape} and {counts.shape}")
    load = counts.astype(jnp.float32)
    step = rate * jnp.sign(jnp.mean(load) - load)
    return (bias + step.astype(bias.dtype)).astype(bias.dtype)


def _limit_groups(choice: jax.Array, router: Router) -> jax.Array:
    """Puts -inf on the experts outside each token's best groups. Zero would not do: biased scores may be negative."""
    tokens, num_experts = choice.shape
    groups = choice.reshape(tokens, router.num_groups, num_experts // router.num_groups)
    best = lax.top_k(groups, min(router.group_best, groups.shape[2]))[0]
    chosen = lax.top_k(jnp.sum(best, axis=2), router.top_groups)[1]
    allowed = jnp.any(chosen[:, :, None] == jnp.arange(router.num_groups, dtype=chosen.dtype), axis=1)
    return jnp.where(allowed[:, :, None], groups, -jnp.inf).reshape(tokens, num_experts)


def _visible(logits: jax.Array, token_mask: jax.Array | None) -> jax.Array:
    """Logits in float32 (float64 stays), 0 for padding so that its content reaches neither values nor gradients."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    return logits if token_mask is None else jnp.where(token_mask[:, None], logits, 0.0)


def _check_logits(logits: jax.Array, token_mask: jax.Array | None) -> jax.Array:
    logits = jnp.asarray(logits)
    if logits.ndim != 2:
        raise TypeError(f"logits must have shape (tokens, experts), got {logits.shape}")
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise TypeError(f"logits must be floating, got {logits.dtype}")
    if token_mask is not None and token_mask.dtype != jnp.bool_:
        raise TypeError(f"token_mask must be bool, got {token_mask.dtype}")
    if token_mask is not None and token_mask.shape != logits.shape[:1]:
        raise TypeError(f"token_mask must have shape {logits.shape[:1]}, one value a token, got {token_mask.shape}")
    return logits
