"""The Hopper kernels in the emulator against the same kernels on an H200: every bit of every recorded result."""

from __future__ import annotations

import functools
import os

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

from ptx_emulator import kernels
from ptx_vectors import replay_kernels
from ptx_vectors.kernels import Case, cases
from ptx_vectors.record_kernels import ARCHITECTURE, digest

from jax_ggemm.kernel import config
from jax_ggemm.products import Product

pytestmark = pytest.mark.emulator

FULL = bool(os.environ.get("JAX_GGEMM_TEST_FULL"))

_recording = functools.cache(replay_kernels.load)


def chosen() -> list[Case]:
    """Every case, or those of one kernel for each product, and the rounded ones of float16 for one product."""
    if FULL:
        return list(cases())
    result = []
    for case in cases():
        first = case.config == config.candidates(case.product)[0] and case.in_dtype == "bfloat16"
        half = case.config.tile_m == 64 and case.in_dtype == "float16" and case.product is Product.DLHS
        if case.out_dtype == "float32" and (first or half):
            result.append(case)
    return result


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    kernels.compile_all(list(dict.fromkeys(case.spec for case in chosen())), ARCHITECTURE)


def test_every_case_was_recorded() -> None:
    names = {case.name: case.exact for case in cases()}
    assert _recording().exact.keys() >= {name for name, exact in names.items() if exact}
    assert _recording().rounded.keys() >= {name for name, exact in names.items() if not exact}


@pytest.mark.parametrize("case", [case for case in chosen() if case.exact], ids=lambda case: case.name)
def test_integers_give_the_same_bits(case: Case) -> None:
    assert digest(replay_kernels.run(case)) == _recording().exact[case.name]


@pytest.mark.parametrize("case", [case for case in chosen() if not case.exact], ids=lambda case: case.name)
def test_rounded_sums_give_the_same_bits(case: Case) -> None:
    np.testing.assert_array_equal(replay_kernels.run(case), _recording().rounded[case.name])
