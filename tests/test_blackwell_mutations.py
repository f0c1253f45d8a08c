"""Faults put into the PTX of the Blackwell kernels: the emulator finds each, or the result is wrong."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from typing import Any

import ml_dtypes
import numpy as np
import oracle
import pytest

from jax_ggemm.kernel import config
from jax_ggemm.kernel.pick_sm100 import FEW_ROWS, WIDE_PAIR
from jax_ggemm.products import Product

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

from ptx_emulator import kernels
from ptx_emulator.emulator import Checks
from ptx_emulator.memory import Memory

pytestmark = pytest.mark.emulator

ARCH = "sm_100a"
SEEDS = 6
BF16 = np.dtype(ml_dtypes.bfloat16)
FULL = "JAX_GGEMM_TEST_FULL" in os.environ

HALVES = config.KernelSpec(Product.FORWARD, BF16, BF16, False, WIDE_PAIR)
"""A pair of blocks, an accumulator in halves, stages that are held."""
FEW = config.KernelSpec(Product.DLHS, BF16, BF16, False, FEW_ROWS)
"""One block, 64 rows, stages of weights that hold two tiles of the contraction."""


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One place of a kernel's PTX that is changed."""

    what: str
    spec: config.KernelSpec
    pattern: str
    occurrence: int
    """Of the pattern, from 0; negative from the end."""
    becomes: str
    depth: int = 328
    """Of the contraction. Short ones meet barriers that long ones cannot: 136 is an odd number of tiles, 72 is held."""

    def apply(self, ptx: str) -> str:
        """The mutated text."""
        found = list(re.finditer(self.pattern, ptx))
        assert found, f"{self.what}: the PTX has no {self.pattern}"
        match = found[self.occurrence]
        return ptx[: match.start()] + match.expand(self.becomes) + ptx[match.end() :]


WAIT = r"mbarrier\.try_wait\.parity\.shared\.b64 P1, \[%r\d+\], [^;]*;"
NO_WAIT = "mov.pred P1, -1;"
COMMIT = r"tcgen05\.commit\.[^;]*;"
LOAD = r"cp\.async\.bulk\.tensor\.{}d\.shared[^;]*;"
RING_ARRIVAL = r"mbarrier\.arrive\.shared\.b64 [^;]*;"
REMOTE_ARRIVAL = r"mbarrier\.arrive\.shared::cluster\.b64 _[^;]*;"


def dropped(spec: config.KernelSpec, pattern: str, *, depth: int = 328, **places: int) -> list[Mutation]:
    """One instruction left out, at each of the named places."""
    return [Mutation(f"without {what.replace('_', ' ')}", spec, pattern, at, "", depth) for what, at in places.items()]


def not_waited(spec: config.KernelSpec, *, depth: int = 328, **places: int) -> list[Mutation]:
    """A wait that does not wait."""
    return [
        Mutation(f"no wait for {what.replace('_', ' ')}", spec, WAIT, at, NO_WAIT, depth) for what, at in places.items()
    ]


