"""Compares `jax_ggemm.ragged_dot` with `jax.lax.ragged_dot` on the same inputs: time, temporary memory, errors.

    python examples/compare_ragged_dot.py
    python examples/compare_ragged_dot.py --m 4096 --groups 64 --dtype bfloat16 --json table.json

A row for each: one dense product [m, k] x [k, n], which does the same useful work without groups;
`jax.lax.ragged_dot`; and every implementation of `jax_ggemm` that runs here. The columns:

    forward, + gradients  the best of `--repeats` timings in ms, taken in turns, so that all see the same machine
    temporary             MiB that XLA reserves beside arguments and results, without what a native handler takes itself
    error                 the largest error, over the root mean square of its row, against a float64 loop over groups
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import jax
import numpy as np

import runs_on
from jax_ggemm import benchmark
from jax_ggemm.files import write_json

PARTS = ("value", "d lhs", "d rhs")


def uneven_sizes(shape: benchmark.Shape, seed: int) -> np.ndarray:
    """Group sizes with the sum m, as uneven as those of a router."""
    generator = np.random.default_rng(seed)
    return generator.multinomial(shape.m, generator.dirichlet(np.full(shape.groups, 2.0)))


def exact(problem: benchmark.Problem) -> tuple[np.ndarray, ...]:
    """Value and gradients by a loop over groups in float64."""
    lhs, rhs, cotangent = (np.asarray(array, np.float64) for array in (problem.lhs, problem.rhs, problem.cotangent))
    value, d_lhs, d_rhs = np.zeros(cotangent.shape), np.zeros(lhs.shape), np.zeros(rhs.shape)
    sizes = np.asarray(problem.group_sizes)
    for group, end in enumerate(np.cumsum(sizes)):
        rows = slice(end - sizes[group], end)
        value[rows] = lhs[rows] @ rhs[group]
        d_lhs[rows] = cotangent[rows] @ rhs[group].T
        d_rhs[group] = lhs[rows].T @ cotangent[rows]
    return value, d_lhs, d_rhs


def relative_error(result: jax.Array, exact: np.ndarray) -> float:
    """The largest error over the root mean square of its row; in a row of zeros (an empty group) the error itself."""
    scale = np.sqrt(np.mean(exact**2, axis=-1, keepdims=True))
    return float(np.max(np.abs(np.asarray(result, np.float64) - exact) / np.where(scale == 0, 1, scale), initial=0))


def errors(problem: benchmark.Problem) -> dict[str, dict[str, float]]:
    """The error of each part of each candidate but the dense product, which computes something else."""
    wanted = exact(problem)
    found = {}
    for candidate, product in benchmark.candidates(problem).items():
        if candidate != benchmark.DENSE:
            results = jax.jit(benchmark.with_gradients(product))(*problem.operands(candidate))
            found[candidate] = dict(zip(PARTS, map(relative_error, results, wanted), strict=True))
    return found


def table(report: dict[str, dict[str, benchmark.Timing]], found: dict[str, dict[str, float]]) -> str:
    """Times, temporary memory and errors in Markdown."""
    rows = [["", "forward ms", "+ gradients ms", "temporary MiB", "+ gradients MiB", *(f"error {p}" for p in PARTS)]]
    for candidate in report[benchmark.PASSES[0]]:
        timings = [report[name][candidate] for name in benchmark.PASSES]
        times = [f"{timing.best * 1e3:.3f}" for timing in timings]
        memory = [f"{timing.temporary_bytes / 2**20:.1f}" for timing in timings]
        parts = [f"{error:.1e}" for error in found[candidate].values()] if candidate in found else ["-"] * len(PARTS)
        rows.append([candidate, *times, *memory, *parts])
    return benchmark.markdown(rows)


def parse() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, text in (
        ("m", 1024, "rows"),
        ("k", 512, "columns of lhs"),
        ("n", 512, "columns of the result"),
        ("groups", 16, "matrices"),
        ("repeats", 20, "timings of each program"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"), help="of all arrays")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to this file, too")
    options = parser.parse_args()
    for name in ("m", "k", "n", "groups", "repeats"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be positive, got {getattr(options, name)}")
    return options


def main() -> int:
    """Runs the command; returns its exit code."""
    options = parse()
    shape = benchmark.Shape(options.m, options.k, options.n, options.groups, options.dtype)
    problem = benchmark.Problem.random(shape, uneven_sizes(shape, options.seed), options.seed)
    sizes = np.asarray(problem.group_sizes)
    print(f"{runs_on.device_line()}; {runs_on.versions_line()}")
    print(
        f"[{shape.m}, {shape.k}] x [{shape.groups}, {shape.k}, {shape.n}] in {shape.dtype}, "
        f"{sizes.min()} to {sizes.max()} rows in a group\n"
    )
    found = errors(problem)
    report = benchmark.run(problem, options.repeats, budget=60)
    print(table(report, found))
    if options.json is not None:
        timings = benchmark.as_json([shape], [report])
        write_json(options.json, {**timings, "group_sizes": sizes.tolist(), "errors": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
