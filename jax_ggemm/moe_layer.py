"""The functional MoE layer: route -> dispatch -> experts -> combine. It composes; the mathematics is elsewhere.

Everything runs on the device inside jit with static shapes: T tokens with k experts each are T * k rows, of which the
group sizes (data, not shapes) say which expert has which. On one device nothing is dropped, and no expert has a
capacity; over a mesh neither, unless `expert_parallel.AllToAll` is given a buffer factor.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_ggemm.arguments import as_array, as_int32
from jax_ggemm.exchanges import Tokens
from jax_ggemm.expert_parallel import ExpertParallel, Rank
from jax_ggemm.experts import DEFAULT_OPTIONS, ExpertOptions, SharedParams, check_dtypes, experts, shared_expert
from jax_ggemm.layouts import ExpertParams
from jax_ggemm.permute import combine, dispatch, sort_by_expert
from jax_ggemm.routing import Router, RoutingStats, route, routing_stats

__all__ = ["ROWS_NAME", "MoEOptions", "MoEParams", "moe", "moe_experts"]

ROWS_NAME = "moe_rows"
"""`checkpoint_name` of the rows in expert order, (T * k, D)."""


_Params = TypeVar("_Params", ExpertParams, SharedParams)


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
      parallel: how the layer lies on a mesh; None for one device.
    """

    router: Router
    experts: ExpertOptions = DEFAULT_OPTIONS
    parallel: ExpertParallel | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.router, Router):
            raise TypeError(f"router must be a Router, e.g. Router(top_k=2); got {self.router!r}")
        if not isinstance(self.experts, ExpertOptions):
            raise TypeError(f"experts must be ExpertOptions, e.g. ExpertOptions(swiglu); got {self.experts!r}")
        if not isinstance(self.parallel, ExpertParallel | None):
            raise TypeError(f"parallel must be ExpertParallel, e.g. ExpertParallel('expert'); got {self.parallel!r}")


def moe(
    x: jax.Array, params: MoEParams, options: MoEOptions, *, token_mask: jax.Array | None = None
) -> tuple[jax.Array, RoutingStats]:
    """Applies a Mixture-of-Experts layer.

    Differentiable in reverse mode alone (`jax.grad`, `jax.vjp`, `jax.jacrev`; any order), with `implementation="xla"`
    too; forward mode (`jax.jvp`, `jax.jacfwd`, `jax.hessian`) raises TypeError.

    Args:
      x: (..., D) floating.
      params: the parameters; those of experts and shared expert in the dtype of x.
      options: how.
      token_mask: (...) bool, False for a token of padding: it counts nowhere, its result and its gradient are 0, and
        what it holds (NaN too) reaches nothing.

    Returns:
      (y, stats): y of the shape and dtype of x, and what the router did.

    Raises:
      TypeError: for what is no array, a wrong dtype or rank, or sizes that do not fit each other.
      ValueError: if the router does not fit the number of experts.
      NotImplementedError: for an array that is sharded over an explicit mesh axis.
    """
    if not isinstance(options, MoEOptions):
        raise TypeError(f"options must be MoEOptions, e.g. MoEOptions(Router(top_k=2)); got {options!r}")
    x, params = as_array("x", x), _as_params(params)
    num_experts, width, _ = params.experts.check(options.experts.layout, "params.experts")
    _check_tokens(x, width)
    check_dtypes("params.experts", params.experts, "x", x.dtype)
    if params.shared is not None:
        check_dtypes("params.shared", params.shared, "x", x.dtype)
        params.shared.check(options.experts.layout, width, "params.shared")
    for name, value, shape in (
        ("router", params.router, (width, num_experts)),
        ("router_bias", params.router_bias, (num_experts,)),
        ("selection_bias", params.selection_bias, (num_experts,)),
    ):
        if value is not None and value.shape != shape:
            raise TypeError(f"params.{name} must have shape {shape}, got {value.shape}")
    if token_mask is not None:
        token_mask = as_array("token_mask", token_mask)
        if token_mask.shape != x.shape[:-1] or token_mask.dtype != jnp.bool_:
            raise TypeError(
                f"token_mask must be bool of shape {x.shape[:-1]}, got {token_mask.dtype} of shape {token_mask.shape}"
            )
    if options.parallel is None:
        return _layer(None, x, token_mask, params, options=options)
    y, stats = _on_mesh(x, token_mask, params, options, options.parallel)
    return y, stats


# Compiled whole for callers outside of jit: JAX would compile and run every operation of the `jax.shard_map` by itself.
@functools.partial(jax.jit, static_argnums=(3, 4))
def _on_mesh(
    x: jax.Array, token_mask: jax.Array | None, params: MoEParams, options: MoEOptions, parallel: ExpertParallel
) -> tuple[jax.Array, RoutingStats]:
    """`moe` on checked arrays, over a mesh."""
    layer = functools.partial(_layer, options=options)
    return parallel.apply(layer, options.experts.layout, x, token_mask, params)