MUTATIONS = [
    # The ring of work tiles.
    *not_waited(HALVES, a_free_work_slot=0, work_to_load=4, work_to_multiply=14, work_to_write=20),
    *dropped(HALVES, RING_ARRIVAL, arrival_of_a_work_tile=0, release_by_the_load_warp=3, release_by_the_epilogue=-1),
    # The stages.
    *not_waited(HALVES, a_free_stage=3, a_held_stage=11, a_later_stage=13),
    *dropped(HALVES, r"mbarrier\.arrive\.expect_tx[^;]*;", expected_bytes=0),
    *dropped(HALVES, COMMIT, release_of_held_stages=1, release_of_later_stages=3),
    Mutation("16 bytes fewer are expected", HALVES, r"98304;(\s*mbarrier\.arrive\.expect_tx)", 0, r"98288;\1"),
    Mutation(
        "stages are empty after two arrivals", HALVES, r"(mov\.b32\s+%r\d+, )1;(\s*mbarrier\.init)", 1, r"\g<1>2;\2"
    ),
    *dropped(HALVES, LOAD.format(2), load_of_lhs=0),
    *dropped(HALVES, LOAD.format(4), load_of_the_second_half_of_weights=1),
    Mutation("the peer's bytes are counted by itself", HALVES, r"-16777224", 0, "-1"),
    # The halves of the accumulator.
    *not_waited(HALVES, the_first_half_to_be_free=10, the_second_half_to_be_free=12),
    *not_waited(HALVES, the_first_half_to_be_done=18, the_second_half_to_be_done=19),
    *dropped(HALVES, COMMIT, handing_over_the_first_half=2, handing_over_the_second_half=4),
    *dropped(HALVES, REMOTE_ARRIVAL, release_of_the_first_half=0, release_of_the_second_half=2),
    Mutation("halves are free after 7 arrivals", HALVES, r"(mov\.b32\s+%r\d+, )8;(\s*mbarrier\.init)", 0, r"\g<1>7;\2"),
    Mutation("halves are free after 4 arrivals", HALVES, r"(mov\.b32\s+%r\d+, )8;(\s*mbarrier\.init)", 0, r"\g<1>4;\2"),
    Mutation("halves are free after 9 arrivals", HALVES, r"(mov\.b32\s+%r\d+, )8;(\s*mbarrier\.init)", 0, r"\g<1>9;\2"),
    Mutation(
        "a half is released to the other block", HALVES, r"(mapa\.shared::cluster\.u32\s+%r\d+, %r\d+, )0", 0, r"\g<1>1"
    ),
    Mutation("a half is released one piece early", HALVES, r"(setp\.ne\.b32\s+%p\d+, %r\d+, )3;", -2, r"\g<1>2;"),
    Mutation(
        "the catch-up goes to the first half", HALVES, r"(tcgen05\.mma[^\[]*\[)%r\d+(\].*?)(?=;)", 4, r"\g<1>%r10\2"
    ),
    Mutation("the first product adds to what was there", HALVES, r"(tcgen05\.mma[^;]*, )%p\d+;", 0, r"\g<1>%p114;"),
    *dropped(HALVES, COMMIT, depth=72, handing_over_a_first_half_that_was_held=0),
    # Pairs of blocks.
    Mutation(
        "stages are released in the first block only",
        HALVES,
        r"(mov\.b16\s+%rs\d+, )3;(\s*tcgen05\.commit)",
        1,
        r"\g<1>1;\2",
    ),
    Mutation("later stages too", HALVES, r"(mov\.b16\s+%rs\d+, )3;(\s*tcgen05\.commit)", 3, r"\g<1>1;\2"),
    Mutation(
        "a half is handed to the first block only",
        HALVES,
        r"(mov\.b16\s+%rs\d+, )3;(\s*tcgen05\.commit)",
        2,
        r"\g<1>1;\2",
    ),
    *dropped(HALVES, r"barrier\.cluster\.arrive;\s*barrier\.cluster\.wait;", the_first_meeting=0),
    # Tensor memory.
    Mutation("half of the columns are allocated", HALVES, r"512;(\s*tcgen05\.alloc)", 0, r"256;\1"),
    *dropped(HALVES, r"tcgen05\.dealloc[^;]*;", freeing_tensor_memory=0),
    Mutation("half of the columns are freed", HALVES, r"512;(\s*tcgen05\.dealloc)", 0, r"256;\1"),
    # Stages of weights.
    *not_waited(FEW, a_free_stage=3, a_full_stage=21, a_free_slot=20, a_full_slot=24),
    *not_waited(FEW, depth=136, a_free_stage_of_weights=4),
    *dropped(FEW, COMMIT, release_of_a_stage=0, release_of_a_stage_of_weights=1, handing_over_a_slot=2),
    *dropped(FEW, LOAD.format(4), load_of_a_wide_box=0),
    Mutation(
        "weights close with the wrong tile",
        FEW,
        r"setp\.ne\.b32(\s+%p\d+, %r\d+, )0;(\s*not\.pred[^;]*;\s*add\.s32[^;]*, 1;\s*setp\.eq)",
        0,
        r"setp.eq.b32\g<1>0;\2",
    ),
    Mutation("slots are free after 3 arrivals", FEW, r"(mov\.b32\s+%r\d+, )4;(\s*mbarrier\.init)", 0, r"\g<1>3;\2"),
    Mutation(
        "wide boxes past the end of a row",
        FEW,
        r"setp\.gt\.s32(\s+%p\d+, %r\d+, %r\d+;\s*@%p\d+ bra[^;]*;\s*elect)",
        0,
        r"setp.gt.s32\1".replace("gt", "lt"),
    ),
    Mutation("the halves of a warp read columns too near", FEW, r"(16x32bx2[^;]*\], )64;", 0, r"\g<1>32;"),
    Mutation(
        "rows past the end of a group",
        FEW,
        r"setp\.ge\.s32(\s+%p\d+, %r\d+, %r\d+;\s*@%p\d+ bra[^;]*;\s*setp\.ne\.b64)",
        0,
        r"setp.gt.s32\1",
    ),
    *dropped(FEW, r"bar\.sync\s+0;", the_first_meeting=0, the_last_meeting=-1),
]


