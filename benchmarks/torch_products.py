"""What `peers.py` times: the grouped products of torch and quack, and one dense product, from CUDA graphs."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from jax_ggemm.device_state import DeviceTime, Queue, State, calls_of, estimate, time_calls
from jax_ggemm.shapes import GroupedShape

DTYPE = torch.bfloat16
"""Of operands and results."""


def queue_of(run: Callable[[], Any]) -> Queue:
    """What enqueues a run, and waits for it."""

    def start() -> torch.cuda.Event:
        run()
        event = torch.cuda.Event()
        event.record()
        return event

    return Queue(start, lambda event: event.synchronize())


def measure(function: Callable[..., Any], operands: tuple[torch.Tensor, ...], state: State) -> DeviceTime:
    """The time of one call, from a graph that makes several, as `jax_ggemm.device_time.measure` has a program."""
    calls = calls_of(estimate(queue_of(lambda: function(*operands))))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            function(*operands)
    return time_calls(queue_of(graph.replay), calls, state)


def operands(shape: GroupedShape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """An lhs (m, k), rhs (g, k, n) and cotangent (m, n), normally distributed, of `DTYPE`."""
    normal = functools.partial(torch.randn, device="cuda", dtype=DTYPE)
    rhs = normal((shape.groups, shape.k, shape.n)).mul_(shape.k**-0.5)
    return normal((shape.m, shape.k)), rhs, normal((shape.m, shape.n))


def programs(name: str, shape: GroupedShape) -> dict[str, Callable[..., torch.Tensor]]:
    """The products of a peer, by pass: functions of `operands`."""
    ends = torch.tensor(np.cumsum(shape.group_sizes), device="cuda", dtype=torch.int32)
    if name == "torch":
        product = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
        return {
            "forward": lambda lhs, rhs, _: product(lhs, rhs, offs=ends),
            "dX": lambda _, rhs, cotangent: product(cotangent, rhs.mT, offs=ends),
            "dW": lambda lhs, _, cotangent: product(lhs.t(), cotangent, offs=ends),
        }
    if name == "quack":
        from quack.gemm_interface import gemm  # noqa: PLC0415 - only where it is asked for

        bounds = torch.cat([ends.new_zeros(1), ends])
        return {
            "forward": lambda lhs, rhs, _: gemm(lhs, rhs, cu_seqlens_m=bounds, tuned=True),
            "dX": lambda _, rhs, cotangent: gemm(cotangent, rhs.mT, cu_seqlens_m=bounds, tuned=True),
            "dW": lambda lhs, _, cotangent: gemm(lhs.t(), cotangent, cu_seqlens_k=bounds, tuned=True),
        }
    return {"forward": lambda lhs, rhs, _: torch.mm(lhs, rhs[0])}


def shorten_the_list_of_quack() -> None:
    """Leaves quack's tuner the configurations that the docstring of `peers.py` names."""
    from quack import gemm_interface  # noqa: PLC0415

    tuner = gemm_interface.gemm_tuned
    tuner.configs = [
        choice
        for choice in tuner.configs
        if choice.kwargs["config"].cluster_m == 2 and not choice.kwargs["config"].swap_ab
    ]


def rates(state: State) -> dict[str, float]:
    """What the card reaches: FLOP/s of a large dense product, bytes/s of reading and of writing."""
    size, elements = 8192, 2**31
    square = torch.randn(size, size, device="cuda", dtype=DTYPE)
    dense = 2 * size**3 / measure(torch.mm, (square, square.clone()), state).seconds
    data = torch.randn(elements // size, size, device="cuda").to(DTYPE)
    read = data.nbytes / measure(lambda data: data.amax(dim=1), (data,), state).seconds
    written = data.nbytes / measure(lambda data: data.fill_(1.0), (data,), state).seconds
    return {"dense_flops": dense, "read_bytes": read, "written_bytes": written}


def time_shape(shape: GroupedShape, names: Sequence[str], state: State) -> list[dict[str, Any]]:
    """Times the peers on one shape.

    Args:
      shape: the shape.
      names: of the peers.
      state: that the device is brought into for each time.

    Returns:
      One dictionary per peer and pass.
    """
    torch.manual_seed(0)
    arrays = operands(shape)
    results = []
    for name in names:
        start = time.perf_counter()
        for which, function in programs(name, shape).items():
            result: dict[str, Any] = {"shape": shape.name, "product": which, "candidate": name}
            try:
                taken = measure(function, arrays, state)
                result |= {"microseconds": taken.microseconds, "spread": taken.spread}
            except Exception as error:  # a peer's failure is a result
                result["failure"] = f"{type(error).__name__}: {str(error)[:300]}"
            results.append(result)
            print(shape.name, which, name, result.get("microseconds", result.get("failure")), flush=True)
        print(f"{name} on {shape.name}: {time.perf_counter() - start:.1f} s", flush=True)
    return results
