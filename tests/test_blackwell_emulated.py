"""The Blackwell kernels, executed by the PTX emulator: right results, and no fault in any order of events.

No such GPU was at hand: this is all that says that they are right.
"""

from __future__ import annotations

import ctypes
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
from jax_ggemm.kernel import config, pick_sm100
from jax_ggemm.kernel.config_sm100 import Sm100Config
from jax_ggemm.kernel.pick_sm100 import FEW_ROWS, PAIR, SMALL, TOKENS_16, TOKENS_96, TOKENS_448, WIDE_PAIR
from jax_ggemm.products import Product

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

from cutlass import cute
from ptx_emulator import kernels
from ptx_emulator.testbeds.tcgen05_gemm import Tcgen05Gemm
from ptx_mutations.blackwell_text import out_of_order

pytestmark = pytest.mark.emulator

ARCH = "sm_100a"
FULL = "JAX_GGEMM_TEST_FULL" in os.environ
BF16, F16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32)


@dataclasses.dataclass(frozen=True)
class Groups:
    """Group sizes, and which of them have weights."""

    sizes: tuple[int, ...]
    offset: int = 0
    weights: int | None = None


HISTOGRAMS = {
    "even": Groups((128, 128)),
    "empty": Groups((0, 0, 0)),
    "single": Groups((1, 1, 1, 1)),
    "tails": Groups((100, 0, 3, 157)),
    "one_of_all": Groups((0, 300, 0)),
    "many": Groups((2, 0, 1, 0, 0, 3, 0, 0) * 5),
    "rows_of_no_group": Groups((50, 20)),
    "too_many_rows": Groups((200, 300, 10)),
    "negative": Groups((-5, 130, -1, 64)),
    "offset": Groups((50, 60, 70, 80, 20), 2, 2),
    "offset_negative": Groups((60, 60), -1, 3),
}
M = 300
COLUMNS = [(72, 264), (200, 136), (136, 520), (8, 8)]
"""(k, n): tails of a segment, an odd number of tiles of the contraction, more than one tile, less than one."""

SWITCHES = [
    dataclasses.replace(FEW_ROWS, wide_boxes=False, wide_stores=False),
    Sm100Config(64, 128, 9, weight_stages=9),
    Sm100Config(128, 256, 4, weight_stages=4),
    Sm100Config(128, 256, 2, weight_k_tiles=2, weight_stages=2),
    Sm100Config(256, 128, 9, weight_stages=9),
    Sm100Config(256, 512, 2, weight_k_tiles=2, weight_stages=2, splits_accumulator=True),
    dataclasses.replace(WIDE_PAIR, splits_accumulator=False),
    dataclasses.replace(WIDE_PAIR, stages=2, weight_stages=2),
    Sm100Config(256, 256, 6, weight_stages=6, staged=True),
    dataclasses.replace(WIDE_PAIR, staged=True),
    Sm100Config(128, 128, 6, weight_stages=6, staged=True),
    Sm100Config(64, 128, 9, weight_stages=9, swapped=True),
    Sm100Config(128, 128, 2, weight_stages=2, swapped=True, wide_boxes=False),
]
"""Each of the changes off, and rings as small as they can be. By default, every fourth of the first eleven."""

DYNAMIC = [
    *(dataclasses.replace(candidate, dynamic=True) for candidate in (TOKENS_16, FEW_ROWS, SMALL, PAIR, WIDE_PAIR)),
    *(dataclasses.replace(candidate, dynamic=True, multicast=2) for candidate in (SMALL, PAIR)),
]


def shipped() -> list[config.KernelSpec]:
    """Every kernel of a release, or a choice: each configuration with each product, and with each dtype."""
    every = list(config.default_specs([BF16, F16, F32], pick_sm100.candidates))
    if FULL:
        return every
    chosen = []
    pairs = [(product, candidate) for product in Product for candidate in pick_sm100.candidates(product)]
    for i, (product, candidate) in enumerate(pairs):
        if i % 3 == 0:  # compiled for tests/test_blackwell.py too
            chosen.append(config.KernelSpec(product, BF16, BF16, False, candidate))
            continue
        dtype = (F16, F32)[i % 3 - 1]
        out = F32 if i % 2 else dtype
        chosen.append(config.KernelSpec(product, dtype, out, product.rows_are_ragged, candidate))
    return chosen


