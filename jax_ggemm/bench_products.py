"""Times the three products on a table of shapes: ours beside others, and beside what the machine reaches at most."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_ggemm import accuracy
from jax_ggemm.api import ragged_dot
from jax_ggemm.benchmark import DENSE, LAX, RaggedDot, markdown
from jax_ggemm.device_time import measure
from jax_ggemm.products import Product
from jax_ggemm.roofline import Rates
from jax_ggemm.shapes import GroupedShape, work

OURS = "jax_ggemm"
TOKAMAX = "tokamax"
NAMES = (OURS, LAX, TOKAMAX, DENSE)
"""What can be timed."""

PASSES = {Product.FORWARD: "forward", Product.DLHS: "dX", Product.DRHS: "dW"}
"""A product by the gradient that it is."""


@dataclasses.dataclass(frozen=True)
class Result:
    """One product of one implementation on one shape.

    Attributes:
      shape: the name of the shape.
      product: "forward", "dX" or "dW".
      candidate: the name of the implementation.
      microseconds: the median time on the device; None where it failed.
      spread: of the samples, relative to the median.
      roofline: the least time that the measured rates allow, over the time.
      error: the largest error of a row, relative to its root mean square; None where it was not looked at.
      dense_error: the same of a dense product of the same rows.
      failure: what went wrong, or None.
    """

    shape: str
    product: str
    candidate: str
    microseconds: float | None = None
    spread: float | None = None
    roofline: float | None = None
    error: float | None = None
    dense_error: float | None = None
    failure: str | None = None


def implementations(names: Collection[str]) -> dict[str, RaggedDot]:
    """The grouped products of these names that are installed.

    Args:
      names: from `NAMES`.

    Returns:
      Functions of lhs, rhs and group sizes. The dense product is not among them.
    """
    found: dict[str, RaggedDot] = {OURS: ragged_dot, LAX: jax.lax.ragged_dot}
    if TOKAMAX in names and importlib.util.find_spec("tokamax") is not None:
        import tokamax  # noqa: PLC0415 - large, and rarely there

        found[TOKAMAX] = functools.partial(tokamax.ragged_dot, implementation="mosaic_gpu")
    return {name: function for name, function in found.items() if name in names}


def program(product: Product, function: RaggedDot, shape: GroupedShape) -> Callable[..., jax.Array]:
    """The function of (lhs, rhs, group_sizes) that is one product of a `ragged_dot`, as its gradients need it.

    Args:
      product: which one; lhs and rhs are its operands, as `Product` has them.
      function: the grouped product with its gradients.
      shape: of the problem.

    Returns:
      A function that JAX can trace; what the gradients do not need of the forward pass is dead code in it.
    """
    match product:
        case Product.FORWARD:
            return function
        case Product.DLHS:

            def d_lhs(cotangent: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
                primal = jnp.zeros((shape.m, shape.k), rhs.dtype)
                return jax.vjp(lambda lhs: function(lhs, rhs, sizes), primal)[1](cotangent)[0]

            return d_lhs
        case Product.DRHS:

            def d_rhs(lhs: jax.Array, cotangent: jax.Array, sizes: jax.Array) -> jax.Array:
                primal = jnp.zeros((shape.groups, shape.k, shape.n), lhs.dtype)
                return jax.vjp(lambda rhs: function(lhs, rhs, sizes), primal)[1](cotangent)[0]

            return d_rhs


def operands(product: Product, shape: GroupedShape, dtype: Any, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    """Normally distributed lhs and rhs of a product; weights of the size that keeps the result's near 1."""
    keys = jax.random.split(jax.random.key(seed), 3)
    lhs = functools.partial(jax.random.normal, keys[0], (shape.m, shape.k), dtype)
    cotangent = functools.partial(jax.random.normal, keys[2], (shape.m, shape.n), dtype)
    if product is Product.DRHS:
        return lhs(), cotangent()
    weights = _weights(keys[1], shape, jnp.dtype(dtype))
    return (lhs() if product is Product.FORWARD else cotangent()), weights


@functools.partial(jax.jit, static_argnums=(1, 2))
def _weights(key: jax.Array, shape: GroupedShape, dtype: Any) -> jax.Array:
    return jax.random.normal(key, (shape.groups, shape.k, shape.n), dtype) * jnp.asarray(shape.k**-0.5, dtype)


def run(
    shapes: Sequence[GroupedShape], names: Collection[str], dtype: str, rates: Rates, budget: float
) -> Iterator[Result]:
    """Times every implementation on every product of every shape.

    Args:
      shapes: the shapes.
      names: of the implementations, from `NAMES`.
      dtype: of operands and results.
      rates: of this machine.
      budget: seconds after which nothing but `OURS` is timed any more.

    Yields:
      The results as they are measured, shape by shape.
    """
    start = time.perf_counter()
    for shape in shapes:
        sizes = jnp.asarray(shape.group_sizes, jnp.int32)
        for product in Product:
            lhs, rhs = operands(product, shape, dtype)
            itemsize = jnp.dtype(dtype).itemsize
            least = rates.least_seconds(work(shape, product, itemsize))
            for name, function in implementations(names).items():
                if name != OURS and time.perf_counter() - start > budget:
                    continue
                timed = _time(program(product, function, shape), (lhs, rhs, sizes), least)
                if name == OURS and timed.get("failure") is None:
                    result = jax.jit(program(product, function, shape))(lhs, rhs, sizes)
                    found = accuracy.errors(shape, product, (lhs, rhs), result)
                    timed |= {"error": found.grouped, "dense_error": found.dense}
                    del result
                yield Result(shape.name, PASSES[product], name, **timed)
            if product is Product.FORWARD and DENSE in names:
                yield Result(shape.name, PASSES[product], DENSE, **_time(jnp.dot, (lhs, rhs[0]), least))
            del lhs, rhs


def _time(function: Callable[..., Any], arguments: tuple[jax.Array, ...], least: float) -> dict[str, Any]:
    try:
        timed = measure(function, *arguments)
    except Exception as error:  # a peer's failure is a result, and must not take the others' with it
        print(f"failed: {error}", file=sys.stderr)
        return {"failure": f"{type(error).__name__}: {str(error)[:300]}"}
    return {
        "microseconds": timed.microseconds,
        "spread": timed.spread,
        "roofline": least / timed.seconds,
    }


def table(results: Sequence[Result]) -> str:
    """The results as a Markdown table: a line per shape and product, a column per implementation, in microseconds."""
    by_place: dict[tuple[str, str], dict[str, Result]] = {}
    for result in results:
        by_place.setdefault((result.shape, result.product), {})[result.candidate] = result
    names = [name for name in NAMES if any(name in found for found in by_place.values())]
    rows = [("shape", "product", *(f"{name}, us" for name in names), "of roofline", "error", "dense product's error")]
    for (shape, product), found in by_place.items():
        ours = found.get(OURS, Result(shape, product, OURS))
        rows.append(
            (
                shape,
                product,
                *(_number(found[name].microseconds if name in found else None, ".0f") for name in names),
                _number(ours.roofline, ".2f"),
                _number(ours.error, ".1e"),
                _number(ours.dense_error, ".1e"),
            )
        )
    return markdown(rows)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
