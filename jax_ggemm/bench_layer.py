"""Times a whole Mixture-of-Experts layer and its parts: how much of it is routing, permuting and combining."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_ggemm import bench_products
from jax_ggemm.benchmark import LAX, markdown
from jax_ggemm.device_state import State
from jax_ggemm.device_time import measure
from jax_ggemm.experts import ExpertOptions, experts
from jax_ggemm.layouts import ExpertParams
from jax_ggemm.moe_layer import MoEOptions, MoEParams, moe
from jax_ggemm.permute import combine, dispatch, sort_by_expert
from jax_ggemm.routing import Router, route

LAYER = "layer"
ROUTING, PERMUTE, EXPERTS, COMBINE = "routing", "permute", "experts", "combine"
PASSES = ("forward", "forward+gradients")

_CALLS = 4
"""In one program: a layer is long, and so is the compilation of many."""


@dataclasses.dataclass(frozen=True)
class LayerShape:
    """A layer: tokens of `width` features, each to `top_k` of `num_experts` experts of `hidden` features."""

    name: str
    tokens: int
    width: int
    hidden: int
    num_experts: int
    top_k: int


TABLE = (
    LayerShape("qwen30_layer_4k", 4096, 2048, 768, 128, 8),
    LayerShape("glm_layer_m64", 64, 6144, 2048, 32, 8),
    LayerShape("glm_layer_m1024", 1024, 6144, 2048, 32, 8),
)
"""The layers of the products' table whose models are trained or served with them."""

BY_NAME = {shape.name: shape for shape in TABLE}


@dataclasses.dataclass(frozen=True)
class Result:
    """A part of a layer.

    Attributes:
      layer: the name of the layer.
      candidate: the grouped product that its experts take.
      part: "layer", "routing" (logits, choice and sort), "permute", "experts" or "combine".
      seconds_of: "forward" or "forward+gradients".
      microseconds: the median time on the device, of the part alone.
    """

    layer: str
    candidate: str
    part: str
    seconds_of: str
    microseconds: float


def with_gradients(function: Callable[..., Any], differentiable: int) -> Callable[..., Any]:
    """A function's result and its gradients in the first arguments.

    Args:
      function: of any arguments; its result is floating.
      differentiable: how many arguments have gradients.

    Returns:
      A function of the cotangent of the result, and the arguments.
    """

    def run(cotangent: Any, *arguments: Any) -> Any:
        fixed = arguments[differentiable:]
        result, pull_back = jax.vjp(lambda *some: function(*some, *fixed), *arguments[:differentiable])
        return result, pull_back(cotangent)

    return run


def run(shapes: Sequence[LayerShape], names: Collection[str], dtype: str, state: State) -> Iterator[Result]:
    """Times layers, with each grouped product.

    Args:
      shapes: the layers.
      names: of the grouped products, from `bench_products.NAMES`; peers are timed as a whole layer only.
      dtype: of tokens and experts; the router is float32.
      state: that the device is brought into for each time.

    Yields:
      The results.
    """
    products = bench_products.implementations(set(names) & {bench_products.OURS, LAX})
    for shape in shapes:
        x, params = _inputs(shape, dtype)
        for name, product in products.items():
            options = MoEOptions(Router(top_k=shape.top_k), ExpertOptions(ragged_dot=_like_ours(product)))
            parts = {LAYER: (lambda x, params, options=options: moe(x, params, options)[0], (x, params), 2)}
            if name == bench_products.OURS:
                parts |= _parts(shape, x, params, options)
            for part, (function, arguments, differentiable) in parts.items():
                forward = measure(function, *arguments, state=state, calls=_CALLS)
                yield Result(shape.name, name, part, PASSES[0], forward.microseconds)
                out = jax.eval_shape(function, *arguments)
                cotangent = jax.random.normal(jax.random.key(1), out.shape, out.dtype)
                backward = with_gradients(function, differentiable)
                both = measure(backward, cotangent, *arguments, state=state, calls=_CALLS)
                yield Result(shape.name, name, part, PASSES[1], both.microseconds)


