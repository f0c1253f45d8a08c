"""Times grouped products outside JAX on the shapes of `jax_ggemm.shapes`: torch's, quack's, and one dense product.

    python benchmarks/peers.py --shapes all --json peers.json

Needs torch, and quack-kernels where it is asked for. Times are of CUDA graphs of several calls, over their number, and
are taken as ours are, in the same state of the device (`jax_ggemm/device_state.py`).
"cublas" is a dense product of as many FLOPs. quack is autotuned on each shape and product; without --all-configurations
its tuner tries only those with clusters of two blocks along m and operands that are not swapped: half of its list or
fewer, in half of the time. `benchmarks/compare.py` puts the figures beside those of `python -m jax_ggemm bench`.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from jax_ggemm.device_state import DeviceTime, Queue, State, calls_of, estimate, time_calls
from jax_ggemm.shapes import BY_NAME, TABLE, GroupedShape

NAMES = ("torch", "quack", "cublas")


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
    """An lhs (m, k), rhs (g, k, n) and cotangent (m, n), normally distributed, in bfloat16."""
    normal = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
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
    """Leaves quack's tuner the configurations that the module's docstring names."""
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
    square = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    dense = 2 * size**3 / measure(torch.mm, (square, square.clone()), state).seconds
    data = torch.randn(elements // size, size, device="cuda").to(torch.bfloat16)
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


def write_whole(path: Path, value: dict[str, Any]) -> None:
    """Writes JSON, whole or not at all."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        json.dump(value, file, indent=1)
    os.replace(file.name, path)


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["all"], choices=["all", *BY_NAME], metavar="NAME")
    parser.add_argument("--peers", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--state", type=State, default=State.STEADY, choices=list(State), help="of the device")
    parser.add_argument("--all-configurations", action="store_true", help="for quack's tuner")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds after which no other shape is begun")
    parser.add_argument("--json", type=Path, required=True, help="written after every shape")
    options = parser.parse_args()
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    if "quack" in options.peers:
        import quack  # noqa: PLC0415

        about["quack"] = quack.__version__
        if not options.all_configurations:
            shorten_the_list_of_quack()
    start = time.perf_counter()
    report: dict[str, Any] = {
        "environment": {**about, "date": datetime.datetime.now(datetime.UTC).date().isoformat()},
        "state": options.state,
        "rates": rates(options.state),
        "products": [],
    }
    print(report["state"], report["rates"], flush=True)
    for shape in TABLE if "all" in options.shapes else [BY_NAME[name] for name in options.shapes]:
        if time.perf_counter() - start > options.budget:
            print(f"out of time: {shape.name} and what follows are left out", flush=True)
            break
        report["products"] += time_shape(shape, options.peers, options.state)
        torch.cuda.empty_cache()
        write_whole(options.json, report)


if __name__ == "__main__":
    main()
