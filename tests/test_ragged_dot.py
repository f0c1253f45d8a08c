"""The product and its two gradients against the loop: every row of the semantics table, on every implementation."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import sweep

import jax_ggemm

EDGES = (1, 5, 6, 7, 15, 16, 17, 23, 24, 25, 31, 32, 33, 63, 64, 65, 239, 240, 241, 511, 512, 513)
"""Sizes around every tile and block edge."""


@functools.partial(jax.jit, static_argnames=("implementation", "transpose_rhs"))
def everything(
    lhs: Any,
    rhs: Any,
    sizes: Any,
    cotangent: Any,
    offset: Any = None,
    bias: Any = None,
    *,
    implementation: Any,
    transpose_rhs: bool = False,
) -> tuple[jax.Array, ...]:
    """The result, then the gradients of lhs, rhs and (where there is one) bias."""

    def run(lhs: Any, rhs: Any, bias: Any) -> jax.Array:
        return jax_ggemm.ragged_dot(
            lhs,
            rhs,
            sizes,
            group_offset=offset,
            bias=bias,
            implementation=implementation,
            transpose_rhs=transpose_rhs,
            preferred_element_type=cotangent.dtype,
        )

    result, vjp = jax.vjp(run, lhs, rhs, bias)
    return result, *(gradient for gradient in vjp(cotangent) if gradient is not None)


def normal(shape: tuple[int, ...], dtype: Any = np.float32, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape), dtype)


def check_everything(implementation: Any, lhs: Any, rhs: Any, sizes: Any, ct: Any, offset: int = 0) -> None:
    """Result and gradients against the loop; `offset` is passed on only where it or the counts ask for it."""
    traced = offset if offset or len(sizes) != len(rhs) else None
    result, d_lhs, d_rhs = everything(lhs, rhs, jnp.asarray(sizes), ct, traced, implementation=implementation)
    wide = np.float64 if np.float64 in (lhs.dtype, rhs.dtype, ct.dtype) else np.float32
    oracle.assert_close(result, oracle.forward(lhs, rhs, sizes, offset), sizes, wide)
    oracle.assert_close(d_lhs, oracle.d_lhs(ct, rhs, sizes, offset), sizes, wide)
    oracle.assert_close(d_rhs, oracle.d_rhs(lhs, ct, sizes, len(rhs), offset), None, wide)
    assert (result.dtype, d_lhs.dtype, d_rhs.dtype) == (ct.dtype, lhs.dtype, rhs.dtype)


SHAPES = list(zip(EDGES, (*EDGES[9:], *EDGES[:9]), strict=True))


@pytest.mark.parametrize(("implementation", "k", "n"), sweep(SHAPES))
def test_k_n_and_group_sizes_at_every_tile_edge(implementation: Any, k: int, n: int) -> None:
    m, g = sum(EDGES[:16]) + 1, 16
    lhs, rhs, ct = normal((m, k)), normal((g, k, n)), normal((m, n))
    for sizes in (EDGES[:16], (EDGES[-1], *(0,) * 14, m - EDGES[-1]), (*(0,) * 9, EDGES[-6], *(0,) * 6)):
        check_everything(implementation, lhs, rhs, np.array(sizes, np.int32), ct)


def test_single_groups_at_every_tile_edge(implementation: Any) -> None:
    lhs, rhs, ct = normal((EDGES[-1], 17)), normal((1, 17, 65)), normal((EDGES[-1], 65))
    for size in EDGES:
        check_everything(implementation, lhs, rhs, np.array([size], np.int32), ct)


def test_all_patterns_of_empty_groups(implementation: Any) -> None:
    lhs, rhs, ct = normal((40, 5)), normal((8, 5, 7)), normal((40, 7))
    for pattern in itertools.product((0, 1), repeat=8):
        sizes = np.array(pattern, np.int32) * np.array([1, 4, 2, 8, 3, 5, 1, 16], np.int32)
        check_everything(implementation, lhs, rhs, sizes, ct)


@pytest.mark.parametrize(("m", "k", "n", "g"), [(0, 3, 4, 2), (5, 0, 4, 2), (5, 3, 0, 2), (5, 3, 4, 0), (0, 0, 0, 0)])
def test_zero_extents_are_legal(implementation: Any, m: int, k: int, n: int, g: int) -> None:
    check_everything(implementation, normal((m, k)), normal((g, k, n)), np.full(g, 2, np.int32), normal((m, n)))


@pytest.mark.parametrize(
    ("implementation", "m", "k", "n", "g"), sweep([(1, 1, 1, 1), (1, 9, 1, 4), (6, 1, 1, 3), (1, 1, 40, 2)])
)
def test_extents_of_one(implementation: Any, m: int, k: int, n: int, g: int) -> None:
    for sizes in np.eye(g, dtype=np.int32) * m:
        check_everything(implementation, normal((m, k)), normal((g, k, n)), sizes, normal((m, n)))


TRICKY_SIZES = [
    [3, 2, 4, 1],  # fewer rows than m
    [4, 4, 4, 4],  # more
    [20, 1, 1, 1],  # the first group takes all
    [-3, 5, -1, 4],
    [-(2**31), 2, -(2**31), 3],
    [2**31 - 1, 2**31 - 1, 2**31 - 1, 2**31 - 1],  # sums of these overflow
    [3, 2**31 - 1, -(2**31), 2**31 - 1],
    [0, 2**31 - 3, 5, 7],
    [2**30, 2**30, 2**30, 2**30],
]


def test_short_long_and_negative_sizes(implementation: Any) -> None:
    lhs, rhs, ct = normal((12, 5)), normal((4, 5, 3)), normal((12, 3))
    for sizes in TRICKY_SIZES:
        check_everything(implementation, lhs, rhs, np.array(sizes, np.int32), ct)


SIZE_DTYPES = [jnp.int8, jnp.uint8, jnp.int16, jnp.uint16, jnp.uint32, jnp.int64, jnp.uint64, jnp.int4, jnp.uint4]


@pytest.mark.parametrize(("implementation", "dtype"), sweep(SIZE_DTYPES), ids=str)
def test_any_integer_dtype_of_sizes_sums_without_overflow(ragged_dot: Any, dtype: Any, x64: None) -> None:
    sizes = np.array([min(size, int(jnp.iinfo(dtype).max)) for size in (127, 100, 7, 73)])  # 300 rows overflow int8
    lhs, rhs = normal((300, 3)), normal((4, 3, 2))
    got = jax.jit(ragged_dot)(lhs, rhs, jnp.asarray(sizes, dtype))
    oracle.assert_close(got, oracle.forward(lhs, rhs, sizes), sizes)


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        (jnp.uint32, [2**32 - 1, 0, 1]),
        (jnp.int64, [2**33 + 1, 1, 1]),
        (jnp.int64, [2, -(2**40), 2**40]),
        (jnp.uint64, [3, 2**64 - 1, 1]),
        (jnp.int8, [-128, 127, 127]),
    ],
    ids=str,
)
def test_sizes_beyond_int32_saturate(ragged_dot: Any, dtype: Any, sizes: list[int], x64: None) -> None:
    lhs, rhs = normal((9, 3)), normal((3, 3, 2))
    got = jax.jit(ragged_dot)(lhs, rhs, jnp.asarray(np.array(sizes, dtype)))
    oracle.assert_close(got, oracle.forward(lhs, rhs, sizes), sizes)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_group_offset_selects_groups_in_result_and_gradients(implementation: Any, shape: tuple[int, ...]) -> None:
    sizes = np.array([3, 0, 2, 4, 1], np.int32)
    lhs, rhs, ct, bias = normal((12, 5)), normal((2, 5, 3)), normal((12, 3)), normal((2, 3))
    run = functools.partial(everything, lhs, rhs, sizes, ct, bias=bias, implementation=implementation)
    for offset in (0, 1, 2, 3, 4, 5, 6, -1, -2, -7, 2**31 - 1, -(2**31)):
        result, d_lhs, d_rhs, d_bias = run(jnp.full(shape, offset, jnp.int32))
        oracle.assert_close(result, oracle.forward(lhs, rhs, sizes, offset, bias), sizes)
        oracle.assert_close(d_lhs, oracle.d_lhs(ct, rhs, sizes, offset), sizes)
        oracle.assert_close(d_rhs, oracle.d_rhs(lhs, ct, sizes, 2, offset))
        oracle.assert_close(d_bias, oracle.d_bias(ct, sizes, 2, offset))


@pytest.mark.parametrize("offset", [2, np.int64(2), np.array([2], np.uint8), jnp.int8(2)], ids=repr)
def test_group_offset_may_be_any_integer(ragged_dot: Any, offset: Any) -> None:
    lhs, rhs, sizes = normal((12, 8)), normal((2, 8, 4)), jnp.array([3, 2, 4, 3])
    got = jax.jit(lambda *arrays: ragged_dot(*arrays, group_offset=offset))(lhs, rhs, sizes)
    oracle.assert_close(got, oracle.forward(lhs, rhs, sizes, 2), sizes)


def test_more_weights_than_groups_with_an_offset(implementation: Any) -> None:
    for offset in (0, -3, 1):
        sizes = np.array([3, 4], np.int32)
        check_everything(implementation, normal((9, 5)), normal((6, 5, 3)), sizes, normal((9, 3)), offset)


def test_over_a_thousand_groups(implementation: Any) -> None:
    g = 1100
    sizes = np.random.default_rng(0).integers(0, 3, g).astype(np.int32)
    sizes[[0, 1, 517, g - 1]] = 0, 40, 65, 9
    m = int(sizes.sum()) + 7
    check_everything(implementation, normal((m, 6)), normal((g, 6, 5)), sizes, normal((m, 5)))


def test_bias_is_added_to_rows_of_groups_only(implementation: Any) -> None:
    lhs, rhs, ct, bias = normal((30, 5)), normal((4, 5, 70)), normal((30, 70)), normal((4, 70))
    for sizes in ([3, 0, 20, 2], [0, 0, 0, 0], [30, 1, 0, 0]):
        result, *_, d_bias = everything(lhs, rhs, jnp.array(sizes), ct, bias=bias, implementation=implementation)
        oracle.assert_close(result, oracle.forward(lhs, rhs, sizes, bias=bias), sizes)
        oracle.assert_close(d_bias, oracle.d_bias(ct, sizes, 4))


def test_bias_is_the_result_where_k_is_zero(ragged_dot: Any) -> None:
    bias = jnp.array([[1.0, 2, 3], [4, 5, 6]])
    got = jax.jit(ragged_dot)(normal((6, 0)), normal((2, 0, 3)), jnp.array([2, 3]), bias=bias)
    np.testing.assert_array_equal(got, [[1, 2, 3]] * 2 + [[4, 5, 6]] * 3 + [[0, 0, 0]])


@pytest.mark.parametrize(("k", "n"), [(33, 65), (64, 7), (1, 130)])
def test_transposed_weights_and_their_gradients(implementation: Any, k: int, n: int) -> None:
    lhs, rhs, ct, bias = normal((90, k)), normal((4, n, k)), normal((90, n)), normal((4, n))
    plain = np.swapaxes(rhs, 1, 2)
    for sizes in ([1, 0, 17, 40], [90, 0, 0, 0]):
        result, d_lhs, d_rhs, d_bias = everything(
            lhs, rhs, jnp.array(sizes), ct, bias=bias, implementation=implementation, transpose_rhs=True
        )
        oracle.assert_close(result, oracle.forward(lhs, plain, sizes, bias=bias), sizes)
        oracle.assert_close(d_lhs, oracle.d_lhs(ct, plain, sizes), sizes)
        oracle.assert_close(np.swapaxes(d_rhs, 1, 2), oracle.d_rhs(lhs, ct, sizes, 4))
        oracle.assert_close(d_bias, oracle.d_bias(ct, sizes, 4))


def test_equal_inputs_give_equal_bits(implementation: Any) -> None:
    if implementation == "xla" and jax.default_backend() == "gpu":
        pytest.skip("on a GPU, XLA adds the tiles of a group up in any order")
    sizes = jnp.array([100, 3, 0, 250])
    arguments = normal((400, 65)), normal((4, 65, 33)), sizes, normal((400, 33))
    first = everything(*arguments, implementation=implementation)
    for _ in range(10):
        for a, b in zip(first, everything(*arguments, implementation=implementation), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("sizes", [[16384, 100, 0], [16383, 17000, 1], [40000, 0, 0]], ids=str)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_long_contractions(implementation: Any, dtype: Any, sizes: list[int]) -> None:
    """Sums over this many rows of one group are split between threads."""
    lhs, ct = normal((40000, 3), dtype), normal((40000, 5), dtype)
    check_everything(implementation, lhs, normal((3, 3, 5), dtype), np.array(sizes, np.int32), ct)


def test_sizes_and_offsets_beyond_int32_saturate_without_x64_too(ragged_dot: Any) -> None:
    """JAX would cut the upper half of a NumPy or Python integer off: 2**32 would be no rows at all."""
    lhs, rhs = normal((9, 3)), normal((2, 3, 2))
    for sizes in ([2**32, 3], [2**32 + 2, 1], [2, -(2**32) + 5]):
        got = jax.jit(lambda x, w, s=sizes: ragged_dot(x, w, np.array(s, np.int64)))(lhs, rhs)
        oracle.assert_close(got, oracle.forward(lhs, rhs, sizes), sizes)
    for offset in (2**32, 2**40 + 1, -(2**32) + 1):
        got = jax.jit(lambda x, w, o=offset: ragged_dot(x, w, jnp.array([4, 5]), group_offset=o))(lhs, rhs)
        np.testing.assert_array_equal(got, 0)
