"""What every test file shares: eight CPU devices, and the implementations that the op's tests run on.

On a machine with a GPU that has kernels, the tests of behaviour run on those alone, with the marker `gpu`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import pytest

import jax_ggemm

jax.config.update("jax_num_cpu_devices", 8)
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # for several test processes on one GPU

from wide_cute import HAS_GPU, WideCute  # noqa: E402  (asks for devices)

if HAS_GPU:
    # Of what the tests compare with: by default a GPU would multiply float32 with 11 bits.
    jax.config.update("jax_default_matmul_precision", "highest")

CUTE = WideCute()
IMPLEMENTATIONS = (CUTE,) if HAS_GPU else ("cpu", "xla", CUTE)
"""Every test of behaviour runs on each of these."""

COSTLY = {} if "JAX_GGEMM_TEST_FULL" in os.environ else {"xla": 6, CUTE: 6}
"""Implementations that compile for a second or more each time: long lists of cases are thinned out by this factor."""


def of(implementation: Any, *case: Any) -> Any:
    """One case of "implementation, ..." in parametrize."""
    return pytest.param(implementation, *case, marks=[pytest.mark.gpu] if HAS_GPU else [])


def sweep(cases: Sequence[Any]) -> list[Any]:
    """(implementation, case) pairs for a long list of cases; for "implementation, ..." in parametrize."""
    return [
        of(implementation, *(case if isinstance(case, tuple) else (case,)))
        for implementation in IMPLEMENTATIONS
        for case in cases[:: COSTLY.get(implementation, 1)]
    ]


@pytest.fixture(params=[of(implementation) for implementation in IMPLEMENTATIONS], ids=str)
def implementation(request: pytest.FixtureRequest) -> Any:
    """What `implementation=` takes."""
    return request.param


@pytest.fixture
def ragged_dot(implementation: Any) -> Callable[..., jax.Array]:
    """`jax_ggemm.ragged_dot` on the implementation under test."""
    return functools.partial(jax_ggemm.ragged_dot, implementation=implementation)


@pytest.fixture
def ragged_dot_general(implementation: Any) -> Callable[..., jax.Array]:
    """`jax_ggemm.ragged_dot_general` on the implementation under test."""
    return functools.partial(jax_ggemm.ragged_dot_general, implementation=implementation)


@pytest.fixture
def x64() -> Iterator[None]:
    """64-bit types, for the test that asks."""
    with jax.enable_x64(True):
        yield