def cases() -> list[tuple[config.KernelSpec, str]]:
    """(kernel, histogram): every kernel, and every histogram with every product."""
    if FULL:
        return list(itertools.product(shipped(), HISTOGRAMS))
    chosen, names = [], itertools.cycle(HISTOGRAMS)
    for product in Product:
        of_product = [spec for spec in shipped() if spec.product is product]
        chosen += [(of_product[i % len(of_product)], next(names)) for i in range(len(HISTOGRAMS))]
    return chosen


SHARED = [
    *(dataclasses.replace(candidate, multicast=2) for candidate in (SMALL, PAIR, WIDE_PAIR, FEW_ROWS)),
    Sm100Config(128, 128, 6, weight_stages=6, staged=True, multicast=2),
    Sm100Config(128, 256, 2, weight_k_tiles=2, weight_stages=2, multicast=2),
]
MULTICAST = (
    [
        config.KernelSpec(product, dtype, dtype, False, candidate)
        for product in Product
        for dtype in (BF16, F16, F32)
        for candidate in (SHARED if dtype == BF16 else SHARED[:3])
    ]
    if FULL
    # Those of tests/test_blackwell.py.
    else [
        config.KernelSpec(Product.FORWARD, BF16, BF16, False, SHARED[0]),
        config.KernelSpec(Product.DRHS, BF16, BF16, False, SHARED[1]),
    ]
)
"""Tiles that share their rows of lhs."""

TAKEN = [
    config.KernelSpec(product, BF16, BF16, False, candidate)
    for product in Product
    # By default, those of tests/test_blackwell.py and tests/test_ptx_mutations.py.
    for candidate in (DYNAMIC if FULL else [DYNAMIC[(1, 3, 3)[list(Product).index(product)]]])
    if product.rows_are_ragged or not candidate.swapped
]
SWITCHED = [
    config.KernelSpec(product, BF16, BF16, False, candidate)
    for product in Product
    for candidate in (SWITCHES if FULL else SWITCHES[list(Product).index(product) : 11 : 4])
    if product.rows_are_ragged or not candidate.swapped
]
STAGED = [candidate for candidate in reversed(SWITCHES) if candidate.staged]
BOTH = [dataclasses.replace(candidate, dynamic=True) for candidate in STAGED]


def mixed() -> list[tuple[config.KernelSpec, str, int]]:
    """(kernel, histogram, batch): tiles that are asked for, staged results, and both, with what else there is."""
    every = [
        config.KernelSpec(product, dtype, out, product.rows_are_ragged, candidate)
        for dtype, out, candidates in (
            (BF16, BF16, [*DYNAMIC, *STAGED, *BOTH]),
            (F16, F16, [*DYNAMIC, *STAGED, *BOTH]),
            (F32, F32, DYNAMIC),  # their results are never staged
            (F16, F32, BOTH),  # nor are these
        )
        for candidate in candidates
        for product in Product
        if product.rows_are_ragged or not candidate.swapped
    ]
    if FULL:
        places = ((i, spec, j, name) for i, spec in enumerate(every) for j, name in enumerate(HISTOGRAMS))
        return [(spec, name, 1 + (i + j) % 2) for i, spec, j, name in places]
    return [
        (config.KernelSpec(Product.FORWARD, F16, F16, True, BOTH[0]), "tails", 2),
        (config.KernelSpec(Product.FORWARD, F16, F16, True, BOTH[0]), "offset", 1),
        (config.KernelSpec(Product.DLHS, F32, F32, True, DYNAMIC[1]), "offset_negative", 2),
        (config.KernelSpec(Product.DLHS, F32, F32, True, DYNAMIC[1]), "rows_of_no_group", 1),
        (config.KernelSpec(Product.DRHS, BF16, BF16, False, DYNAMIC[3]), "offset", 2),
        (config.KernelSpec(Product.DRHS, BF16, BF16, False, STAGED[0]), "too_many_rows", 2),
    ]


