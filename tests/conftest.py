"""What every test file shares: eight CPU devices, and the implementations that the op's tests run on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import pytest

import jax_ggemm

jax.config.update("jax_num_cpu_devices", 8)

IMPLEMENTATIONS = ("cpu", "xla")
"""Every test of behaviour runs on each of these."""

COSTLY = {"xla": 6}
"""Implementations that compile for a second or more each time: long lists of cases are thinned out by this factor."""


def sweep(cases: Sequence[Any]) -> list[tuple[Any, ...]]:
    """(implementation, case) pairs for a long list of cases; for "implementation, ..." in parametrize."""
    return [
        (implementation, *(case if isinstance(case, tuple) else (case,)))
        for implementation in IMPLEMENTATIONS
        for case in cases[:: COSTLY.get(implementation, 1)]
    ]


@pytest.fixture(params=IMPLEMENTATIONS)
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
