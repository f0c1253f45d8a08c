"""The kernels that ship, executed by the PTX emulator: right results, and no fault in any order of events."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import ptx_emulator
import pytest
from emulated_layer import assert_layer_equals_plain_jax

import jax_ggemm
from jax_ggemm.kernel import config
from jax_ggemm.products import Product

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

from ptx_emulator import kernels

pytestmark = pytest.mark.emulator

FULL = "JAX_GGEMM_TEST_FULL" in os.environ
BF16 = np.dtype(ml_dtypes.bfloat16)
F16, F32 = np.dtype(np.float16), np.dtype(np.float32)

HISTOGRAMS = {
    "even": [128, 128, 128],
    "all empty": [0, 0, 0],
    "single rows": [1, 1, 1, 1],
    "ragged tails": [100, 0, 3, 157],
    "all rows in one group": [0, 300, 0],
    "more groups than tiles": [2, 0, 1, 0, 0, 3, 0, 0] * 5,
    "rows of no group": [65, 64],
    "more sizes than rows": [200, 300, 10],
    "negative": [-5, 130, -1, 64],
    "one group": [257],
}
M = 300
THICK = "a thick group"
"""Of enough rows for a pair of blocks to share its contraction."""
HISTOGRAMS[THICK] = [30, 620, 0, 50]
ROWS = {THICK: 700}


DEFAULTS = [
    config.KernelSpec(product, BF16, BF16, False, candidate)
    for product in Product
    for candidate in config.candidates(product)
]
PAIRS = [spec for spec in DEFAULTS if spec.config.cluster > 1]


def specs() -> list[config.KernelSpec]:
    """Every kernel of a release; otherwise every configuration, and each kind of operand, result and bias once."""
    if FULL:
        return list(config.default_specs([BF16, F16]))
    others = [
        config.KernelSpec(product, F16, F32, product is Product.FORWARD, config.candidates(product)[-1])
        for product in Product
    ]
    return [
        *DEFAULTS,
        *others,
        config.KernelSpec(Product.FORWARD, BF16, BF16, True, config.candidates(Product.FORWARD)[0]),
    ]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """All kernels of this file, compiled in one process."""
    kernels.compile_all([*specs(), *DEFAULTS], "sm_90a")


@functools.cache
def operands(spec: config.KernelSpec, histogram: str, m: int, k: int, n: int) -> dict[str, np.ndarray]:
    """Integers, whose sums are exact, and NaN in rows of no group where rows are contracted."""
    sizes = np.array([HISTOGRAMS[histogram]], np.int32)
    groups = sizes.shape[1]
    rng = np.random.default_rng(len(histogram))

    def integers(*shape: int) -> np.ndarray:
        return rng.integers(-4, 5, shape).astype(spec.in_dtype)

    lhs = integers(1, m, n if spec.product is Product.DLHS else k)
    rhs = integers(1, groups, k, n) if spec.product.rows_are_ragged else integers(1, m, n)
    held = oracle.bounds(sizes[0].tolist(), m)[-1][1]
    lhs[:, held:] = np.nan
    if spec.product is Product.DRHS:
        rhs[:, held:] = np.nan
    arrays = {"lhs": lhs, "rhs": rhs, "group_sizes": sizes, "group_offset": np.zeros(1, np.int32)}
    if spec.has_bias:
        arrays["bias"] = integers(1, groups, n if spec.product is Product.FORWARD else k).astype(F32)
    return arrays


def expected(spec: config.KernelSpec, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """The exact result, rounded once."""
    lhs, rhs, sizes = arrays["lhs"][0], arrays["rhs"][0], arrays["group_sizes"][0]
    if spec.product is Product.DRHS:
        value = oracle.d_rhs(lhs, rhs, sizes, len(sizes)).value
    else:
        weights = rhs if spec.product is Product.FORWARD else np.swapaxes(rhs, 1, 2)
        bias = arrays["bias"][0] if spec.has_bias else None
        value = oracle.forward(lhs, weights, sizes, bias=bias).value
    return value.astype(spec.out_dtype)


def check(
    spec: config.KernelSpec,
    histogram: str,
    *,
    m: int | None = None,
    columns: tuple[int, int] = (72, 264),
    multiprocessors: int = 2,
    seed: int = 0,
) -> Any:
    """Emulates a kernel, and compares bit for bit."""
    m, (k, n) = m or ROWS.get(histogram, M), columns
    arrays = operands(spec, histogram, m, k, n)
    value = expected(spec, arrays)
    out, report = kernels.run(spec, "sm_90a", arrays, (1, *value.shape), multiprocessors=multiprocessors, seed=seed)
    held = oracle.bounds(arrays["group_sizes"][0].tolist(), m)[-1][1] if spec.product.rows_are_ragged else None
    np.testing.assert_array_equal(out[0][:held], value[:held])
    if held is not None:
        assert not out[0][held:].any()
    return report


def pairwise() -> list[tuple[config.KernelSpec, str]]:
    """(kernel, histogram): every kernel, and every histogram with every product."""
    if FULL:
        return list(itertools.product(specs(), HISTOGRAMS))
    chosen = [(spec, THICK) for spec in PAIRS]
    names = itertools.cycle(name for name in HISTOGRAMS if name != THICK)
    for product in Product:
        of_product = [spec for spec in specs() if spec.product is product]
        for i in range(max(len(HISTOGRAMS) - 1, len(of_product))):
            chosen.append((of_product[i % len(of_product)], next(names)))
    return chosen


def name(value: Any) -> str | None:
    """For pytest."""
    if not isinstance(value, config.KernelSpec):
        return None
    tile = f"{value.config.tile_m}x{value.config.tile_n}x{value.config.cluster}"
    return f"{value.product.value}-{value.in_dtype}-{value.out_dtype}{'-bias' * value.has_bias}-{tile}"


@pytest.mark.parametrize(("spec", "histogram"), pairwise(), ids=name)
def test_every_kernel(spec: config.KernelSpec, histogram: str) -> None:
    check(spec, histogram, multiprocessors=2 * spec.config.cluster)


@pytest.mark.parametrize("multiprocessors", [1, 3])
@pytest.mark.parametrize("spec", PAIRS if FULL else PAIRS[:1], ids=name)
def test_pairs_where_a_multiprocessor_has_no_other(spec: config.KernelSpec, multiprocessors: int) -> None:
    check(spec, "ragged tails", multiprocessors=multiprocessors)


@pytest.mark.parametrize("seed", range(20 if FULL else 2))
@pytest.mark.parametrize("histogram", HISTOGRAMS if FULL else ["ragged tails"])
@pytest.mark.parametrize("spec", DEFAULTS, ids=name)
def test_no_order_of_events_is_wrong(spec: config.KernelSpec, histogram: str, seed: int) -> None:
    check(spec, histogram, columns=(200, 264), seed=seed)


@pytest.mark.parametrize("spec", DEFAULTS if FULL else DEFAULTS[::3], ids=name)
def test_long_contractions_and_whole_tiles(spec: config.KernelSpec) -> None:
    check(spec, "even", m=384, columns=(512, 512))


@pytest.mark.parametrize("spec", DEFAULTS, ids=name)
def test_no_product_waits_for_the_one_before(spec: config.KernelSpec) -> None:
    assert not check(spec, "even").warnings


@pytest.mark.parametrize(
    ("rows", "multiprocessors", "blocks"),
    [
        (30, 16, 15),  # 8 full rounds of the 120 tiles
        (30, 13, 13),  # 12 blocks would have 10 full rounds, but one in 13 is too many to leave out
        (1300, 16, 16),  # groups may have more than one row of tiles
    ],
)
def test_groups_of_one_row_of_tiles_take_as_many_blocks_as_make_rounds_full(
    rows: int, multiprocessors: int, blocks: int
) -> None:
    spec = config.KernelSpec(Product.FORWARD, BF16, BF16, False, config.pick(Product.FORWARD, 30, 72, 704, 40))
    arrays = operands(spec, "more groups than tiles", rows, 72, 704)  # 40 groups of 3 tiles
    memory, out = ptx_emulator.Memory(), kernels.empty((1, rows, 704), BF16)
    for operand, array in arrays.items():
        memory.add(operand, array)
    memory.add("out", out, writable=True, initialised=False)
    arguments = kernels.arguments(spec, arrays, out, multiprocessors)
    launch, _ = kernels.compiled(spec, "sm_90a").launch(arguments, memory)
    assert launch.grid == (blocks, 1, 1)


# ---- whole programs ----

EMULATED = ptx_emulator.implementation("sm_90a", multiprocessors=2)


def test_the_emulator_takes_what_the_gpu_takes() -> None:
    lhs, rhs, sizes = jnp.ones((8, 16), jnp.int32), jnp.ones((2, 16, 16), jnp.int32), jnp.array([4, 4])
    with pytest.raises(NotImplementedError, match="int32"):
        jax_ggemm.ragged_dot(lhs, rhs, sizes, implementation=EMULATED)


@pytest.mark.parametrize(("batch", "multiprocessors"), [((), 2), ((2,), 4)])
def test_values_and_gradients_under_jit(batch: tuple[int, ...], multiprocessors: int) -> None:
    rng = np.random.default_rng(0)

    def array(*shape: int) -> jax.Array:
        return jnp.asarray(rng.integers(-3, 4, batch + shape), jnp.bfloat16)

    lhs, rhs, cotangent = array(330, 136), array(3, 136, 264), array(330, 264)
    sizes = jnp.broadcast_to(jnp.array([200, 0, 44, 70], jnp.int32), (*batch, 4))
    offset = jnp.array([1, -1], jnp.int32) if batch else jnp.int32(0)

    def program(implementation: Any, lhs: jax.Array, rhs: jax.Array) -> Any:
        def product(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, offset: jax.Array) -> jax.Array:
            return jax_ggemm.ragged_dot(lhs, rhs, sizes, group_offset=offset, implementation=implementation)

        for _ in batch:
            product = jax.vmap(product)
        value, pullback = jax.vjp(lambda lhs, rhs: product(lhs, rhs, sizes, offset), lhs, rhs)
        return value, *pullback(cotangent)

    implementation = dataclasses.replace(EMULATED, multiprocessors=multiprocessors)
    emulated = jax.jit(functools.partial(program, implementation))(lhs, rhs)
    reference = jax.jit(functools.partial(program, "xla"))(lhs, rhs)
    for got, want in zip(emulated, reference, strict=True):
        np.testing.assert_array_equal(got, want)


def test_the_layer() -> None:
    assert_layer_equals_plain_jax(EMULATED)


def test_a_plan_that_differs_from_the_launch_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = DEFAULTS[0]
    plan = dataclasses.replace(spec)
    monkeypatch.setattr(config.KernelSpec, "shared_memory_bytes", 1234)
    arrays = operands(plan, "even", M, 72, 264)
    with pytest.raises(AssertionError, match="the plan has 1234"):
        kernels.run(plan, "sm_90a", arrays, (1, M, 264), multiprocessors=2)
