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
from jax_ggemm.device_state import State
from jax_ggemm.device_time import measure
from jax_ggemm.products import Product
from jax_ggemm.roofline import Rates
from jax_ggemm.shapes import GroupedShape, operand_shapes, work

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
      Functions of lhs, rhs and group sizes. The dense product is not among them. Ours is the kernels on a GPU: plain
      JAX is not to stand in for them unseen.
    """
    ours = "cute" if jax.default_backend() == "gpu" else None
    found: dict[str, RaggedDot] = {
        OURS: functools.partial(ragged_dot, implementation=ours),
        LAX: jax.lax.ragged_dot,
    }
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
    lhs, rhs = operand_shapes(product, shape.m, shape.k, shape.n, shape.groups)
    keys = jax.random.split(jax.random.key(seed), 2)
    scale = 1.0 if product is Product.DRHS else shape.k**-0.5
    return jax.random.normal(keys[0], lhs, dtype), _scaled_normal(keys[1], rhs, jnp.dtype(dtype), scale)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _scaled_normal(key: jax.Array, extents: tuple[int, ...], dtype: Any, scale: float) -> jax.Array:
    """In one program: the weights of a shape may have gigabytes, and there is to be one copy."""
    return jax.random.normal(key, extents, dtype) * jnp.asarray(scale, dtype)


def run(
    shapes: Sequence[GroupedShape], names: Collection[str], dtype: str, rates: Rates, budget: float, state: State
) -> Iterator[Result]:
    """Times every implementation on every product of every shape.

    Args:
      shapes: the shapes.
      names: of the implementations, from `NAMES`.
      dtype: of operands and results.
      rates: of this machine.
      budget: seconds after which nothing but `OURS` is timed any more.
      state: that the device is brought into for each time.

    Yields:
      The results as they are measured, shape by shape.
    """
    start = time.perf_counter()
    for shape in shapes:
        sizes = jnp.asarray(shape.group_sizes, jnp.int32)
        for product in Product:
            place = shape.name, PASSES[product]
            try:
                lhs, rhs = operands(product, shape, dtype)
            except Exception as error:  # one shape that does not fit must not take the others with it
                yield Result(*place, OURS, failure=_in_words(error))
                continue
            least = rates.least_seconds(work(shape, product, jnp.dtype(dtype).itemsize))
            for name, function in implementations(names).items():
                if name != OURS and time.perf_counter() - start > budget:
                    continue
                timed = program(product, function, shape)
                found = _attempt(_time, timed, (lhs, rhs, sizes), least, state)
                if name == OURS and "failure" not in found:
                    found |= _attempt(_error, timed, shape, product, (lhs, rhs, sizes))
                yield Result(*place, name, **found)
            if product is Product.FORWARD and DENSE in names:
                yield Result(*place, DENSE, **_attempt(_time, jnp.dot, (lhs, rhs[0]), least, state))
            del lhs, rhs


def _attempt(measure_it: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """What was measured, or its failure: that of a peer, too, is a result."""
    try:
        return measure_it(*arguments)
    except Exception as error:
        return {"failure": _in_words(error)}


def _in_words(error: Exception) -> str:
    print(f"failed: {error}", file=sys.stderr)
    return f"{type(error).__name__}: {str(error)[:300]}"


def _time(function: Callable[..., Any], arrays: tuple[jax.Array, ...], least: float, state: State) -> dict[str, Any]:
    taken = measure(function, *arrays, state=state)
    return {"microseconds": taken.microseconds, "spread": taken.spread, "roofline": least / taken.seconds}


def _error(
    function: Callable[..., Any], shape: GroupedShape, product: Product, arrays: tuple[jax.Array, ...]
) -> dict[str, Any]:
    found = accuracy.errors(shape, product, (arrays[0], arrays[1]), jax.jit(function)(*arrays))
    return {"error": found.grouped, "dense_error": found.dense}


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
