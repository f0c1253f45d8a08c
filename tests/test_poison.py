"""NaN and infinities: what lies in rows of no group, in other experts' weights and in fresh memory stays there."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from test_ragged_dot import everything, normal

BAD = [np.nan, np.inf, -np.inf]
SIZES = np.array([5, 0, 7, 4], np.int32)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_of_no_group_are_never_read(implementation: Any, bad: float, dtype: Any) -> None:
    lhs, rhs, ct = normal((24, 32), dtype), normal((4, 32, 40), dtype), normal((24, 40), dtype)
    bias = normal((4, 40))
    clean = everything(lhs, rhs, SIZES, ct, bias=bias, implementation=implementation)
    poisoned = everything(
        lhs.at[16:].set(bad), rhs, SIZES, ct.at[16:].set(bad), bias=bias, implementation=implementation
    )
    for a, b in zip(clean, poisoned, strict=True):
        np.testing.assert_array_equal(a, b)
    result, d_lhs, d_rhs, _ = poisoned
    np.testing.assert_array_equal(result[16:], 0)
    np.testing.assert_array_equal(d_lhs[16:], 0)
    oracle.assert_close(result, oracle.forward(lhs, rhs, SIZES, bias=bias), SIZES)
    oracle.assert_close(d_rhs, oracle.d_rhs(lhs, ct, SIZES, 4))


@pytest.mark.parametrize("bad", BAD)
def test_rows_of_groups_that_rhs_does_not_hold_are_never_read(implementation: Any, bad: float) -> None:
    foreign = np.r_[0:5, 12:24]
    lhs, rhs, ct = normal((24, 9)), normal((1, 9, 40)), normal((24, 40))
    result, d_lhs, d_rhs = everything(
        lhs.at[foreign].set(bad), rhs, SIZES, ct.at[foreign].set(bad), 2, implementation=implementation
    )
    oracle.assert_close(result, oracle.forward(lhs, rhs, SIZES, 2), SIZES)
    oracle.assert_close(d_lhs, oracle.d_lhs(ct, rhs, SIZES, 2), SIZES)
    oracle.assert_close(d_rhs, oracle.d_rhs(lhs, ct, SIZES, 1, 2))


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("expert", [0, 1, 3])
def test_bad_weights_reach_only_their_own_rows(implementation: Any, bad: float, expert: int) -> None:
    lhs, rhs, ct = normal((24, 9)), normal((4, 9, 40)), normal((24, 40))
    poisoned = rhs.at[expert].set(bad)
    result, d_lhs, d_rhs = everything(lhs, poisoned, SIZES, ct, implementation=implementation)
    first, end = oracle.bounds(SIZES, 24)[expert]
    assert not np.isfinite(result[first:end]).any()
    assert not np.isfinite(d_lhs[first:end]).any()
    keep = np.r_[0:first, end:24]
    np.testing.assert_array_equal(result[keep], everything(lhs, rhs, SIZES, ct, implementation=implementation)[0][keep])
    oracle.assert_close(d_lhs[keep], _rows(oracle.d_lhs(ct, rhs, SIZES), keep))
    oracle.assert_close(d_rhs, oracle.d_rhs(lhs, ct, SIZES, 4))


def _rows(want: oracle.Expected, keep: np.ndarray) -> oracle.Expected:
    return oracle.Expected(want.value[keep], want.scale[keep], want.depth)


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_row_reaches_its_own_result_and_its_groups_gradient(implementation: Any, bad: float) -> None:
    lhs, rhs, ct = normal((24, 9)), normal((4, 9, 40)), normal((24, 40))
    result, d_lhs, d_rhs = everything(lhs.at[6].set(bad), rhs, SIZES, ct, implementation=implementation)
    keep = np.r_[0:6, 7:24]
    assert not np.isfinite(result[6]).any()
    oracle.assert_close(result[keep], _rows(oracle.forward(lhs, rhs, SIZES), keep))
    oracle.assert_close(d_lhs, oracle.d_lhs(ct, rhs, SIZES), SIZES)
    assert not np.isfinite(d_rhs[2]).any()
    oracle.assert_close(d_rhs[:2], _rows(oracle.d_rhs(lhs, ct, SIZES, 4), np.arange(2)))
    oracle.assert_close(d_rhs[3:], _rows(oracle.d_rhs(lhs, ct, SIZES, 4), np.arange(3, 4)))


def test_single_nan_and_inf_elements_land_where_ieee_puts_them(implementation: Any) -> None:
    lhs = normal((24, 70)).at[3, 69].set(np.nan).at[8, 0].set(np.inf)
    rhs = normal((4, 70, 33)).at[3, 5, 32].set(-np.inf).at[1].set(np.nan)
    result, d_lhs, d_rhs = everything(lhs, rhs, SIZES, ct := normal((24, 33)), implementation=implementation)
    oracle.assert_close(result, oracle.forward(lhs, rhs, SIZES), SIZES)
    oracle.assert_close(d_lhs, oracle.d_lhs(ct, rhs, SIZES), SIZES)
    oracle.assert_close(d_rhs, oracle.d_rhs(lhs, ct, SIZES, 4))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_element_is_written_amid_freed_nan_buffers(implementation: Any, dtype: Any) -> None:
    """Results land in memory that just held NaN; an element that is not written shows it."""
    m, k, n = 500, 65, 130
    lhs, rhs, ct = normal((m, k), dtype), normal((5, k, n), dtype), normal((m, n), dtype)
    shapes = (m, n), (m, k), (5, k, n)
    for sizes in ([0, 0, 0, 0, 0], [1, 0, 3, 0, 0], [0, 100, 0, 77, 1], [100, 100, 100, 100, 99], [0, 0, 0, 0, 700]):
        for _ in range(5):
            poison = [jnp.full(shape, jnp.nan, dtype) for shape in shapes for _ in range(4)]
            jax.block_until_ready(poison)
            del poison
            results = everything(lhs, rhs, jnp.array(sizes), ct, implementation=implementation)
            assert all(np.isfinite(result).all() for result in results), sizes
        oracle.assert_close(results[0], oracle.forward(lhs, rhs, sizes), sizes)
        oracle.assert_close(results[1], oracle.d_lhs(ct, rhs, sizes), sizes)
        oracle.assert_close(results[2], oracle.d_rhs(lhs, ct, sizes, 5))
