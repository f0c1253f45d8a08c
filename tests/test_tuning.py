"""Tuned configurations: what is stored, what is ignored, and what a call takes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ggemm import __main__ as command_line
from jax_ggemm import accuracy, cute, tune, tuned, xla
from jax_ggemm.kernel import config
from jax_ggemm.products import Product
from jax_ggemm.shapes import GroupedShape

pytestmark = pytest.mark.once

F32 = np.dtype(np.float32)
KIND = "NVIDIA H200 (a test's)"
PROBLEM = tuned.Problem(Product.FORWARD, F32, F32, 1000, 512, 768, 16)
OTHER = next(c for c in config.candidates(Product.FORWARD) if c != config.pick(Product.FORWARD, 1000, 512, 768, 16))
SHAPE = GroupedShape("small", 24, 40, (7, 0, 30, 3), "a test")


@pytest.fixture(autouse=True)
def _a_cache_and_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "directory", lambda: tmp_path / "tuned")
    monkeypatch.setattr(tuned, "device_kind", lambda: KIND)
    tuned._read.cache_clear()


def test_what_is_stored_is_what_calls_take() -> None:
    assert tuned.pick(PROBLEM) != OTHER
    tuned.store(PROBLEM, KIND, OTHER, {"microseconds": []})
    assert tuned.pick(PROBLEM) == OTHER


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"m": 513}, True),
        ({"m": 1024}, True),
        ({"m": 1025}, False),
        ({"m": 512}, False),
        ({"k": 505}, True),  # padded to 512
        ({"k": 520}, False),
        ({"n": 760}, False),
        ({"groups": 15}, False),
        ({"product": Product.DLHS}, False),
        ({"in_dtype": np.dtype(np.float16)}, False),
        ({"out_dtype": np.dtype(np.float16)}, False),
    ],
)
def test_which_calls_share_a_configuration(changes: dict[str, Any], same: bool) -> None:
    tuned.store(PROBLEM, KIND, OTHER, {})
    assert (tuned.lookup(dataclasses.replace(PROBLEM, **changes), KIND) is not None) == same
    assert tuned.lookup(PROBLEM, "another GPU") is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"config": {"tile_m"',
        b"[]",
        b"{}",
        b"\xff\xfe",
        b'{"config": {"tile_m": 96, "tile_n": 8}}',
        b'{"config": 3}',
    ],
)
def test_a_file_that_holds_no_configuration_is_ignored_with_a_warning(content: bytes) -> None:
    path = tuned.store(PROBLEM, KIND, OTHER, {})
    path.write_bytes(content)
    tuned._read.cache_clear()
    with pytest.warns(UserWarning, match=r"is ignored: .*tune again"):
        picked = tuned.pick(PROBLEM)
    assert picked == config.pick(Product.FORWARD, 1000, 512, 768, 16)
    assert tuned.pick(PROBLEM) == picked  # and said once


def test_a_forced_configuration_wins_while_it_is_forced() -> None:
    tuned.store(PROBLEM, KIND, OTHER, {})
    first = config.pick(Product.FORWARD, 1000, 512, 768, 16)
    with tuned.forced(first):
        assert tuned.pick(PROBLEM) == first
    assert tuned.pick(PROBLEM) == OTHER


@pytest.fixture
def pretended_kernels(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Plain JAX in the place of the kernels; the list gets every configuration that was traced."""
    traced: list[Any] = []

    def product(call: Any, operands: Any) -> jax.Array:
        traced.append(tuned._forced.get())
        return xla.grouped_product(call, operands)

    monkeypatch.setattr(cute, "unsupported", lambda call, operands: None)
    monkeypatch.setattr(cute, "grouped_product", product)
    return traced


@pytest.mark.parametrize("product", Product)
def test_tuning_measures_every_candidate_and_stores_the_fastest(pretended_kernels: list[Any], product: Product) -> None:
    (found,) = tune.run([SHAPE], [product], "float32")
    assert set(pretended_kernels) == set(config.candidates(product)) == set(found.microseconds)
    times = list(found.microseconds.values())
    assert times == sorted(times)
    best = next(iter(found.microseconds))
    assert tuned.lookup(tune.problem_of(SHAPE, product, F32), KIND) == best
    (path,) = tuned.directory().iterdir()
    stored = json.loads(path.read_text())
    assert stored["config"] == dataclasses.asdict(best)
    assert stored["group_sizes"] == list(SHAPE.group_sizes)


def test_a_configuration_that_is_wrong_is_left_out(
    pretended_kernels: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    right, *wrong = config.candidates(Product.FORWARD)

    def product(call: Any, operands: Any) -> jax.Array:
        result = xla.grouped_product(call, operands)
        return result if tuned._forced.get() == right else result * 1.01

    monkeypatch.setattr(cute, "grouped_product", product)
    (found,) = tune.run([SHAPE], [Product.FORWARD], "float32")
    assert set(found.microseconds) == {right}
    assert set(found.left_out) == set(wrong)
    assert all("error" in reason for reason in found.left_out.values())


def test_where_no_kernel_runs_tuning_says_why() -> None:
    with pytest.raises(SystemExit, match="no NVIDIA GPU"):
        command_line.main(["tune", "--problem", "64", "64", "64", "2"])


@pytest.mark.parametrize("product", Product)
def test_the_error_of_a_product(product: Product) -> None:
    rng = np.random.default_rng(0)
    m, k, n, groups = SHAPE.m, SHAPE.k, SHAPE.n, SHAPE.groups
    columns = {Product.FORWARD: k, Product.DLHS: n, Product.DRHS: k}[product]
    lhs = rng.standard_normal((m, columns), np.float32)
    rhs = rng.standard_normal((m, n) if product is Product.DRHS else (groups, k, n), np.float32)
    exact, start = [], 0
    for group, size in enumerate(SHAPE.group_sizes):
        rows = slice(start, start := start + size)
        match product:
            case Product.FORWARD:
                exact.append(lhs[rows] @ rhs[group])
            case Product.DLHS:
                exact.append(lhs[rows] @ rhs[group].T)
            case Product.DRHS:
                exact.append((lhs[rows].T @ rhs[rows])[None])
    result = np.concatenate(exact)
    operands = jnp.asarray(lhs), jnp.asarray(rhs)
    assert accuracy.errors(SHAPE, product, operands, jnp.asarray(result)).grouped < 1e-6
    assert accuracy.errors(SHAPE, product, operands, jnp.asarray(result * 1.001)).grouped == pytest.approx(
        1e-3, rel=0.01
    )


@pytest.mark.gpu
@pytest.mark.skipif(cute._architecture() is None, reason="no NVIDIA GPU")
@pytest.mark.parametrize("product", Product)
def test_tuning_on_a_gpu(product: Product) -> None:
    (found,) = tune.run([SHAPE], [product], "bfloat16")
    assert not found.left_out
    assert set(found.microseconds) == set(config.candidates(product))
    assert tuned.pick(found.problem) == next(iter(found.microseconds))