IN_BF16 = [
    config.KernelSpec(product, BF16, BF16, False, candidate)
    for product in Product
    for candidate in (FEW_ROWS, SMALL, PAIR, WIDE_PAIR)
]
IN_BF16 += [config.KernelSpec(product, BF16, BF16, False, TOKENS_448) for product in (Product.FORWARD, Product.DLHS)]
RINGS_OF_TWO = Sm100Config(512, 256, 2, weight_stages=2, swapped=True, varying=True, wide_boxes=False)
VARYING = [
    config.KernelSpec(product, dtype, dtype, False, candidate)
    for product in (Product.FORWARD, Product.DLHS)
    for dtype in (BF16, F16, F32)
    for candidate in (
        TOKENS_448,
        TOKENS_96,
        RINGS_OF_TWO,
        dataclasses.replace(TOKENS_448, dynamic=True),
        Sm100Config(448, 256, 4, weight_k_tiles=2, weight_stages=3, swapped=True, varying=True),
        Sm100Config(256, 128, 4, weight_stages=4, swapped=True, varying=True),
        Sm100Config(512, 128, 2, weight_stages=2, swapped=True, varying=True),
    )
][:: 1 if FULL else 29]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """All kernels of this file, compiled in one process."""
    kernels.compile_all(
        [
            *shipped(),
            *SWITCHED,
            *TAKEN,
            *MULTICAST,
            *VARYING,
            *(spec for spec, _, _ in mixed()),
            *(IN_BF16 if FULL else IN_BF16[1::3]),
        ],
        ARCH,
    )


def name(value: Any) -> str | None:
    """For pytest."""
    if not isinstance(value, config.KernelSpec):
        return None
    c = value.config
    rings = f"{c.stages}-{c.weight_k_tiles}x{c.weight_stages}"
    dtypes = f"{value.in_dtype}-{value.out_dtype}{'-bias' * value.has_bias}"
    switches = "-dynamic" * c.dynamic + "-staged" * c.staged
    return f"{value.product.value}-{dtypes}-{c.tile_m}x{c.tile_n}-{rings}{switches}"


def operands(
    spec: config.KernelSpec, groups: Groups, shape: tuple[int, int, int], batch: int = 1, shared: bool = True
) -> dict[str, Any]:
    """Integers, whose sums are exact, and NaN in rows of no group.

    Args:
      spec: the kernel.
      groups: their sizes, which each batch element has in another order.
      shape: (m, k, n).
      batch: elements.
      shared: they have the same weights and bias.
    """
    m, k, n = shape
    rng = np.random.default_rng(len(groups.sizes))
    weights = len(groups.sizes) if groups.weights is None else groups.weights

    def integers(*extents: int) -> np.ndarray:
        return rng.integers(-4, 5, extents).astype(spec.in_dtype)

    lhs = integers(batch, m, n if spec.product is Product.DLHS else k)
    of_weights = 1 if shared else batch
    rhs = integers(of_weights, weights, k, n) if spec.product.rows_are_ragged else integers(batch, m, n)
    held = oracle.bounds(groups.sizes, m)[-1][1]
    lhs[:, held:] = np.nan
    if spec.product is Product.DRHS:
        rhs[:, held:] = np.nan
    arrays = {
        "lhs": lhs,
        "rhs": rhs,
        "group_sizes": np.array([np.roll(groups.sizes, i) for i in range(batch)], np.int32),
        "group_offset": np.full(batch, groups.offset, np.int32),
    }
    if spec.has_bias:
        arrays["bias"] = integers(of_weights, weights, n if spec.product is Product.FORWARD else k).astype(F32)
    return arrays


def expected(spec: config.KernelSpec, arrays: dict[str, Any], groups: Groups) -> np.ndarray:
    """The exact results of each batch element, rounded once."""
    results = []
    for i in range(arrays["lhs"].shape[0]):
        lhs, sizes = arrays["lhs"][i], arrays["group_sizes"][i]
        if spec.product is Product.DRHS:
            weights = len(groups.sizes) if groups.weights is None else groups.weights
            value = oracle.d_rhs(lhs, arrays["rhs"][i], sizes, weights, groups.offset).value
        else:
            rhs = arrays["rhs"][i % len(arrays["rhs"])]
            rhs = rhs if spec.product is Product.FORWARD else np.swapaxes(rhs, 1, 2)
            bias = arrays["bias"][i % len(arrays["bias"])] if spec.has_bias else None
            value = oracle.forward(lhs, rhs, sizes, groups.offset, bias).value
        results.append(value)
    return np.stack(results).astype(spec.out_dtype)


