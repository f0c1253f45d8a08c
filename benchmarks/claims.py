"""Measures what the documentation claims of the GPU kernels beside their speed, and says whether each claim holds.

    python benchmarks/claims.py --json claims.json

- first call: with a ready object in the cache, what a call takes from tracing to its result, beyond the time in which
  XLA compiles a program of one elementwise operation.
- host: a call's time on the host beside that of a plain product, both too small to keep the device busy.
- layers: compiling an unrolled program of 60 layers with gradients beside the same one with plain products.
- kernels: what the device runs in a training step of one product, from a profile: one kernel for each of the three
  products, nothing else, and no copy to the host.
- read rate: of glm_gateup_m64, forward, over the rate at which the device reads memory, both with a steady device
  (`jax_ggemm/device_state.py`).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ggemm import bench_products, ragged_dot
from jax_ggemm.benchmark import environment, markdown
from jax_ggemm.device_state import State
from jax_ggemm.device_time import measure
from jax_ggemm.files import write_json
from jax_ggemm.products import Product
from jax_ggemm.roofline import measure_rates
from jax_ggemm.shapes import BY_NAME, work

DTYPE = jnp.bfloat16
IMPLEMENTATION = "cute"
LAYERS = 60


@dataclasses.dataclass(frozen=True)
class Claim:
    """One claim, and what was measured.

    Attributes:
      name: what it is about.
      measured: the figures, by what they are of.
      limit: in words.
      holds: whether the figures keep to it.
    """

    name: str
    measured: dict[str, Any]
    limit: str
    holds: bool


def plain(lhs: jax.Array, rhs: jax.Array, _sizes: jax.Array) -> jax.Array:
    """One dense product in the place of a grouped one."""
    return lhs @ rhs


def grouped(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
    """The grouped product."""
    return ragged_dot(lhs, rhs, sizes, implementation=IMPLEMENTATION)


def problem(m: int, k: int, n: int, groups: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """lhs, rhs and equal group sizes."""
    keys = jax.random.split(jax.random.key(0), 2)
    lhs = jax.random.normal(keys[0], (m, k), DTYPE)
    rhs = jax.random.normal(keys[1], (groups, k, n), DTYPE) * jnp.asarray(k**-0.5, DTYPE)
    return lhs, rhs, jnp.full(groups, m // groups, jnp.int32)


def first_call() -> Claim:
    """Has to come first: it is about the first call of a process."""
    operands = jax.block_until_ready(problem(1024, 512, 768, 8))
    seconds: dict[str, list[float]] = {}
    # What XLA sets up for any first program is not ours, and it would tune a product of its own: twice, and no dot.
    programs = {"any": lambda lhs, *_: lhs + 1, "simple": lambda lhs, *_: lhs * 2, "grouped": grouped}
    for name, function in programs.items():
        times = [time.perf_counter()]
        lowered = jax.jit(function).lower(*operands)
        times.append(time.perf_counter())
        compiled = lowered.compile()
        times.append(time.perf_counter())
        jax.block_until_ready(compiled(*operands))
        times.append(time.perf_counter())
        seconds[name] = np.diff(times).tolist()
    beyond = sum(seconds["grouped"]) - seconds["simple"][1]
    milliseconds = {
        f"{name} {part} ms": 1e3 * value
        for name in ("simple", "grouped")
        for part, value in zip(("trace", "compile", "run"), seconds[name], strict=True)
    }
    return Claim(
        "first call",
        {"beyond ms": 1e3 * beyond, **milliseconds},
        "under 100 ms beyond XLA's compilation",
        beyond < 0.1,
    )


def host_time() -> Claim:
    """Times calls that the host does not wait for."""
    lhs, rhs, sizes = jax.block_until_ready(problem(128, 128, 128, 2))
    calls: dict[str, Callable[[], Any]] = {
        "plain": functools.partial(jax.jit(jnp.dot), lhs, rhs[0]),
        "grouped": functools.partial(jax.jit(grouped), lhs, rhs, sizes),
    }
    number, times = 500, {name: [] for name in calls}
    for _ in range(12):
        for name, call in calls.items():
            jax.block_until_ready(call())
            start = time.perf_counter()
            for _ in range(number):
                result = call()
            times[name].append((time.perf_counter() - start) / number * 1e6)
            jax.block_until_ready(result)
    medians = {f"{name} us": float(np.median(samples[2:])) for name, samples in times.items()}
    more = medians["grouped us"] - medians["plain us"]
    return Claim("host", {**medians, "difference us": more}, "within 5 us of a plain product", more < 5)


def compile_time() -> Claim:
    """Compiles unrolled programs; the second compilation counts, when XLA has tuned its products."""
    lhs, rhs, sizes = problem(512, 256, 256, 4)

    def stack(product: Callable[..., jax.Array]) -> Callable[..., Any]:
        def loss(lhs: jax.Array, weights: list[jax.Array], sizes: jax.Array) -> jax.Array:
            for rhs in weights:
                lhs = jax.nn.relu(product(lhs, rhs, sizes))
            return (lhs.astype(jnp.float32) ** 2).sum()

        return jax.grad(loss, (0, 1))

    found = {}
    for name, product, weights in (("plain", plain, rhs[0]), ("grouped", grouped, rhs)):
        seconds = []
        for _ in range(3):
            jax.clear_caches()
            start = time.perf_counter()
            jax.jit(stack(product)).lower(lhs, [weights] * LAYERS, sizes).compile()
            seconds.append(time.perf_counter() - start)
        found[f"{name} s"] = min(seconds[1:])
        found[f"{name} first s"] = seconds[0]
    ratio = found["grouped s"] / found["plain s"]
    return Claim("layers", {**found, "ratio": ratio}, "within 20 % of plain products", ratio < 1.2)


def kernels(folder: Path) -> Claim:
    """Looks at what the device ran in five steps."""
    lhs, rhs, sizes = problem(1024, 512, 768, 8)
    cotangent = jax.random.normal(jax.random.key(2), (1024, 768), DTYPE)

    @jax.jit
    def step(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, cotangent: jax.Array) -> Any:
        result, pull_back = jax.vjp(lambda lhs, rhs: grouped(lhs, rhs, sizes), lhs, rhs)
        return result, *pull_back(cotangent)

    steps = 5
    jax.block_until_ready(step(lhs, rhs, sizes, cotangent))
    with jax.profiler.trace(str(folder)):
        for _ in range(steps):
            jax.block_until_ready(step(lhs, rhs, sizes, cotangent))
    ran: Counter[str] = Counter()
    for path in folder.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            if "/device:GPU" in plane.name:
                for line in plane.lines:
                    if line.name.startswith("Stream"):
                        ran.update(event.name for event in line.events)
    copies = sum(count for name, count in ran.items() if "memcpy" in name.lower())
    launched = sum(ran.values()) - copies
    holds = launched == len(Product) * steps and copies == 0
    by_name = {name[:60]: count for name, count in ran.items()}
    return Claim(
        "kernels",
        {"steps": steps, "kernels": launched, "copies": copies, **by_name},
        "three kernels a step, and no copy",
        holds,
    )


def read_rate() -> Claim:
    """Reads the weights of a decoding step."""
    shape = BY_NAME["glm_gateup_m64"]
    rates = measure_rates(jnp.dtype(DTYPE).name, State.STEADY)
    lhs, rhs = bench_products.operands(Product.FORWARD, shape, DTYPE)
    taken = measure(grouped, lhs, rhs, jnp.asarray(shape.group_sizes, jnp.int32), state=State.STEADY)
    rate = work(shape, Product.FORWARD).read_bytes / taken.seconds
    share = rate / rates.read_bytes
    measured = {
        "state": State.STEADY.value,
        "us": taken.microseconds,
        "TB/s": rate / 1e12,
        "device TB/s": rates.read_bytes / 1e12,
        "share": share,
    }
    return Claim("read rate", measured, "0.95 of the device's", share >= 0.95)


def main() -> int:
    """Runs the command; 1 where a claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    claims = []
    with tempfile.TemporaryDirectory() as folder:
        for check in (first_call, host_time, compile_time, functools.partial(kernels, Path(folder)), read_rate):
            try:
                claims.append(check())
            except Exception as error:  # what cannot be measured must not hide what can
                name = getattr(check, "__name__", "kernels")
                claims.append(Claim(name, {"error": f"{type(error).__name__}: {error}"}, "measured at all", False))
            print(claims[-1], flush=True)
            if options.json is not None:
                found = [dataclasses.asdict(claim) for claim in claims]
                write_json(options.json, {"environment": environment(), "claims": found})
    rows = [("claim", "limit", "measured", "holds")]
    for claim in claims:
        figures = ", ".join(
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in claim.measured.items()
        )
        rows.append((claim.name, claim.limit, figures, "yes" if claim.holds else "no"))
    print(markdown(rows))
    return 0 if all(claim.holds for claim in claims) else 1


if __name__ == "__main__":
    sys.exit(main())
