"""Faults put into kernels: each must be found, and none where there is none."""

from __future__ import annotations

import os
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

from ptx_mutations.catalogue import beds
from ptx_mutations.harness import TestBed, all_of, investigate, one_bed_each
from ptx_mutations.mutation import Mutation

pytestmark = pytest.mark.emulator

FULL = bool(os.environ.get("JAX_GGEMM_TEST_FULL"))
BEDS = beds()
CASES = all_of(BEDS) if FULL else one_bed_each(BEDS)


@pytest.mark.parametrize(("bed", "mutation"), CASES, ids=lambda value: value.name.replace(" ", "-"))
def test_a_mutation_is_caught(bed: TestBed, mutation: Mutation[Any]) -> None:
    finding = investigate(bed, mutation, range(5 if FULL else 1))
    assert finding.caught, finding


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_the_kernels_of_an_architecture_have_many(arch: str) -> None:
    kernels = [bed for bed in BEDS if bed.name.startswith(arch) and "test bed" not in bed.name]
    assert len({mutation.name for bed in kernels for mutation in bed.mutations}) >= 30


@pytest.mark.parametrize("bed", BEDS, ids=lambda bed: bed.name)
def test_a_kernel_without_mutation_has_no_fault(bed: TestBed) -> None:
    text = str(bed.text())
    for seed in range(20 if FULL else 3):
        outcome = bed.run(text, seed)
        assert not outcome.kinds, (seed, outcome.report.faults)
