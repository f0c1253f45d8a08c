"""Times grouped products side by side: ours, `jax.lax.ragged_dot` and one dense product of the same useful work."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np

from jax_ggemm import binding
from jax_ggemm.api import ragged_dot

RaggedDot = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

DENSE = "dense"
LAX = "jax.lax.ragged_dot"
PASSES = ("forward", "forward+gradients")


@dataclasses.dataclass(frozen=True)
class Shape:
    """The extents of a problem: m rows in `groups` groups, times (k, n) weights."""

    m: int
    k: int
    n: int
    groups: int
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.m}, {self.k}, {self.n}, {self.groups}, {self.dtype}"

    def equal_sizes(self) -> np.ndarray:
        """(groups,) int32: m rows in equal groups, as far as they can be equal."""
        sizes = np.full(self.groups, self.m // self.groups, np.int32)
        sizes[: self.m % self.groups] += 1
        return sizes


@dataclasses.dataclass(frozen=True)
class Problem:
    """What every candidate computes with.

    Attributes:
      lhs: (m, k).
      rhs: (groups, k, n), of the size that keeps the result's near 1.
      group_sizes: (groups,) int32.
      cotangent: (m, n), of the result.
    """

    lhs: jax.Array
    rhs: jax.Array
    group_sizes: jax.Array
    cotangent: jax.Array

    @classmethod
    def random(cls, shape: Shape, group_sizes: np.ndarray, seed: int = 0) -> Problem:
        """Normally distributed operands."""
        keys = jax.random.split(jax.random.key(seed), 3)
        return cls(
            lhs=jax.random.normal(keys[0], (shape.m, shape.k), shape.dtype),
            rhs=jax.random.normal(keys[1], (shape.groups, shape.k, shape.n), shape.dtype) * shape.k**-0.5,
            group_sizes=jnp.asarray(group_sizes, jnp.int32),
            cotangent=jax.random.normal(keys[2], (shape.m, shape.n), shape.dtype),
        )

    def operands(self, candidate: str) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """The arguments of a candidate's programs: the dense product gets one matrix, for all rows."""
        return self.lhs, self.rhs[0] if candidate == DENSE else self.rhs, self.group_sizes, self.cotangent


@dataclasses.dataclass(frozen=True)
class Timing:
    """Wall times of one function, in seconds, and the temporary memory of its program, in bytes."""

    seconds: tuple[float, ...]
    temporary_bytes: int

    @property
    def best(self) -> float:
        """The shortest time: what the machine can do when nothing else runs."""
        return min(self.seconds)

    @property
    def median(self) -> float:
        """The middle time."""
        return float(np.median(self.seconds))


def candidates(problem: Problem) -> dict[str, RaggedDot]:
    """What is timed on a problem, by name: what runs on this machine."""
    found: dict[str, RaggedDot] = {DENSE: lambda lhs, rhs, _sizes: lhs @ rhs, LAX: jax.lax.ragged_dot}
    for name in binding.NAMES:
        ours = functools.partial(ragged_dot, implementation=name)
        try:
            jax.jit(ours).lower(problem.lhs, problem.rhs, problem.group_sizes)
        except NotImplementedError:
            continue
        found[f"jax_ggemm {name}"] = ours
    return found


def forward(product: RaggedDot) -> Callable[..., Any]:
    """The program of a forward pass, of `Problem.operands`."""
    return lambda lhs, rhs, sizes, _cotangent: product(lhs, rhs, sizes)


def with_gradients(product: RaggedDot) -> Callable[..., Any]:
    """The program of a forward and a backward pass: the result, and the gradients of lhs and rhs."""

    def run(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, cotangent: jax.Array) -> Any:
        result, pull_back = jax.vjp(lambda lhs, rhs: product(lhs, rhs, sizes), lhs, rhs)
        return result, *pull_back(cotangent)

    return run


def temporary_bytes(program: jax.stages.Compiled) -> int:
    """The temporary memory that XLA allocates for a compiled program, in bytes, without what a handler takes itself."""
    analysis: Any = program.memory_analysis()
    return int(analysis.temp_size_in_bytes)


def time_interleaved(
    functions: dict[str, Callable[[], Any]], repeats: int, budget: float
) -> dict[str, tuple[float, ...]]:
    """Wall times of every function, called in turn so that all see the same state of the machine.

    Args:
      functions: each returns arrays, which are waited for.
      repeats: calls of each, after one that warms up.
      budget: seconds after which a function is not called again.

    Returns:
      Seconds of each call.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        jax.block_until_ready(function())
    for _ in range(repeats):
        for name, function in functions.items():
            if sum(times[name]) > budget:
                continue
            start = time.perf_counter()
            jax.block_until_ready(function())
            times[name].append(time.perf_counter() - start)
    return {name: tuple(seconds) for name, seconds in times.items()}


def run(problem: Problem, repeats: int, budget: float) -> dict[str, dict[str, Timing]]:
    """Times every candidate on a problem.

    Args:
      problem: the operands.
      repeats: calls of each candidate.
      budget: seconds after which a candidate is not called again.

    Returns:
      A timing by pass ("forward", "forward+gradients") and candidate.
    """
    report = {}
    for name, wrap in zip(PASSES, (forward, with_gradients), strict=True):
        calls: dict[str, Callable[[], Any]] = {}
        temporary = {}
        for candidate, product in candidates(problem).items():
            operands = problem.operands(candidate)
            program = jax.jit(wrap(product)).lower(*operands).compile()
            calls[candidate] = functools.partial(program, *operands)
            temporary[candidate] = temporary_bytes(program)
        times = time_interleaved(calls, repeats, budget)
        report[name] = {candidate: Timing(seconds, temporary[candidate]) for candidate, seconds in times.items()}
    return report


def environment() -> dict[str, str]:
    """What the figures were measured on and with."""
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = {line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line}
        processor = ", ".join(sorted(names)) or processor
    return {
        "device": jax.devices()[0].device_kind,
        "processor": f"{processor}, {len(jax.devices())} device(s), {_cores()} core(s)",
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def table(shapes: Sequence[Shape], reports: Sequence[dict[str, dict[str, Timing]]]) -> str:
    """The timings as a Markdown table: best time, and its ratio to the dense product's."""
    rows = [("m, k, n, groups, dtype", "pass", "candidate", "best ms", "median ms", "x dense", "temporary MiB")]
    rows += [
        (
            str(shape),
            name,
            candidate,
            f"{timing.best * 1e3:.2f}",
            f"{timing.median * 1e3:.2f}",
            f"{timing.best / timings[DENSE].best:.2f}",
            f"{timing.temporary_bytes / 2**20:.1f}",
        )
        for shape, report in zip(shapes, reports, strict=True)
        for name, timings in report.items()
        for candidate, timing in timings.items()
    ]
    return markdown(rows)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text, the first one being the head, as an aligned Markdown table."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def as_json(shapes: Sequence[Shape], reports: Sequence[dict[str, dict[str, Timing]]]) -> dict[str, Any]:
    """The timings and the environment as a value for `json.dump`."""
    results = [
        {
            "shape": dataclasses.asdict(shape),
            "pass": name,
            "candidate": candidate,
            "best_seconds": timing.best,
            "median_seconds": timing.median,
            "ratio_to_dense": timing.best / timings[DENSE].best,
            "temporary_bytes": timing.temporary_bytes,
            "calls": len(timing.seconds),
        }
        for shape, report in zip(shapes, reports, strict=True)
        for name, timings in report.items()
        for candidate, timing in timings.items()
    ]
    return {"environment": environment(), "results": results}
