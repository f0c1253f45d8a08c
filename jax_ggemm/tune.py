"""Measures every configuration of the GPU kernels on a shape, and keeps the best: `python -m jax_ggemm tune`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ggemm import accuracy, bench_products, cute, tuned
from jax_ggemm.benchmark import environment, markdown
from jax_ggemm.device_state import State
from jax_ggemm.device_time import measure, state_here
from jax_ggemm.products import Call, Operands, Product
from jax_ggemm.shapes import GroupedShape, operand_shapes

_WRONG = 2.0
"""Times the error of a dense product: a configuration beyond it is broken, however fast it is."""


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What tuning one product of one shape gave.

    Attributes:
      problem: what was tuned.
      shape: the name of the shape.
      microseconds: by configuration, best first.
      picked: the configuration that would be taken untuned.
      left_out: why a configuration was not measured, by configuration.
    """

    problem: tuned.Problem
    shape: str
    microseconds: dict[Any, float]
    picked: Any
    left_out: dict[Any, str]


def problem_of(shape: GroupedShape, product: Product, dtype: np.dtype) -> tuned.Problem:
    """The problem that a call on a shape looks up."""
    return tuned.Problem(product, dtype, dtype, shape.m, shape.k, shape.n, shape.groups)


def run(shapes: Sequence[GroupedShape], products: Sequence[Product], dtype: str) -> Iterator[Tuned]:
    """Tunes products of shapes, and stores what is best.

    Args:
      shapes: with the group sizes to tune for.
      products: which products.
      dtype: of operands and result.

    Yields:
      What was measured, product by product, after it is stored.

    Raises:
      NotImplementedError: where no kernel runs on this machine, or none takes the shape.
    """
    kind, known = tuned.device_kind(), cute.architecture()
    for shape in shapes:
        sizes = jnp.asarray(shape.group_sizes, jnp.int32)
        for product in products:
            problem = problem_of(shape, product, np.dtype(jnp.dtype(dtype)))
            call = Call(product, problem.out_dtype, shape.groups, None, "cute")
            _check(call, problem, sizes)
            assert kind is not None
            operands = bench_products.operands(product, shape, dtype)
            times, left_out = {}, {}
            for candidate in known.candidates(product):
                try:
                    times[candidate] = _time(_with(candidate, call), shape, product, (*operands, sizes))
                except Exception as error:  # one configuration that fails must not take the others with it
                    left_out[candidate] = f"{type(error).__name__}: {str(error)[:200]}"
            if not times:
                raise NotImplementedError(f"no configuration runs {product.value} of {shape}: {left_out}")
            ordered = dict(sorted(times.items(), key=lambda item: item[1]))
            about = {
                "microseconds": [[dataclasses.asdict(c), time] for c, time in ordered.items()],
                "group_sizes": list(shape.group_sizes),
                "environment": environment(),
                "state": state_here(State.STEADY),
            }
            tuned.store(problem, kind, next(iter(ordered)), about)
            picked = known.pick(product, shape.m, shape.k, shape.n, shape.groups)
            yield Tuned(problem, shape.name, ordered, picked, left_out)


def _check(call: Call, problem: tuned.Problem, sizes: jax.Array) -> None:
    extents = operand_shapes(problem.product, problem.m, problem.k, problem.n, problem.groups)
    lhs, rhs = (jax.ShapeDtypeStruct(shape, problem.in_dtype) for shape in extents)
    operands: Any = Operands(lhs, rhs, sizes, jnp.int32(0))  # type: ignore[arg-type]  # only types are read
    reason = cute.unsupported(call, operands)
    if reason is not None:
        raise NotImplementedError(f"tuning measures the GPU kernels, which cannot take this: {reason}")


def _with(candidate: Any, call: Call) -> Callable[..., jax.Array]:
    def product(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        with tuned.forced(candidate):
            return cute.grouped_product(call, Operands(lhs, rhs, sizes, jnp.int32(0)))

    return product


def _time(
    function: Callable[..., jax.Array], shape: GroupedShape, product: Product, operands: tuple[jax.Array, ...]
) -> float:
    """Microseconds of one configuration, whose result is looked at first."""
    result = jax.jit(function)(*operands)
    found = accuracy.errors(shape, product, (operands[0], operands[1]), result)
    if not found.grouped <= _WRONG * found.dense:
        raise ArithmeticError(f"error {found.grouped:.2e} of a row, and {found.dense:.2e} of a dense product")
    del result
    return measure(function, *operands, state=State.STEADY).microseconds


def table(results: Sequence[Tuned]) -> str:
    """What was found, as a Markdown table."""
    rows = [("shape", "product", "best configuration", "us", "untuned pick, us")]
    for result in results:
        best, time = next(iter(result.microseconds.items()))
        untuned = result.microseconds.get(result.picked)
        rows.append(
            (
                result.shape,
                bench_products.PASSES[result.problem.product],
                ", ".join(f"{name} {value}" for name, value in dataclasses.asdict(best).items()),
                f"{time:.0f}",
                "" if untuned is None else f"{untuned:.0f}",
            )
        )
    return markdown(rows)
