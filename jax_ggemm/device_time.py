"""Times what a device takes for a function, without what the host takes to call it.

The function is called several times within one compiled program, which runs once and then several times without a wait
in between. What the further runs add to the time, divided by their calls, is the device's time of one: launching the
first program, and waiting for the last, are in both, and the device is as busy as in training. An optimization
barrier between the calls keeps them one after the other, and equal ones from being merged. XLA's CPU backend
drops the barriers and merges the calls; there the time is that of one call, the host's part included.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

Function = Callable[..., Any]

CALLS = 8
"""In one program."""

_MOST_BYTES = 16 * 2**30
"""Results of all calls of a program are alive at once; together they may have this many bytes."""

_LEAST_TIME = 20e-3
"""Seconds that the further runs take together, or more."""

_LONG_CALL = 3e-3
"""From so many seconds on, one call is timed alone: the host's part is below 2 %."""

_WARM_UPS = 2


@dataclasses.dataclass(frozen=True)
class DeviceTime:
    """A time on the device.

    Attributes:
      seconds: the median.
      spread: (largest - smallest) / median of the samples.
      samples: how many.
    """

    seconds: float
    spread: float
    samples: int

    @property
    def microseconds(self) -> float:
        """The median."""
        return self.seconds * 1e6


def chained(function: Function, calls: int) -> Function:
    """A function that makes so many calls of `function`, each after the one before, and returns every result."""

    def run(*operands: Any) -> list[Any]:
        results: list[Any] = []
        for _ in range(calls):
            if results:
                operands, results[-1] = jax.lax.optimization_barrier((operands, results[-1]))
            results.append(function(*operands))
        return results

    return run


def measure(
    function: Function, *operands: Any, calls: int = CALLS, samples: int = 9, budget: float = 10.0
) -> DeviceTime:
    """The device's time of one call.

    Args:
      function: of the operands; JAX can trace it.
      *operands: arrays, on the device.
      calls: within one program; fewer where their results would not fit memory.
      samples: of which the median is taken.
      budget: seconds after which no further sample is taken, beyond the third.

    Returns:
      The time.
    """
    one = jax.jit(chained(function, 1)).lower(*operands).compile()
    _sample(one, operands)
    if jax.default_backend() == "cpu" or _sample(one, operands) > _LONG_CALL:
        return _summary(_samples(lambda: _sample(one, operands), samples, budget))
    result_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(one.out_info))
    calls = max(2, min(calls, _MOST_BYTES // max(result_bytes, 1)))
    many = jax.jit(chained(function, calls)).lower(*operands).compile()
    _sample(many, operands)
    runs = 1 + int(_LEAST_TIME / _sample(many, operands))
    for _ in range(_WARM_UPS):
        _sample(many, operands, 1 + runs)

    def further_call() -> float:
        return (_sample(many, operands, 1 + runs) - _sample(many, operands)) / (runs * calls)

    return _summary(_samples(further_call, samples, budget))


def _sample(program: Function, operands: tuple[Any, ...], runs: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(runs):
        result = program(*operands)
    jax.block_until_ready(result)
    return time.perf_counter() - start


def _samples(sample: Callable[[], Any], count: int, budget: float) -> list[Any]:
    taken: list[Any] = []
    start = time.perf_counter()
    while len(taken) < count and (len(taken) < 3 or time.perf_counter() - start < budget):
        taken.append(sample())
    return taken


def _summary(seconds: list[float]) -> DeviceTime:
    median = float(np.median(seconds))
    return DeviceTime(median, (max(seconds) - min(seconds)) / median if median > 0 else 0.0, len(seconds))
