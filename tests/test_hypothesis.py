"""Shapes, dtypes, sizes, offsets and layouts that hypothesis chooses."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import IMPLEMENTATIONS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_ragged_dot import everything, normal
from wide_cute import HAS_GPU

import jax_ggemm

pytestmark = [pytest.mark.gpu] if HAS_GPU else []

NATIVE = [name for name in IMPLEMENTATIONS if name != "xla"]
"""The shapes of these are data of one kernel; a new shape of plain JAX compiles for seconds."""
DTYPES = st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16])
EXTENT = st.one_of(st.integers(0, 40), st.sampled_from([63, 64, 65, 127, 129, 240, 241]))
ROWS = st.one_of(st.integers(0, 60), st.sampled_from([120, 239, 480, 600]))
SIZE = st.one_of(st.integers(0, 50), st.integers(-(2**31), 2**31 - 1), st.sampled_from([0, 1, 240, 241]))
# XLA's compilation for a GPU, of programs with several kernels, takes its time.
COMMON = {"deadline": None, "database": None, "derandomize": True}


def check(lhs: Any, rhs: Any, sizes: Any, ct: Any, offset: int, bias: Any, implementation: Any, **kwargs: Any) -> None:
    """Result and gradients against the loop."""
    arguments = jnp.asarray(lhs), jnp.asarray(rhs), jnp.asarray(sizes, jnp.int32), ct, jnp.asarray(offset, jnp.int32)
    result, d_lhs, d_rhs, *d_bias = everything(*arguments, bias=bias, implementation=implementation, **kwargs)
    if kwargs.get("transpose_rhs"):
        rhs, d_rhs = np.swapaxes(rhs, 1, 2), np.swapaxes(d_rhs, 1, 2)
    oracle.assert_close(result, oracle.forward(lhs, rhs, sizes, offset, bias), sizes)
    oracle.assert_close(d_lhs, oracle.d_lhs(ct, rhs, sizes, offset), sizes)
    oracle.assert_close(d_rhs, oracle.d_rhs(lhs, ct, sizes, len(rhs), offset))
    for gradient in d_bias:
        oracle.assert_close(gradient, oracle.d_bias(ct, sizes, len(rhs), offset))


@settings(
    **COMMON,
    max_examples=20 if HAS_GPU else 70,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(data=st.data())
def test_any_call_of_a_native_implementation_equals_the_loop(data: st.DataObject) -> None:
    draw = data.draw
    m, k, n, weights = draw(ROWS, "m"), draw(EXTENT, "k"), draw(EXTENT, "n"), draw(st.integers(0, 9), "w")
    sizes = np.array(draw(st.lists(SIZE, min_size=0, max_size=12), "sizes"), np.int32)
    offset = draw(st.one_of(st.integers(-3, 12), st.integers(-(2**31), 2**31 - 1)), "offset")
    dtypes = [draw(DTYPES, name) for name in ("lhs", "rhs", "result")]
    transpose = draw(st.booleans(), "transpose_rhs")
    lhs, ct = normal((m, k), dtypes[0]), normal((m, n), dtypes[2])
    rhs = normal((weights, n, k) if transpose else (weights, k, n), dtypes[1])
    bias = normal((weights, n)) if draw(st.booleans(), "bias") else None
    poison = draw(st.sampled_from([0, np.nan, np.inf]), "tail")
    end = max([end for _, end in oracle.bounds(sizes, m)], default=0)
    lhs, ct = lhs.at[end:].set(poison), ct.at[end:].set(poison)
    implementation = draw(st.sampled_from(NATIVE), "implementation")
    check(lhs, rhs, sizes, ct, offset, bias, implementation, transpose_rhs=transpose)


FIXED = {"m": 50, "k": 9, "n": 21, "w": 3, "groups": 6}


@settings(**COMMON, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(
    sizes=st.lists(SIZE, min_size=FIXED["groups"], max_size=FIXED["groups"]),
    offset=st.one_of(st.integers(-4, 7), st.integers(-(2**31), 2**31 - 1)),
    tail=st.sampled_from([0, np.nan, np.inf]),
    implementation=st.sampled_from(IMPLEMENTATIONS),
)
def test_any_sizes_and_offset_of_every_implementation(
    sizes: Any, offset: int, tail: float, implementation: Any
) -> None:
    m, k, n, w, _ = FIXED.values()
    end = oracle.bounds(sizes, m)[-1][1]
    lhs, ct = (normal(shape).at[end:].set(tail) for shape in ((m, k), (m, n)))
    check(lhs, normal((w, k, n)), sizes, ct, offset, normal((w, n)), implementation)


@settings(**COMMON, max_examples=15 if HAS_GPU else 30, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_vmap_of_a_native_implementation_equals_the_loop(data: st.DataObject) -> None:
    """Nested vmaps, each over any operands and axes."""
    core = {"lhs": (7, 3), "rhs": (2, 3, 4), "sizes": (2,)}
    mapped: list[tuple[int, dict[str, int | None]]] = []
    shapes = {name: list(shape) for name, shape in core.items()}
    for level in range(data.draw(st.integers(1, 3), "levels")):
        names = data.draw(st.sets(st.sampled_from(sorted(core)), min_size=1), f"mapped {level}")
        length = data.draw(st.integers(1, 3), f"length {level}")
        axes: dict[str, int | None] = {}
        for name in core:
            axes[name] = data.draw(st.integers(0, len(shapes[name]))) if name in names else None
            if name in names:
                shapes[name].insert(axes[name], length)
        mapped.append((length, axes))
    rng = np.random.default_rng(0)
    arrays = {
        name: rng.integers(-1, 6, shape).astype(np.int32) if name == "sizes" else np.asarray(normal(tuple(shape)))
        for name, shape in shapes.items()
    }
    implementation = data.draw(st.sampled_from(NATIVE), "implementation")
    function = lambda a: jax_ggemm.ragged_dot(a["lhs"], a["rhs"], a["sizes"], implementation=implementation)  # noqa: E731
    for _, axes in mapped:
        function = jax.vmap(function, in_axes=(axes,))
    got = np.asarray(jax.jit(function)(arrays))
    for index in np.ndindex(*(length for length, _ in reversed(mapped))):
        one = dict(arrays)
        for i, (_, axes) in zip(index, reversed(mapped), strict=True):
            one = {n: a if axes[n] is None else np.take(a, i, axes[n]) for n, a in one.items()}
        oracle.assert_close(got[index], oracle.forward(one["lhs"], one["rhs"], one["sizes"]), one["sizes"])
