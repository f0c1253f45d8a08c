"""The Blackwell kernels: what is planned, and that the compiled kernels do as planned. They have never run on a GPU."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import re
import struct
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_ggemm import compile_objects, cute, tuned
from jax_ggemm.kernel import architectures, config, pick_sm100
from jax_ggemm.kernel.config_sm100 import FIXED_BYTES, SMEM_BYTES, TMEM_COLUMNS, Eviction, Sm100Config
from jax_ggemm.kernel.pick_sm100 import FEW_ROWS, PAIR, SMALL, TOKENS_16, TOKENS_96, TOKENS_448, WIDE_PAIR
from jax_ggemm.products import Call, Operands, Product

pytestmark = pytest.mark.once

ARCH = "sm_100a"
BF16, F16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32)
VARYING = [TOKENS_96, TOKENS_448]
CANDIDATES = [TOKENS_16, *VARYING, FEW_ROWS, SMALL, PAIR, WIDE_PAIR]


def name(value: Any) -> str | None:
    """For pytest."""
    return f"{value.tile_m}x{value.tile_n}" if isinstance(value, Sm100Config) else None


# ---- plans ----


@pytest.mark.parametrize("candidate", CANDIDATES, ids=name)
def test_shared_memory_is_full(candidate: Sm100Config) -> None:
    assert candidate.shared_memory_bytes <= SMEM_BYTES
    one_more = candidate.stage_bytes + candidate.weight_stage_bytes
    if candidate.weight_k_tiles > 1:  # the operands have rings of their own, but none waits for the other
        filled = candidate.weight_stages * candidate.weight_k_tiles
        assert candidate.stages <= filled
        one_more = candidate.weight_stage_bytes
        if candidate.stages < filled:
            one_more = min(one_more, candidate.stage_bytes)
    assert candidate.shared_memory_bytes + one_more > SMEM_BYTES
    assert candidate.tmem_columns in {32, 64, 256, TMEM_COLUMNS}


def test_the_first_posts_kernel_has_a_seventh_stage() -> None:
    assert (SMALL.tile_m, SMALL.tile_n, SMALL.stages) == (128, 128, 7)
    staging = 24 * 1024  # what its results left through before
    assert SMALL.shared_memory_bytes + staging > SMEM_BYTES
    assert dataclasses.replace(SMALL, stages=6, weight_stages=6).shared_memory_bytes + staging <= SMEM_BYTES


def test_results_that_are_staged_cost_a_stage() -> None:
    for candidate in (SMALL, PAIR):
        with pytest.raises(ValueError, match="stages"):
            dataclasses.replace(candidate, staged=True)
        fewer = dataclasses.replace(candidate, stages=6, weight_stages=6)
        staged = dataclasses.replace(fewer, staged=True)
        assert staged.shared_memory_for(BF16) == fewer.shared_memory_bytes + 4 * 2 * 32 * 128
        assert staged.shared_memory_for(F32) == fewer.shared_memory_bytes
    assert dataclasses.replace(WIDE_PAIR, staged=True).stages == WIDE_PAIR.stages


@pytest.mark.parametrize(
    "wrong",
    [
        {"tile_m": 32},
        {"tile_n": 512},
        {"tile_m": 256, "tile_n": 64},
        {"stages": 5, "weight_stages": 5},
        {"stages": 1, "weight_stages": 1},
        {"stages": 3},
        {"weight_k_tiles": 3},
        {"splits_accumulator": True},
        {"swapped": True, "tile_m": 256, "tile_n": 256},
        {"tile_m": 16},
        {"varying": True, "tile_n": 128},
        {"swapped": True, "varying": True, "tile_m": 528},
        {"swapped": True, "varying": True, "tile_m": 48},
        {"swapped": True, "varying": True, "tile_n": 512},
        {"tile_m": 64, "tile_n": 128, "staged": True},
        {"multicast": 3},
        {"swapped": True, "tile_n": 128, "multicast": 2},
    ],
    ids=str,
)
def test_plans_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"no kernel|stages|tiles of the contraction|accumulator"):
        Sm100Config(**wrong)


def test_operands_are_swapped_where_rows_are_ragged_only() -> None:
    with pytest.raises(ValueError, match="not swapped"):
        config.KernelSpec(Product.DRHS, BF16, BF16, False, TOKENS_16)


def test_held_stages_leave_room_for_loads() -> None:
    for candidate in CANDIDATES:
        assert 1 <= candidate.held_stages < candidate.stages
    assert WIDE_PAIR.held_stages == WIDE_PAIR.stages // 2
    paired = Sm100Config(256, 512, 2, weight_k_tiles=2, weight_stages=2, splits_accumulator=True)
    assert paired.held_stages == 2 or paired.stages <= 2


@pytest.mark.parametrize("product", list(Product))
@pytest.mark.parametrize("m", [1, 512, 2048, 8192, 32768, 2**20])
@pytest.mark.parametrize("columns", [8, 768, 6144])
def test_what_is_picked_is_a_candidate(product: Product, m: int, columns: int) -> None:
    assert pick_sm100.pick(product, m, columns, columns, 32) in pick_sm100.candidates(product)


def test_groups_of_few_rows_take_tiles_of_few_rows() -> None:
    assert pick_sm100.pick(Product.FORWARD, 32 * 8, 6144, 4096, 32) == TOKENS_16
    assert pick_sm100.pick(Product.DLHS, 32 * 16, 6144, 4096, 32) == TOKENS_96
    assert pick_sm100.pick(Product.FORWARD, 32 * 64, 6144, 4096, 32) == TOKENS_96
    assert pick_sm100.pick(Product.FORWARD, 32 * 65, 6144, 4096, 32) != TOKENS_96
    assert pick_sm100.pick(Product.FORWARD, 32 * 4096, 6144, 4096, 32) == WIDE_PAIR


@pytest.mark.parametrize("rows", [128, 160, 256, 320])
def test_groups_of_some_hundred_rows_take_tiles_that_vary(rows: int) -> None:
    for product in (Product.FORWARD, Product.DLHS):
        assert pick_sm100.pick(product, 32 * rows, 6144, 4096, 32) == TOKENS_448
    assert not pick_sm100.pick(Product.DRHS, 32 * rows, 6144, 4096, 32).varying


def test_the_model_counts_what_tiles_cost() -> None:
    shape = (Product.FORWARD, 8 * 4096, 4096, 4096, 8)
    small, pair = (pick_sm100.estimate(candidate, *shape) for candidate in (SMALL, PAIR))
    dense = 2 * shape[1] * shape[2] * shape[3] / pick_sm100.FLOPS
    assert dense < pair < small  # a pair reads half as much for each product
    read = 2 * 64 * 4096 * 4096
    assert pick_sm100.estimate(FEW_ROWS, Product.FORWARD, 64, 4096, 4096, 64) >= read / pick_sm100.MEMORY_RATE


def test_each_architecture_has_its_configurations() -> None:
    for arch, known in architectures.BY_NAME.items():
        problem = tuned.Problem(Product.FORWARD, BF16, BF16, 4096, 1024, 1024, 8)
        assert isinstance(tuned.pick(problem, arch), Sm100Config) == arch.startswith("sm_10")
        assert set(known.candidates(Product.FORWARD)) <= set(architectures.candidates(Product.FORWARD))


@pytest.mark.parametrize("precision", [None, "highest"])
def test_float32_is_multiplied_as_tf32_where_the_precision_allows_it(
    precision: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    operands = Operands(jnp.zeros((8, 16)), jnp.zeros((2, 16, 16)), jnp.zeros(2, jnp.int32), jnp.int32(0))
    call = Call(Product.FORWARD, F32, 2, None if precision is None else cute.lax.Precision.HIGHEST, None)
    monkeypatch.setattr(cute.Targets, "unavailable", lambda self, spec, arch: None)
    assert "float32" in str(cute.unsupported(call, operands, cute.Targets(("sm_90a",))))
    assert "float32" in str(cute.unsupported(call, operands, cute.Targets(("sm_90a", ARCH))))
    reason = cute.unsupported(call, operands, cute.Targets((ARCH,)))
    assert reason is None if precision is None else "HIGHEST" in str(reason)


# ---- compiled ----

cutlass = pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

from ptx_emulator import kernels, parser  # noqa: E402


def spec_of(product: Product, candidate: Sm100Config, dtype: np.dtype = BF16) -> config.KernelSpec:
    return config.KernelSpec(product, dtype, dtype, False, candidate)


PLAIN = dataclasses.replace(FEW_ROWS, wide_boxes=False)
NARROW_STORES = dataclasses.replace(SMALL, wide_stores=False)
WHOLE = dataclasses.replace(WIDE_PAIR, splits_accumulator=False)
STAGED = dataclasses.replace(SMALL, stages=6, weight_stages=6, staged=True)
DYNAMIC = [dataclasses.replace(candidate, dynamic=True) for candidate in (FEW_ROWS, PAIR)]
SHARED = [dataclasses.replace(candidate, multicast=2) for candidate in (SMALL, PAIR)]
EVERY = [spec_of(product, candidate) for product in Product for candidate in pick_sm100.candidates(product)]


@pytest.fixture(scope="module", autouse=True)
def compiled_at_once() -> None:
    others = [(Product.DLHS, PLAIN), (Product.FORWARD, NARROW_STORES), (Product.FORWARD, WHOLE)]
    kernels.compile_all([*EVERY, *(spec_of(*other) for other in others), *OTHERS], ARCH)


def ptx(product: Product, candidate: Sm100Config) -> str:
    return kernels.compiled(spec_of(product, candidate), ARCH).ptx


def loads(text: str) -> list[str]:
    """The instructions that load through the TMA unit."""
    return re.findall(r"cp\.async\.bulk\.tensor\.\dd\.shared::\S+", text)


@functools.cache
def launched(
    product: Product, candidate: Sm100Config, shape: tuple[int, int, int, int] = (512, 512, 1024, 2)
) -> tuple[Any, list[bytes]]:
    """A launch of (m, k, n, groups), and its parameters."""
    spec = spec_of(product, candidate)
    kernel = kernels.compiled(spec, ARCH)
    m, k, n, w = shape
    lhs = np.zeros((1, m, n if product is Product.DLHS else k), BF16)
    rhs = np.zeros((1, m, n) if product is Product.DRHS else (1, w, k, n), BF16)
    out = {Product.FORWARD: (1, m, n), Product.DLHS: (1, m, k), Product.DRHS: (1, w, k, n)}[product]
    arrays = {
        "lhs": lhs,
        "rhs": rhs,
        "group_sizes": np.zeros((1, w), np.int32),
        "group_offset": np.zeros(1, np.int32),
    }
    found: list[tuple[Any, list[bytes]]] = []

    def on_launch(asked: Any) -> None:
        sizes = [param.size for param in parser.parse(kernel.ptx)[asked.kernel].params]
        found.append((asked, asked.params(sizes)))

    kernel.host.run(kernels.arguments(spec, arrays, np.zeros(out, BF16), 148), on_launch)
    (only,) = found
    return only


def boxes(product: Product, candidate: Sm100Config) -> list[tuple[int, ...]]:
    """The box of each tensor map, innermost axis first."""
    maps = [param for param in launched(product, candidate)[1] if len(param) == 128]
    result = []
    for words in (struct.unpack("<8Q", data[:64]) for data in maps):
        rank = (words[1] >> 4 & 7) + 1
        extents = [words[6] >> 56 & 255, *(words[7] >> 8 * i & 255 for i in range(4))]
        result.append(tuple(extent + 1 for extent in extents[:rank]))
    return result


OTHERS = [
    spec_of(product, candidate)
    for product, candidate in [
        (Product.DRHS, STAGED),
        *zip((Product.FORWARD, Product.DRHS), DYNAMIC, strict=True),
        *zip((Product.FORWARD, Product.DRHS), SHARED, strict=True),
    ]
]


@pytest.mark.parametrize("spec", [*EVERY, *OTHERS], ids=lambda spec: f"{spec.product.value}-{name(spec.config)}")
def test_a_kernel_is_one_launch_without_spills(spec: config.KernelSpec) -> None:
    compiled = kernels.compiled(spec, ARCH)
    assert compiled.ptx.count(".entry") == 1
    asked, _ = launched(spec.product, spec.config)
    blocks, cluster = spec.config.blocks, spec.config.cluster_blocks
    if not spec.config.dynamic:
        assert asked.grid == (148 // cluster * cluster, 1, 1)
    assert asked.cluster == (cluster, 1, 1)
    assert asked.shared_bytes == spec.shared_memory_bytes <= asked.allowed_shared_bytes
    assert asked.shared_bytes - FIXED_BYTES == (
        spec.config.stages * spec.config.stage_bytes
        + spec.config.weight_stages * spec.config.weight_stage_bytes
        + spec.config.staging_bytes
    )
    found = compile_objects.resources(compiled.data)
    assert not found.get("spill_instructions")
    assert not found.get("local_bytes")
    assert found.get("registers", 0) * asked.block[0] <= 65536
    group = f"cta_group::{blocks}"
    assert re.search(rf"tcgen05\.mma\.{group}", compiled.ptx)
    assert f"cta_group::{3 - blocks}" not in compiled.ptx


@pytest.mark.parametrize("product", list(Product))
@pytest.mark.parametrize("candidate", [SMALL, PAIR, WIDE_PAIR], ids=name)
def test_results_go_from_registers_to_global_memory_by_32_bytes(product: Product, candidate: Sm100Config) -> None:
    text = ptx(product, candidate)
    assert "st.global.v8.b32" in text
    assert not re.search(r"cp\.async\.bulk\.tensor\.\dd\.global", text)
    assert not re.search(r"stmatrix|st\.shared\.v", text)


def test_wide_stores_can_be_left_out() -> None:
    text = ptx(Product.FORWARD, NARROW_STORES)
    assert "st.global.v8.b32" not in text
    assert "st.global.v4.b32" in text


def test_64_rows_are_read_by_all_lanes_of_a_warp() -> None:
    text = ptx(Product.FORWARD, FEW_ROWS)
    assert "tcgen05.ld.sync.aligned.16x32bx2.x64" in text
    assert (64, 64) in boxes(Product.FORWARD, FEW_ROWS)  # a K tile of 64 rows of lhs


def test_a_stage_of_weights_is_two_tiles_of_the_contraction_from_one_box() -> None:
    # Contiguous along the contraction: 256 bytes of each of 128 rows.
    assert (64, 128, 2, 1) in boxes(Product.DLHS, FEW_ROWS)
    assert not any(len(box) == 4 for box in boxes(Product.DLHS, PLAIN))
    # Contiguous along n: 256 bytes of each of the 128 rows of two tiles of the contraction.
    assert (64, 128, 2, 1) in boxes(Product.FORWARD, FEW_ROWS)
    # lhs; the wide box; the two boxes of the end of a row.
    assert len(loads(ptx(Product.DLHS, FEW_ROWS))) == 4
    assert len(loads(ptx(Product.DLHS, PLAIN))) == 3
    assert FEW_ROWS.weight_stage_bytes == 2 * 64 * 2 * 128


def test_a_pair_loads_half_of_each_operand() -> None:
    assert (64, 128) in boxes(Product.FORWARD, PAIR)
    assert (64, 64, 2, 1) in boxes(Product.FORWARD, PAIR)
    assert all("cta_group::2" in load for load in re.findall(r"cp\.async\.bulk\.tensor.*", ptx(Product.FORWARD, PAIR)))


def test_each_half_of_the_accumulator_is_released_on_its_own() -> None:
    split, whole = (ptx(Product.FORWARD, candidate) for candidate in (WIDE_PAIR, WHOLE))
    # The last read of each half is waited for, and then its barrier is arrived at.
    assert split.count("tcgen05.wait::ld") == 2
    assert whole.count("tcgen05.wait::ld") == 1
    # Stages of the first half are added alone, then those of the second, then both: 4 products each.
    assert len(re.findall(r"tcgen05\.mma\.", split)) == 4 * (1 + 1 + 2)
    assert len(re.findall(r"tcgen05\.mma\.", whole)) == 4 * 2
    # The two releases of a stage, the two ways to hand over the first half, and the second half.
    assert len(re.findall(r"tcgen05\.commit", split)) == 5
    assert len(re.findall(r"tcgen05\.commit", whole)) == 2
    assert WIDE_PAIR.tmem_columns == TMEM_COLUMNS


@pytest.mark.parametrize("product", [Product.FORWARD, Product.DLHS])
def test_swapped_operands_have_the_weights_as_rows_of_the_product(product: Product) -> None:
    candidate = TOKENS_16
    text = ptx(product, candidate)
    assert (64, candidate.tile_m) in boxes(product, candidate)
    assert (64, 128, 2, 1) in boxes(product, candidate)
    assert f"tcgen05.ld.sync.aligned.32x32b.x{candidate.tile_m}" in text
    # M is 128 / 16 at bit 24 of the descriptor, N is tile_m / 8 at bit 17.
    descriptor = (8 << 24) + (candidate.tile_m // 8 << 17)
    constants = {int(number) for number in re.findall(r"selp\.b32\s+%r\d+, \d+, (\d+), %p\d+;", text)}
    assert {number & 0x1FFE0000 for number in constants if number >> 24} == {descriptor}


@pytest.mark.parametrize("candidate", VARYING, ids=name)
@pytest.mark.parametrize("product", [Product.FORWARD, Product.DLHS])
def test_tiles_that_vary_load_and_multiply_what_they_have(product: Product, candidate: Sm100Config) -> None:
    text = ptx(product, candidate)
    assert (64, 16) in boxes(product, candidate)  # half a granule of tokens, for each block of a pair
    assert f"tcgen05.ld.sync.aligned.32x32b.x{candidate.granule}" in text
    # A warp stores neighbouring columns of a row, and trades nothing.
    assert "st.global.b16" in text
    assert "shfl.sync.bfly" not in text
    # The descriptor is a sum: M is 256 / 16 at bit 24, the rest is constant but for N / 8 at bit 17.
    products = re.findall(r"tcgen05\.mma\.cta_group::2\.\S+ \[%r\d+\], %rd\d+, %rd\d+, (%r\d+), ", text)
    assert len(products) == 4 * (4 if candidate.slots_per_tile > 1 else 1)
    for register in set(products):
        tokens, constant = re.findall(rf"(?:add\.s32|or\.b32)\s+{register}, (%r\d+), (\d+);", text)[0]
        assert int(constant) >> 17 == 16 << 7
        assert re.search(rf"shl\.b32\s+{tokens}, %r\d+, 14;", text)


def test_results_leave_through_shared_memory_where_they_are_staged_only() -> None:
    store = "cp.async.bulk.tensor.3d.global.shared::cta"
    for spec in EVERY:
        assert "global.shared" not in kernels.compiled(spec, ARCH).ptx
    staged = ptx(Product.DRHS, STAGED)
    assert staged.count(store) == 1
    assert (64, 32, 1) in boxes(Product.DRHS, STAGED)


def test_tiles_are_asked_for_where_scheduling_is_dynamic_only() -> None:
    for spec in EVERY:
        assert "clusterlaunchcontrol" not in kernels.compiled(spec, ARCH).ptx
    one, pair = ptx(Product.FORWARD, DYNAMIC[0]), ptx(Product.DRHS, DYNAMIC[1])
    for text in (one, pair):
        # At the end of the list of tiles, and past it.
        assert len(re.findall(r"clusterlaunchcontrol\.try_cancel\.async", text)) == 2
        assert len(re.findall(r"clusterlaunchcontrol\.query_cancel\.is_canceled", text)) == 2
        # What no cluster was taken for has no number.
        assert len(re.findall(r"@\S+ clusterlaunchcontrol\.query_cancel\.get_first_ctaid", text)) == 2
    assert "try_cancel.async.shared::cta.mbarrier" in one
    assert "multicast::cluster::all" not in one
    assert pair.count("multicast::cluster::all") == 2


@pytest.mark.parametrize(
    "shape", [(512, 512, 1024, 2), (1000, 64, 128, 3), (5, 64, 200, 7), (64, 64, 128, 0), (1, 8, 8, 9)]
)
def test_a_dynamic_launch_has_a_cluster_for_every_tile_that_there_can_be(shape: tuple[int, int, int, int]) -> None:
    m, k, n, groups = shape
    few, pair = DYNAMIC
    # The most tiles along m: one row for each group, and all others for the rows of no group.
    used = min(groups, m - 1)
    tiles = used + -(-(m - used) // few.tile_m)
    assert launched(Product.FORWARD, few, shape)[0].grid == (tiles * -(-n // few.tile_n), 1, 1)
    tiles = groups * -(-k // pair.tile_m) * -(-n // pair.tile_n)
    asked, _ = launched(Product.DRHS, pair, shape)
    assert asked.grid == (2 * max(tiles, 1), 1, 1)
    assert asked.cluster == (2, 1, 1)


def masks(text: str, instruction: str) -> list[int]:
    """The constants that masks of multicasts are, or are shifted from by the place of a block."""
    found = []
    for register in re.findall(rf"{instruction}\S*multicast::cluster\S*.*(%rs\d+)", text):
        shifted = re.search(rf"shl\.b16\s+{register}, (%rs\d+), ", text)
        constant = re.search(rf"mov\.b16\s+{shifted[1] if shifted else register}, (\d+);", text)
        assert constant is not None
        found.append(int(constant[1]))
    return found


def test_tiles_that_share_their_rows_load_half_of_them_each_for_both() -> None:
    for spec in EVERY:
        assert "bytes.multicast::cluster" not in kernels.compiled(spec, ARCH).ptx
    one, pair = ptx(Product.FORWARD, SHARED[0]), ptx(Product.DRHS, SHARED[1])
    # To both blocks, of which each has a tile; to the blocks of two pairs that hold the same rows.
    assert masks(one, r"cp\.async\.bulk\.tensor") == [0b11]
    assert masks(pair, r"cp\.async\.bulk\.tensor") == [0b101, 0b101]
    # Half of a tile of 128 rows; of the rows that are contracted, half of 64, for 64 columns at a time.
    assert (64, 64) in boxes(Product.FORWARD, SHARED[0])
    assert (64, 128) in boxes(Product.FORWARD, SMALL)
    assert (64, 32, 1, 1) in boxes(Product.DRHS, SHARED[1])
    # A stage is returned to every block of the cluster, by each tile; a slot to those of one tile.
    assert masks(one, r"tcgen05\.commit") == [0b11]
    assert masks(pair, r"tcgen05\.commit") == [0b1111, 0b11]
    for candidate in SHARED:
        alone = dataclasses.replace(candidate, multicast=1)
        assert candidate.cluster_blocks == 2 * alone.cluster_blocks
        assert candidate.shared_memory_bytes == alone.shared_memory_bytes
        assert (candidate.stages, candidate.stage_bytes) == (alone.stages, alone.stage_bytes)


def test_weights_have_their_policy_in_l2() -> None:
    first = ptx(Product.FORWARD, FEW_ROWS)
    assert str(Eviction.FIRST.value) in first
    assert str(Eviction.FIRST.value) not in ptx(Product.FORWARD, SMALL)


def test_every_dtype_compiles_for_every_architecture() -> None:
    for arch in ("sm_100a", "sm_103a"):
        for dtype in (F16, F32):
            kernel = kernels.compiled(spec_of(Product.FORWARD, PAIR, dtype), arch)
            assert f".target {arch}" in kernel.ptx
            assert ("kind::tf32" if dtype == F32 else "kind::f16") in kernel.ptx


def test_arguments_are_those_of_the_custom_call() -> None:
    values = kernels.arguments(
        EVERY[0],
        {
            "lhs": np.zeros((1, 8, 16), BF16),
            "rhs": np.zeros((1, 2, 16, 8), BF16),
            "group_sizes": np.zeros((1, 2), np.int32),
            "group_offset": np.zeros(1, np.int32),
        },
        np.zeros((1, 8, 8), BF16),
        148,
    )
    assert [type(value) for value in values] == [ctypes.c_void_p] * 7 + [ctypes.c_int32] * 10