def _inputs(shape: LayerShape, dtype: str) -> tuple[jax.Array, MoEParams]:
    keys = jax.random.split(jax.random.key(0), 4)

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def normal(key: jax.Array, extents: tuple[int, ...], kind: str) -> jax.Array:
        return (jax.random.normal(key, extents, kind) * extents[-2] ** -0.5).astype(kind)

    weights = ExpertParams(
        normal(keys[0], (shape.num_experts, shape.width, 2 * shape.hidden), dtype),
        normal(keys[1], (shape.num_experts, shape.hidden, shape.width), dtype),
    )
    router = normal(keys[2], (shape.width, shape.num_experts), "float32")
    return jax.random.normal(keys[3], (shape.tokens, shape.width), dtype), MoEParams(router, weights)


def _parts(shape: LayerShape, x: jax.Array, params: MoEParams, options: MoEOptions) -> dict[str, Any]:
    """(function, arguments, how many have gradients) by part, as `moe` composes them."""

    def weigh(x: jax.Array, router: jax.Array) -> tuple[jax.Array, Any]:
        logits = jnp.dot(x.astype(jnp.float32), router, precision=jax.lax.Precision.HIGHEST)
        routing = route(logits, options.router)
        return routing.weights, sort_by_expert(routing.ids, shape.num_experts)

    weights, permutation = jax.jit(weigh)(x, params.router)
    rows = jax.jit(dispatch)(x, permutation)
    return {
        # The permutation is a result too: it must not be dead code. Times zero, it has no say in the value.
        ROUTING: (lambda x, router: _joined(*weigh(x, router)), (x, params.router), 2),
        PERMUTE: (dispatch, (x, permutation), 1),
        EXPERTS: (
            lambda rows, weights, sizes: experts(rows, sizes, weights, options.experts),
            (rows, params.experts, permutation.group_sizes),
            2,
        ),
        COMBINE: (combine, (rows, weights, permutation), 2),
    }


def _joined(weights: jax.Array, permutation: Any) -> jax.Array:
    used = permutation.inverse + permutation.order.reshape(permutation.inverse.shape) + permutation.group_sizes[0]
    return weights + jax.lax.stop_gradient(used.astype(weights.dtype) * 0)


def _like_ours(product: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A grouped product that takes what `ExpertOptions.ragged_dot` is called with."""

    def ragged_dot(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, **_unused: Any) -> jax.Array:
        return product(lhs, rhs, sizes)

    return ragged_dot


def share_beside_experts(results: Sequence[Result]) -> dict[tuple[str, str], float]:
    """(routing + permute + combine) over the whole layer, by layer and pass, with our grouped product."""
    ours = {(r.layer, r.seconds_of, r.part): r.microseconds for r in results if r.candidate == bench_products.OURS}
    return {
        (layer, name): sum(ours[layer, name, part] for part in (ROUTING, PERMUTE, COMBINE)) / ours[layer, name, LAYER]
        for layer, name, part in ours
        if part == LAYER
    }


def table(results: Sequence[Result]) -> str:
    """The results as a Markdown table, in microseconds and as a share of the layer."""
    whole = {(r.layer, r.candidate, r.seconds_of): r.microseconds for r in results if r.part == LAYER}
    rows = [("layer", "grouped product", "pass", "part", "us", "of the layer")]
    rows += [
        (
            r.layer,
            r.candidate,
            r.seconds_of,
            r.part,
            f"{r.microseconds:.0f}",
            f"{r.microseconds / whole[r.layer, r.candidate, r.seconds_of]:.2f}",
        )
        for r in results
    ]
    rows += [
        (layer, bench_products.OURS, name, "routing + permute + combine", "", f"{share:.2f}")
        for (layer, name), share in share_beside_experts(results).items()
    ]
    return markdown(rows)