def name(mutation: Mutation) -> str:
    """For pytest."""
    return f"{mutation.spec.product.value}-{mutation.what}"


@functools.cache
def operands(spec: config.KernelSpec, depth: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The arrays of a call, and its result."""
    rng = np.random.default_rng(0)
    if spec is HALVES:
        m, k, n, sizes = 560, depth, 1040, (300, 0, 250)
    else:
        m, k, n, sizes = 150, 264, depth, (3, 70, 0, 67)

    def integers(*shape: int) -> np.ndarray:
        return rng.integers(-4, 5, shape).astype(BF16)

    lhs = integers(1, m, k if spec is HALVES else n)
    rhs = integers(1, len(sizes), k, n)
    arrays = {
        "lhs": lhs,
        "rhs": rhs,
        "group_sizes": np.array([sizes], np.int32),
        "group_offset": np.zeros(1, np.int32),
    }
    want = oracle.forward(lhs[0], rhs[0] if spec is HALVES else np.swapaxes(rhs[0], 1, 2), sizes).value
    return arrays, want.astype(BF16)


def outcome(spec: config.KernelSpec, ptx: str, seed: int, depth: int) -> str | None:
    """What is wrong with a kernel in one order of events, or None."""
    arrays, want = operands(spec, depth)
    memory = Memory()
    for key, array in arrays.items():
        memory.add(key, array)
    out = kernels.empty((1, *want.shape), BF16)
    memory.add("out", out, writable=True, initialised=False)
    arguments = kernels.arguments(spec, arrays, out, 2)
    checks = Checks(max_faults=1, max_instructions=5_000_000)
    kernel = kernels.compiled(spec, ARCH)
    _, report = kernel.launch(arguments, memory, ptx=ptx, seed=seed, checks=checks, raises=False)
    if report.faults:
        return report.faults[0].kind
    if memory.unwritten("out"):
        return "unwritten"
    return None if np.array_equal(out[0], want) else "wrong"


@pytest.mark.parametrize("spec", [HALVES, FEW], ids=["halves", "few"])
@pytest.mark.parametrize("depth", [72, 136, 328])
@pytest.mark.parametrize("seed", range(20 if FULL else 2))
def test_no_fault_without_a_mutation(spec: config.KernelSpec, seed: int, depth: int) -> None:
    assert outcome(spec, kernels.compiled(spec, ARCH).ptx, seed, depth) is None


@pytest.mark.parametrize("mutation", MUTATIONS, ids=name)
def test_each_mutation_is_caught(mutation: Mutation, record_property: Any) -> None:
    original = kernels.compiled(mutation.spec, ARCH).ptx
    mutated = mutation.apply(original)
    assert mutated != original
    caught = next(
        (kind for seed in range(SEEDS) if (kind := outcome(mutation.spec, mutated, seed, mutation.depth))), None
    )
    assert caught is not None
    record_property("caught", caught)


def test_there_are_enough() -> None:
    assert len({name(mutation) for mutation in MUTATIONS}) == len(MUTATIONS) >= 30