def check(
    spec: config.KernelSpec,
    groups: Groups,
    shape: tuple[int, int, int],
    *,
    seed: int = 0,
    batch: int = 1,
    shared: bool = True,
) -> Any:
    """Emulates a kernel, and compares bit for bit."""
    arrays = operands(spec, groups, shape, batch, shared)
    want = expected(spec, arrays, groups)
    got, report = kernels.run(spec, ARCH, arrays, want.shape, multiprocessors=2 + 2 * (seed % 2), seed=seed)
    np.testing.assert_array_equal(got, want)
    return report


@pytest.mark.parametrize(("spec", "histogram"), cases(), ids=name)
def test_every_kernel(spec: config.KernelSpec, histogram: str) -> None:
    at = list(HISTOGRAMS).index(histogram)
    check(spec, HISTOGRAMS[histogram], (M, *COLUMNS[at % len(COLUMNS)]), seed=at)


@pytest.mark.parametrize("spec", SWITCHED, ids=name)
@pytest.mark.parametrize("histogram", ["tails", "one_of_all"])
def test_each_change_can_be_left_out(spec: config.KernelSpec, histogram: str) -> None:
    check(spec, HISTOGRAMS[histogram], (M, 200, 520))


@pytest.mark.parametrize("spec", TAKEN, ids=name)
@pytest.mark.parametrize("histogram", HISTOGRAMS if FULL else ["tails", "many", "negative"])
def test_tiles_that_are_asked_for(spec: config.KernelSpec, histogram: str) -> None:
    for seed in range(3 if FULL else 1):
        check(spec, HISTOGRAMS[histogram], (M, 200, 520), seed=seed)


@pytest.mark.parametrize(
    ("spec", "histogram"),
    [*(itertools.product(MULTICAST, HISTOGRAMS) if FULL else zip(MULTICAST, ["tails", "many"], strict=True))],
    ids=name,
)
def test_tiles_that_share_their_rows(spec: config.KernelSpec, histogram: str) -> None:
    # An odd and an even number of tiles along n, and one tile, whose neighbour has no columns.
    for seed, shape in enumerate([(200, 520), (136, 200), (264, 1024), (8, 8)] if FULL else [(200, 520)]):
        check(spec, HISTOGRAMS[histogram], (M, *shape), seed=seed)


@pytest.mark.parametrize("spec", VARYING, ids=name)
@pytest.mark.parametrize("sizes", [(500, 0, 33, 257, 31), (448, 449, 256)], ids=str)
def test_tiles_that_vary(spec: config.KernelSpec, sizes: tuple[int, ...]) -> None:
    for seed in range(4 if FULL else 1):
        check(spec, Groups(sizes), (sum(sizes) + 20, 392, 264), seed=seed)


@pytest.mark.parametrize("spec", VARYING, ids=name)
def test_tokens_of_other_groups_change_nothing(spec: config.KernelSpec) -> None:
    sizes = (5, 300, 17, 33, 1, 290)
    arrays = operands(spec, Groups(sizes), (sum(sizes), 72, 264))
    want = expected(spec, arrays, Groups(sizes))
    for parity in (0, 1):
        poisoned, kept = arrays["lhs"].copy(), np.zeros(sum(sizes), bool)
        for group, (start, stop) in enumerate(oracle.bounds(sizes, sum(sizes))):
            kept[start:stop] = group % 2 == parity
        poisoned[:, ~kept] = np.nan
        got, _ = kernels.run(spec, ARCH, arrays | {"lhs": poisoned}, want.shape, multiprocessors=2, seed=parity)
        np.testing.assert_array_equal(got[:, kept], want[:, kept])


@pytest.mark.parametrize("spec", TAKEN, ids=name)
def test_tiles_come_in_any_order(spec: config.KernelSpec) -> None:
    kernel = kernels.compiled(spec, ARCH)
    groups, blocks = HISTOGRAMS["tails"], spec.config.cluster_blocks
    arrays = operands(spec, groups, (M, 512, 512))
    want = expected(spec, arrays, groups)
    memory, out = ptx_emulator.Memory(), kernels.empty(want.shape, BF16)
    for key, array in arrays.items():
        memory.add(key, array)
    memory.add("out", out, writable=True, initialised=False)
    arguments = kernels.arguments(spec, arrays, out, 2)
    launch, _ = kernel.launch(arguments, memory, ptx=out_of_order(kernel.ptx, blocks))
    assert launch.grid[0] % (2 * blocks) == 0
    np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize(("spec", "histogram", "batch"), mixed(), ids=name)
