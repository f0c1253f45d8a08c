"""Times what a device takes for a function, without what the host takes to call it.

The function is called several times within one compiled program, and programs are enqueued ahead of the device
(`device_state`, which also has the state that the device is in). An optimization barrier between the calls keeps
them one after the other, and equal ones from being merged. XLA's CPU backend drops the barriers, merges the calls and
may run programs at once; there the time is that of one call alone, the host's part included, and there is no state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jax_ggemm import device_state
from jax_ggemm.device_state import DeviceTime, Queue, State

Function = Callable[..., Any]

_MOST_BYTES = 16 * 2**30
"""Results of all calls of a program are alive at once; together they may have this many bytes."""


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


def state_here(asked: State) -> State | None:
    """The state that `measure` brings the default device into where this one is asked for: none on a CPU."""
    return None if jax.default_backend() == "cpu" else asked


def measure(
    function: Function,
    *operands: Any,
    state: State = State.STEADY,
    calls: int = device_state.CALLS,
    budget: float = 10.0,
) -> DeviceTime:
    """The device's time of one call.

    Args:
      function: of the operands; JAX can trace it.
      *operands: arrays, on the device.
      state: that the device is brought into; a CPU is not.
      calls: within one program, at most; fewer where they are long, or their results would not fit memory.
      budget: seconds after which no further sample is taken, beyond the third.

    Returns:
      The time.
    """
    one = jax.jit(chained(function, 1)).lower(*operands).compile()
    queue = _queue(one, operands)
    if state_here(state) is None:
        return device_state.time_alone(queue, budget)
    result_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(one.out_info))
    calls = max(1, min(calls, device_state.calls_of(device_state.estimate(queue)), _MOST_BYTES // max(result_bytes, 1)))
    if calls > 1:
        queue = _queue(jax.jit(chained(function, calls)).lower(*operands).compile(), operands)
    return device_state.time_calls(queue, calls, state, budget)


def _queue(program: Function, operands: tuple[Any, ...]) -> Queue:
    """One result stands for all of a run, so that a run that is waited for does not keep the others alive."""
    return Queue(lambda: jax.tree.leaves(program(*operands))[-1], jax.block_until_ready)
