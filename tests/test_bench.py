"""The table of shapes, the device's time, and the commands that measure; figures are never checked."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ggemm import __main__ as command_line
from jax_ggemm import bench_layer, bench_products, bench_report, device_time, shapes
from jax_ggemm.device_state import State
from jax_ggemm.products import Product
from jax_ggemm.roofline import Rates
from jax_ggemm.shapes import GroupedShape, Work

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import compare

pytestmark = pytest.mark.once

SMALL = GroupedShape("small", 24, 40, (7, 0, 30, 3), "a test")
RATES = Rates(1e12, 1e10, 1e10)


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_report, "measure_rates", lambda dtype, state: RATES)
    monkeypatch.setitem(shapes.BY_NAME, "small", SMALL)
    monkeypatch.setitem(bench_layer.BY_NAME, "tiny", bench_layer.LayerShape("tiny", 16, 8, 8, 4, 2))


def test_the_table_names_each_shape_once_and_its_source() -> None:
    assert len(shapes.BY_NAME) == len(shapes.TABLE)
    assert all(shape.source and min(shape.group_sizes) >= 0 for shape in shapes.TABLE)
    skewed = shapes.BY_NAME["seed_skewed"]
    assert (skewed.m, skewed.groups, max(skewed.group_sizes)) == (16384, 64, 784)


def test_the_work_of_each_product() -> None:
    m, k, n, full = 40, 24, 40, 3 * 24 * 40
    assert shapes.work(SMALL, Product.FORWARD) == Work(2 * m * k * n, 2 * (m * k + full), 2 * m * n)
    assert shapes.work(SMALL, Product.DLHS) == Work(2 * m * k * n, 2 * (m * n + full), 2 * m * k)
    assert shapes.work(SMALL, Product.DRHS, 4) == Work(2 * m * k * n, 4 * m * (k + n), 4 * 4 * k * n)
    assert RATES.least_seconds(Work(10**12, 10**9, 0)) == 1.0
    assert RATES.least_seconds(Work(0, 10**10, 10**10)) == 2.0


def test_recorded_histograms(tmp_path: Path) -> None:
    about = {"model": "m", "features": 16, "hidden_features": 8}
    counts = np.arange(24, dtype=np.int32).reshape(3, 2, 4)
    np.savez(tmp_path / "counts.npz", counts=counts, metadata=json.dumps(about))
    found = list(shapes.recorded(tmp_path / "counts.npz"))
    assert [shape.name for shape in found] == [
        f"m_step{step}_layer2_{part}" for step in (1, 3) for part in ("gateup", "down")
    ]
    assert [(shape.k, shape.n) for shape in found] == [(16, 16), (8, 16)] * 2
    assert found[0].group_sizes == (4, 5, 6, 7)
    np.savez(tmp_path / "other.npz", counts=counts)
    with pytest.raises(ValueError, match="counts and metadata"):
        list(shapes.recorded(tmp_path / "other.npz"))
    np.savez(tmp_path / "short.npz", counts=counts, metadata=json.dumps({"model": "m"}))
    with pytest.raises(ValueError, match="the metadata lack features, hidden_features"):
        list(shapes.recorded(tmp_path / "short.npz"))
    (tmp_path / "half.npz").write_bytes((tmp_path / "counts.npz").read_bytes()[:200])
    with pytest.raises(ValueError, match=r"half.npz is no .npz file, or not all of one"):
        list(shapes.recorded(tmp_path / "half.npz"))


def test_calls_in_one_program_are_neither_merged_nor_dropped() -> None:
    lowered = jax.jit(device_time.chained(lambda x: jnp.dot(x, x), 5)).lower(jnp.ones((8, 8)))
    text = lowered.as_text()
    assert text.count("stablehlo.dot_general") == 5
    assert text.count("stablehlo.optimization_barrier") == 4
    assert len(lowered.compile()(jnp.ones((8, 8)))) == 5


@pytest.mark.usefixtures("small_machine")
def test_the_bench_command_over_shapes_and_its_table_beside_peers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "ours.json"
    names = [bench_products.OURS, bench_products.LAX, bench_products.DENSE]
    command = ["bench", "--shapes", "small", "--dtype", "float32", "--json", str(out), "--implementations", *names]
    command_line.main(command)
    assert "| small | forward " in capsys.readouterr().out
    report = json.loads(out.read_text())
    assert report["state"] is None
    assert [(r["product"], r["candidate"]) for r in report["products"]] == [
        ("forward", names[0]),
        ("forward", names[1]),
        ("forward", names[2]),
        ("dX", names[0]),
        ("dX", names[1]),
        ("dW", names[0]),
        ("dW", names[1]),
    ]
    assert all(r["microseconds"] is not None and r["failure"] is None for r in report["products"])
    assert all(r["error"] < 1e-6 for r in report["products"] if r["candidate"] == names[0])

    taken = compare.load(out)
    compare.check([taken])
    ours = [result["microseconds"] for result in report["products"] if result["candidate"] == names[0]]
    assert [row[3] for row in compare.rows([taken])[1:4]] == [f"{time:.0f}" for time in ours]


@pytest.mark.usefixtures("small_machine")
def test_a_peer_that_fails_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*operands: Any) -> jax.Array:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(
        bench_products, "implementations", lambda names: {"broken": broken, bench_products.OURS: jax.lax.ragged_dot}
    )
    found = list(bench_products.run([SMALL], (), "float32", RATES, 60.0, State.STEADY))
    assert {r.failure for r in found if r.candidate == "broken"} == {"RuntimeError: no such kernel"}
    assert all(r.failure is None for r in found if r.candidate == bench_products.OURS)
    late = list(bench_products.run([SMALL], (), "float32", RATES, -1.0, State.STEADY))
    assert {r.candidate for r in late} == {bench_products.OURS}


@pytest.mark.usefixtures("small_machine")
def test_the_bench_command_over_a_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "layer.json"
    names = ["--implementations", bench_products.OURS]
    command_line.main(["bench", "--layers", "tiny", "--dtype", "float32", "--json", str(out), *names])
    parts = {(r["part"], r["seconds_of"]) for r in json.loads(out.read_text())["layers"]}
    assert parts == {
        (part, name)
        for part in ("layer", "routing", "permute", "experts", "combine")
        for name in ("forward", "forward+gradients")
    }
    assert "routing + permute + combine" in capsys.readouterr().out


@pytest.mark.parametrize("product", Product)
def test_the_timed_programs_are_the_products(product: Product) -> None:
    operands = bench_products.operands(product, SMALL, "float32")
    sizes = jnp.asarray(SMALL.group_sizes, jnp.int32)
    got = [
        jax.jit(bench_products.program(product, function, SMALL))(*operands, sizes)
        for function in bench_products.implementations({bench_products.OURS, bench_products.LAX}).values()
    ]
    np.testing.assert_allclose(*got, rtol=1e-4, atol=1e-4)
