"""The emulator's timeline: consistent with itself, and it ranks designs as the hardware does."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import ptx_emulator
import pytest
from ptx_emulator import Checks, Costs, Report

import jax_ggemm
from jax_ggemm.kernel import config
from jax_ggemm.kernel.config_sm100 import Sm100Config
from jax_ggemm.kernel.pick_sm100 import SMALL
from jax_ggemm.products import Product

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

from ptx_emulator import kernels

pytestmark = pytest.mark.emulator

BF16 = np.dtype(ml_dtypes.bfloat16)


def spec_of(candidate: config.Sm90Config | Sm100Config) -> config.KernelSpec:
    return config.KernelSpec(Product.FORWARD, BF16, BF16, False, candidate)


def wide(stages: int) -> config.Sm90Config:
    return config.Sm90Config(tile_m=128, tile_n=256, stages=stages)


NARROW = config.Sm90Config(tile_m=128, tile_n=128, stages=6)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """All kernels of this file, compiled in one process."""
    kernels.compile_all([spec_of(candidate) for candidate in (wide(2), wide(3), wide(4), NARROW)], "sm_90a")


def timeline(candidate: config.Sm90Config | Sm100Config, costs: Costs | None = None, arch: str = "sm_90a") -> dict:
    """Of a forward product of two groups of 256 rows."""
    spec = spec_of(candidate)
    arrays = {
        "lhs": np.ones((1, 512, 1024), BF16),
        "rhs": np.ones((1, 2, 1024, 512), BF16),
        "group_sizes": np.full((1, 2), 256, np.int32),
        "group_offset": np.zeros(1, np.int32),
    }
    checks = Checks(races=False, timeline=costs or Costs())
    out, report = kernels.run(spec, arch, arrays, (1, 512, 512), multiprocessors=2, checks=checks)
    assert (out == 1024).all()
    assert report.timeline is not None
    return report.timeline


def test_what_it_says_is_consistent() -> None:
    result = timeline(wide(4))
    assert len(result["ctas"]) == 2
    for cta in result["ctas"]:
        span = cta["end"] - cta["start"]
        busy = sum(end - start for start, end in cta["tensor_busy"])
        # 2 m k n useful multiply-adds, half of them in each block, at 2048 a cycle: all tiles are whole.
        assert busy == pytest.approx(512 * 1024 * 512 / 2 / 2048, rel=1e-3)
        assert cta["tensor_busy_cycles"] + cta["tensor_idle_cycles"] == pytest.approx(span, abs=2)
        times, in_flight = zip(*cta["bytes_in_flight"], strict=True)
        assert list(times) == sorted(times)
        assert in_flight[-1] == 0
        assert max(in_flight) <= 4 * config.stage_bytes(128, 256)
        for warp in cta["warps"]:
            assert warp["end"] <= cta["end"]
            assert all(start < end <= warp["end"] for start, end, _ in warp["waits"])


def test_more_stages_keep_more_bytes_in_flight() -> None:
    results = [timeline(wide(stages)) for stages in (2, 3, 4)]
    cycles = [result["cycles"] for result in results]
    in_flight = [result["ctas"][0]["mean_bytes_in_flight"] for result in results]
    assert cycles[0] > 1.2 * cycles[1]
    assert cycles[2] < 1.01 * cycles[1]
    assert in_flight == sorted(in_flight)


def test_wider_tiles_read_less() -> None:
    assert timeline(wide(4))["cycles"] < timeline(NARROW)["cycles"]


def test_what_is_multicast_is_read_once() -> None:
    # Half of the bytes are lhs, of which two blocks read one half each.
    costs = Costs(memory_bytes=Costs().l2_bytes)
    alone, shared = (timeline(dataclasses.replace(SMALL, multicast=tiles), costs, "sm_100a") for tiles in (1, 2))
    assert shared["cycles"] == pytest.approx(0.75 * alone["cycles"], rel=0.03)
    for cta in shared["ctas"]:
        assert cta["mean_bytes_in_flight"] > 0.9 * alone["ctas"][0]["mean_bytes_in_flight"]


def test_without_the_cost_of_memory_the_tensor_cores_are_the_limit() -> None:
    fast = dataclasses.replace(Costs(), memory_bytes=1e6, l2_bytes=1e6, tma_latency=1.0)
    assert timeline(wide(4), fast)["tensor_busy_fraction"] > 1.2 * timeline(wide(4))["tensor_busy_fraction"]


def test_the_timelines_of_a_program() -> None:
    seen: list[tuple[config.KernelSpec, Report]] = []
    checks = Checks(races=False, timeline=Costs())
    emulated = ptx_emulator.implementation("sm_90a", checks=checks, on_report=lambda *report: seen.append(report))
    lhs, rhs = jnp.ones((64, 64), jnp.bfloat16), jnp.ones((2, 64, 64), jnp.bfloat16)
    out = jax.jit(lambda a, b, c: jax_ggemm.ragged_dot(a, b, c, implementation=emulated))(lhs, rhs, jnp.array([40, 24]))
    assert (np.asarray(out, np.float32) == 64).all()
    ((spec, report),) = seen
    assert spec.product is Product.FORWARD
    assert report.timeline is not None
    assert report.timeline["cycles"] > 0
