"""The functional MoE layer: route -> dispatch -> experts -> combine. It composes; the mathematics is elsewhere.

Everything runs on the device inside jit with static shapes: T tokens with k experts each are T * k rows, of which the
group sizes (data, not shapes) say which expert has which. Nothing is dropped, and no expert has a capacity.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_ggemm.experts import DEFAULT_OPTIONS, ExpertOptions, SharedParams, experts, shared_expert
from jax_ggemm.layouts import ExpertParams
from jax_ggemm.permute import combine, dispatch, sort_by_expert
from jax_ggemm.routing import Router, RoutingStats, route, routing_stats

__all__ = ["ROWS_NAME", "MoEOptions", "MoEParams", "moe", "moe_experts"]

ROWS_NAME = "moe_rows"
"""`checkpoint_name` of the rows in expert order, (T * k, D)."""


class MoEParams(NamedTuple):
    """The parameters of a layer, a pytree.

    Attributes:
      router: (D, E); used in float32.
      experts: of E experts.
      router_bias: (E,) or None: added to the logits and trained (gpt-oss).
      selection_bias: (E,) or None: added to the scores for the choice alone, without a gradient (DeepSeek-V3).
      shared: of an expert that every token shares, or None.
    """

    router: jax.Array
    experts: ExpertParams
    router_bias: jax.Array | None = None
    selection_bias: jax.Array | None = None
    shared: SharedParams | None = None


@dataclasses.dataclass(frozen=True)
class MoEOptions:
    """How a layer computes: hashable, so that it can be a static argument of jit.

    Attributes:
      router: from logits to experts and weights.
      experts: activation, layout and products.
    """

    router: Router
    experts: ExpertOptions = DEFAULT_OPTIONS


def moe(
    x: jax.Array, params: MoEParams, options: MoEOptions, *, token_mask: jax.Array | None = None
) -> tuple[jax.Array, RoutingStats]:
    """Applies a Mixture-of-Experts layer.

    Args:
      x: (..., D) floating.
      params: the parameters; those of experts and shared expert in the dtype of x.
      options: how.
      token_mask: (...) bool, False for a token of padding: it counts nowhere, its result and its gradient are 0, and
        what it holds (NaN too) reaches nothing.

    Returns:
      (y, stats): y of the shape and dtype of x, and what the router did.

    Raises:
      TypeError: for a wrong dtype or rank, or sizes that do not fit each other.
      ValueError: if the router does not fit the number of experts.
    """
    num_experts, width, _ = params.experts.check(options.experts.layout, "params.experts")
    _check_tokens(x, width)
    for name, value, shape in (
        ("router", params.router, (width, num_experts)),
        ("router_bias", params.router_bias, (num_experts,)),
    ):
        if value is not None and value.shape != shape:
            raise TypeError(f"params.{name} must have shape {shape}, got {value.shape}")
    tokens = x.reshape(math.prod(x.shape[:-1]), width)
    if token_mask is not None:
        if token_mask.shape != x.shape[:-1] or token_mask.dtype != jnp.bool_:
            raise TypeError(
                f"token_mask must be bool of shape {x.shape[:-1]}, got {token_mask.dtype} of shape {token_mask.shape}"
            )
        token_mask = token_mask.reshape(-1)
        # Zeros, not a zero cotangent alone: the gradients of router and shared expert multiply it with these rows.
        tokens = jnp.where(token_mask[:, None], tokens, 0)

    logits = _logits(tokens, params.router, params.router_bias)
    routing = route(logits, options.router, selection_bias=params.selection_bias, token_mask=token_mask)
    y, counts = moe_experts(tokens, routing.ids, routing.weights, params.experts, options.experts)
    stats = routing_stats(logits, counts, options.router, token_mask=token_mask)
    if params.shared is not None:
        shared = shared_expert(tokens, params.shared, options.experts)
        y = (y.astype(shared.dtype) + shared).astype(x.dtype)
        if token_mask is not None:  # an activation need not map 0 to 0
            y = jnp.where(token_mask[:, None], y, 0)
    return y.reshape(x.shape), stats


def moe_experts(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    params: ExpertParams,
    options: ExpertOptions = DEFAULT_OPTIONS,
) -> tuple[jax.Array, jax.Array]:
    """Applies experts that were chosen elsewhere: by a hash, by another router, or on another device.

    Args:
      x: (..., D) floating.
      ids: (..., k) integers. A slot whose id is outside [0, E) has no expert: it adds exactly 0, and its weight's
        gradient is exactly 0.
      weights: (..., k) floating, float32 as a rule.
      params: of E experts, in the dtype of x.
      options: how.

    Returns:
      (y, counts): y of the shape and dtype of x, with the sum over a token's slots in float32; counts (E,) int32, the
      rows of each expert.

    Raises:
      TypeError: for a wrong dtype or rank, or sizes that do not fit each other.
    """
    num_experts, width, _ = params.check(options.layout)
    _check_tokens(x, width)
    for name, value in (("ids", ids), ("weights", weights)):
        if value.ndim != x.ndim or value.shape[:-1] != x.shape[:-1]:
            raise TypeError(f"{name} must have shape {(*x.shape[:-1], 'k')}, got {value.shape}")
    tokens = math.prod(x.shape[:-1])
    permutation = sort_by_expert(ids.reshape(tokens, ids.shape[-1]), num_experts)
    rows = checkpoint_name(dispatch(x.reshape(tokens, width), permutation), ROWS_NAME)
    y = experts(rows, permutation.group_sizes, params, options)
    y = combine(y, weights.reshape(tokens, weights.shape[-1]), permutation)
    return y.reshape(x.shape), permutation.group_sizes


def _logits(tokens: jax.Array, router: jax.Array, bias: jax.Array | None) -> jax.Array:
    """The router's logits in float32. Highest precision: a GPU's default would round the operands to TF32."""
    wide = jnp.promote_types(jnp.float32, tokens.dtype)
    logits = jnp.dot(tokens.astype(wide), router.astype(wide), precision=lax.Precision.HIGHEST)
    return logits if bias is None else logits + bias.astype(wide)


def _check_tokens(x: jax.Array, width: int) -> None:
    if x.ndim < 1 or x.shape[-1] != width:
        raise TypeError(f"x must have shape (..., {width}), as the weights have it, got {x.shape}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"x must be floating, got {x.dtype}")