def test_tiles_that_are_asked_for_and_staged_results(spec: config.KernelSpec, histogram: str, batch: int) -> None:
    at = list(HISTOGRAMS).index(histogram)
    shape = (M, *COLUMNS[at % len(COLUMNS)])
    check(spec, HISTOGRAMS[histogram], shape, seed=at, batch=batch, shared=False)


@pytest.mark.parametrize("seed", range(20 if FULL else 3))
@pytest.mark.parametrize("spec", IN_BF16 if FULL else IN_BF16[1::3], ids=name)
def test_no_order_of_events_is_wrong(spec: config.KernelSpec, seed: int) -> None:
    check(spec, HISTOGRAMS["tails"], (M, 264, 520), seed=seed)


@pytest.mark.parametrize("spec", IN_BF16 if FULL else IN_BF16[1::3], ids=name)
def test_a_batch_is_a_longer_list_of_groups(spec: config.KernelSpec) -> None:
    check(spec, Groups((20, 0, 33)), (70, 72, 136), batch=2)


@pytest.mark.parametrize("k", [64, 192, 256] if FULL else [192])
def test_odd_and_even_numbers_of_tiles_of_the_contraction(k: int) -> None:
    for product in (Product.FORWARD, Product.DLHS):
        spec = config.KernelSpec(product, BF16, BF16, False, FEW_ROWS)
        shape = (M, k, 128) if product is Product.FORWARD else (M, 128, k)
        check(spec, HISTOGRAMS["tails"], shape)


# ---- whole programs ----

EMULATED = ptx_emulator.implementation(ARCH, multiprocessors=2)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_values_and_gradients_under_jit(dtype: Any) -> None:
    rng = np.random.default_rng(0)

    def array(*shape: int) -> jax.Array:
        return jnp.asarray(rng.integers(-3, 4, shape), dtype)

    lhs, rhs, cotangent = array(100, 24), array(3, 24, 136), array(100, 136)
    sizes = jnp.array([40, 0, 50], jnp.int32)

    def program(implementation: Any, lhs: jax.Array, rhs: jax.Array) -> Any:
        product = functools.partial(jax_ggemm.ragged_dot, implementation=implementation)
        value, pullback = jax.vjp(lambda lhs, rhs: product(lhs, rhs, sizes), lhs, rhs)
        return value, *pullback(cotangent)

    emulated = jax.jit(functools.partial(program, EMULATED))(lhs, rhs)
    reference = jax.jit(functools.partial(program, "xla"))(lhs, rhs)
    for got, want in zip(emulated, reference, strict=True):
        np.testing.assert_array_equal(got, want)


def test_the_layer() -> None:
    assert_layer_equals_plain_jax(EMULATED)


# ---- the test bed ----


@pytest.mark.parametrize("ctas", [1, 2])
@pytest.mark.parametrize("shape", [(128, 64, 64), (300, 72, 200)])
def test_the_test_bed(ctas: int, shape: tuple[int, int, int], tmp_path: Any) -> None:
    m, n, k = shape
    gemm = Tcgen05Gemm(ctas)
    options = f"--gpu-arch {ARCH} --keep-ptx --dump-dir {tmp_path}"
    built = cute.compile(gemm, *gemm.example_arguments(), options=options)
    kernel = kernels.CompiledKernel(built.dump_to_object(kernels.PREFIX), str(built.__ptx__))
    rng = np.random.default_rng(0)
    memory, arrays = ptx_emulator.Memory(), {}
    for key, extents in (("a", (m, k)), ("b", (n, k))):
        arrays[key] = rng.integers(-4, 5, extents).astype(BF16)
        memory.add(key, arrays[key])
    out = kernels.empty((m, n), F32)
    memory.add("out", out, writable=True, initialised=False)
    arguments = [
        ctypes.c_void_p(0),
        *(ctypes.c_void_p(array.ctypes.data) for array in (*arrays.values(), out)),
        *map(ctypes.c_int32, (m, n, k)),
    ]
    for seed in range(20 if FULL else 3):
        kernel.launch(arguments, memory, seed=seed)
        np.testing.assert_array_equal(out, arrays["a"].astype(F32) @ arrays["b"].astype(F32).T)
    assert not memory.unwritten("out")
