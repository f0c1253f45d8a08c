"""Times grouped products outside JAX on the shapes of `jax_ggemm.shapes`: torch's, quack's, and one dense product.

    python benchmarks/peers.py --shapes all --json peers.json

Needs torch, and quack-kernels where it is asked for. Times are of CUDA graphs of several calls, over their number.
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

from jax_ggemm.shapes import BY_NAME, TABLE, GroupedShape

NAMES = ("torch", "quack", "cublas")

CALLS = 16
"""In one graph."""

REPLAYS = 9

MOST_BYTES = 12 * 2**30
"""Two sets of operands where they have no more than this together, so that no call finds its own in the cache."""


def graph_microseconds(function: Callable[..., Any], sets: Sequence[tuple[torch.Tensor, ...]]) -> float:
    """The median time of one call, over replays of a graph that calls the function on each set in turn."""
    for operands in sets:
        function(*operands)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            function(*sets[i % len(sets)])
    times = []
    for _ in range(1 + REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / CALLS * 1e3)
    del graph
    return float(np.median(times[1:]))


def operands(shape: GroupedShape) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Sets of lhs (m, k), rhs (g, k, n) and cotangent (m, n), normally distributed, in bfloat16."""
    extents = ((shape.m, shape.k), (shape.groups, shape.k, shape.n), (shape.m, shape.n))
    one_set = 2 * sum(int(np.prod(extent)) for extent in extents)
    normal = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    sets = []
    for _ in range(2 if 2 * one_set <= MOST_BYTES else 1):
        lhs, rhs, cotangent = (normal(extent) for extent in extents)
        sets.append((lhs, rhs.mul_(shape.k**-0.5), cotangent))
    return sets


def programs(name: str, shape: GroupedShape) -> dict[str, Callable[..., torch.Tensor]]:
    """The products of a peer, by pass: functions of a set of operands."""
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


def rates() -> dict[str, float]:
    """What the card reaches: FLOP/s of a large dense product, bytes/s of reading and of writing."""
    size, elements = 8192, 2**31
    square = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    dense = 2 * size**3 / graph_microseconds(torch.mm, [(square, square.clone())]) * 1e6
    data = torch.randn(elements // size, size, device="cuda").to(torch.bfloat16)
    read = data.nbytes / graph_microseconds(lambda data: data.amax(dim=1), [(data,)]) * 1e6
    written = data.nbytes / graph_microseconds(lambda data: data.fill_(1.0), [(data,)]) * 1e6
    return {"dense_flops": dense, "read_bytes": read, "written_bytes": written}


def time_shape(shape: GroupedShape, names: Sequence[str]) -> list[dict[str, Any]]:
    """Times the peers on one shape.

    Args:
      shape: the shape.
      names: of the peers.

    Returns:
      One dictionary per peer and pass.
    """
    torch.manual_seed(0)
    sets = operands(shape)
    results = []
    for name in names:
        start = time.perf_counter()
        for which, function in programs(name, shape).items():
            result: dict[str, Any] = {"shape": shape.name, "product": which, "candidate": name}
            try:
                result["microseconds"] = graph_microseconds(function, sets)
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
        "rates": rates(),
        "products": [],
    }
    print(report["rates"], flush=True)
    for shape in TABLE if "all" in options.shapes else [BY_NAME[name] for name in options.shapes]:
        if time.perf_counter() - start > options.budget:
            print(f"out of time: {shape.name} and what follows are left out", flush=True)
            break
        report["products"] += time_shape(shape, options.peers)
        torch.cuda.empty_cache()
        write_whole(options.json, report)


if __name__ == "__main__":
    main()