def _layer(
    rank: Rank | None, x: jax.Array, token_mask: jax.Array | None, params: MoEParams, *, options: MoEOptions
) -> tuple[jax.Array, RoutingStats]:
    """`moe` on checked arrays: on one device, or on a rank of a mesh with its part of the tokens and weights."""
    tokens = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if token_mask is not None:
        token_mask = token_mask.reshape(-1)
        # Zeros, not a zero cotangent alone: the gradients of router and shared expert multiply it with these rows.
        tokens = jnp.where(token_mask[:, None], tokens, 0)
    shared = params.shared if params.shared is None or rank is None else rank.put_together(params.shared)

    logits = _logits(tokens, params.router, params.router_bias)
    routing = route(logits, options.router, selection_bias=params.selection_bias, token_mask=token_mask)
    if rank is None:
        y, counts = _apply(tokens, routing.ids, routing.weights, params.experts, options.experts)
        stats = routing_stats(logits, counts, options.router, token_mask=token_mask)
    else:
        weights = rank.put_together(params.experts)
        y, counts, dropped = rank.experts(Tokens(tokens, *routing), weights, options.experts, logits.shape[1])
        stats = routing_stats(logits, counts, options.router, token_mask=token_mask, axes=rank.token_axes)
        stats = stats._replace(dropped=dropped)
    if shared is not None:
        more = shared_expert(tokens if rank is None else rank.enter(tokens), shared, options.experts)
        y = y.astype(more.dtype) + more
    y = (y if rank is None else rank.leave(y)).astype(x.dtype)
    if shared is not None and token_mask is not None:  # an activation need not map 0 to 0
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

    Differentiable in reverse mode alone (`jax.grad`, `jax.vjp`, `jax.jacrev`; any order), with `implementation="xla"`
    too; forward mode (`jax.jvp`, `jax.jacfwd`, `jax.hessian`) raises TypeError.

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
      TypeError: for what is no array, a wrong dtype or rank, or sizes that do not fit each other.
      NotImplementedError: for an array that is sharded over an explicit mesh axis.
    """
    if not isinstance(options, ExpertOptions):
        raise TypeError(f"options must be ExpertOptions, e.g. ExpertOptions(swiglu); got {options!r}")
    if not isinstance(params, ExpertParams):
        raise TypeError(f"params must be ExpertParams, got {type(params).__name__}")
    x, ids, weights = as_array("x", x), as_int32("ids", ids), as_array("weights", weights)
    params = _as_arrays("params", params)
    _, width, _ = params.check(options.layout)
    _check_tokens(x, width)
    check_dtypes("params", params, "x", x.dtype)
    if ids.ndim != x.ndim or ids.shape[:-1] != x.shape[:-1]:
        raise TypeError(f"ids must have shape {(*x.shape[:-1], 'k')}, got {ids.shape}")
    if weights.shape != ids.shape:
        raise TypeError(f"weights must have shape {ids.shape}, that of ids, got {weights.shape}")
    if not jnp.issubdtype(weights.dtype, jnp.floating):
        raise TypeError(f"weights must be floating, got {weights.dtype}")
    slots = (math.prod(x.shape[:-1]), ids.shape[-1])
    y, counts = _apply(x.reshape(slots[0], width), ids.reshape(slots), weights.reshape(slots), params, options)
    return y.reshape(x.shape), counts


def _apply(
    tokens: jax.Array, ids: jax.Array, weights: jax.Array, params: ExpertParams, options: ExpertOptions
) -> tuple[jax.Array, jax.Array]:
    """`moe_experts` on checked arrays, with one dimension of tokens."""
    permutation = sort_by_expert(ids, params.gate_up.shape[0])
    rows = checkpoint_name(dispatch(tokens, permutation), ROWS_NAME)
    y = experts(rows, permutation.group_sizes, params, options)
    return combine(y, weights, permutation), permutation.group_sizes


def _as_params(params: MoEParams) -> MoEParams:
    """The parameters as JAX arrays; errors name what is none, or is sharded over an explicit mesh axis."""
    for name, value, kind in (
        ("params", params, MoEParams),
        ("params.experts", getattr(params, "experts", None), ExpertParams),
        ("params.shared", getattr(params, "shared", None), SharedParams | None),
    ):
        if not isinstance(value, kind):
            wanted = getattr(kind, "__name__", "SharedParams or None")
            raise TypeError(f"{name} must be {wanted}, got {type(value).__name__}")
    biases = {
        name: None if value is None else as_array(f"params.{name}", value)
        for name, value in (("router_bias", params.router_bias), ("selection_bias", params.selection_bias))
    }
    shared = None if params.shared is None else _as_arrays("params.shared", params.shared)
    router, weights = as_array("params.router", params.router), _as_arrays("params.experts", params.experts)
    return MoEParams(router, weights, **biases, shared=shared)


def _as_arrays(prefix: str, params: _Params) -> _Params:
    optional = params._field_defaults
    return params._replace(
        **{
            name: as_array(f"{prefix}.{name}", value)
            for name, value in params._asdict().items()
            if value is not None or name not in optional
        }
    )


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
