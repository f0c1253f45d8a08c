"""What the op must give: loops over groups in float64 NumPy, and the error that an honest sum may have.

Nothing here is shared with the package. Each product comes with its scale, sqrt(sum((a * b)^2)): the size that
a sum's rounding error is measured in, whatever cancels in the sum itself.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Expected:
    """A product and its scale."""

    value: np.ndarray
    scale: np.ndarray
    depth: int
    """The longest sum."""


def bounds(sizes: Any, m: int) -> list[tuple[int, int]]:
    """First and end row of each group: negative sizes are 0, and rows end at m."""
    result, row = [], 0
    for size in np.asarray(sizes).tolist() if hasattr(sizes, "dtype") else sizes:
        end = min(m, row + max(size, 0))
        result.append((row, end))
        row = end
    return result


def _wide(array: Any) -> np.ndarray:
    return np.asarray(array).astype(np.float64)


def _multiply(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    with np.errstate(all="ignore"):
        return a @ b, np.sqrt(np.square(a) @ np.square(b))


def _held(sizes: Any, m: int, offset: int, num_weights: int) -> list[tuple[int, int, int]]:
    """(weight, first row, end row) of the groups whose weights are held."""
    rows = bounds(sizes, m)
    return [(g - offset, *rows[g]) for g in range(len(rows)) if 0 <= g - offset < num_weights]


def forward(lhs: Any, rhs: Any, sizes: Any, offset: int = 0, bias: Any = None) -> Expected:
    """(m, k) x (w, k, n) -> (m, n)."""
    lhs, rhs = _wide(lhs), _wide(rhs)
    value = np.zeros((lhs.shape[0], rhs.shape[2]))
    scale = np.zeros_like(value)
    for w, first, end in _held(sizes, lhs.shape[0], offset, rhs.shape[0]):
        value[first:end], scale[first:end] = _multiply(lhs[first:end], rhs[w])
        if bias is not None:
            value[first:end] += _wide(bias)[w]
            scale[first:end] = np.hypot(scale[first:end], _wide(bias)[w])
    return Expected(value, scale, lhs.shape[1] + 1)


def d_lhs(cotangent: Any, rhs: Any, sizes: Any, offset: int = 0) -> Expected:
    """(m, n) x (w, k, n) -> (m, k)."""
    return forward(cotangent, np.swapaxes(_wide(rhs), 1, 2), sizes, offset)


def d_rhs(lhs: Any, cotangent: Any, sizes: Any, num_weights: int, offset: int = 0) -> Expected:
    """(m, k) x (m, n) -> (w, k, n)."""
    lhs, cotangent = _wide(lhs), _wide(cotangent)
    value = np.zeros((num_weights, lhs.shape[1], cotangent.shape[1]))
    scale = np.zeros_like(value)
    depth = 1
    for w, first, end in _held(sizes, lhs.shape[0], offset, num_weights):
        value[w], scale[w] = _multiply(lhs[first:end].T, cotangent[first:end])
        depth = max(depth, end - first)
    return Expected(value, scale, depth)


def d_bias(cotangent: Any, sizes: Any, num_weights: int, offset: int = 0) -> Expected:
    """(m, n) -> (w, n)."""
    cotangent = _wide(cotangent)
    product = d_rhs(np.ones((cotangent.shape[0], 1)), cotangent, sizes, num_weights, offset)
    return Expected(product.value[:, 0], product.scale[:, 0], product.depth)


def assert_close(got: Any, want: Expected, sizes: Any = None, accumulation: Any = np.float32) -> None:
    """The result is the expected one, rounded once, but for the rounding errors of its sums.

    Checked for each element and, more tightly, for the root mean square of each block of 16 columns of each
    group (of each matrix, for products that are one matrix per group). Zeros of the expected scale must be
    exact zeros; NaN and infinities must be where they are expected.

    Args:
      got: the result.
      want: what it should be.
      sizes: group sizes, where rows of the result are grouped.
      accumulation: the dtype of the sums.
    """
    out_dtype = jnp.asarray(got).dtype
    got = _wide(got)
    assert got.shape == want.value.shape, f"shape {got.shape}, expected {want.value.shape}"
    out, accumulated = jnp.finfo(out_dtype), jnp.finfo(accumulation)
    limit, scale = float(out.max), np.where(np.isfinite(want.scale), want.scale, 0)
    finite = np.isfinite(want.value)
    np.testing.assert_array_equal(got[~finite], want.value[~finite], err_msg="NaN and infinities")
    got, value = np.where(finite, got, 0), np.where(finite, want.value, 0)
    assert (np.abs(value) < limit).all(), "the test's own values overflow the result dtype"
    np.testing.assert_array_equal(got[scale == 0], value[scale == 0], err_msg="exact zeros")

    error = np.abs(got - value)
    rounding = 0.51 * float(out.eps) * np.abs(value) + float(out.smallest_subnormal)
    summing = float(accumulated.eps) * np.sqrt(want.depth) * scale
    worst = np.unravel_index(np.argmax(error - rounding - 8 * summing), error.shape) if error.size else ()
    assert (error <= rounding + 8 * summing).all(), f"at {worst}: got {got[worst]}, expected {value[worst]}"

    for rows in _blocks(value.shape, sizes):
        for first in range(0, value.shape[-1], 16):
            at = (*rows, slice(first, first + 16))
            if error[at].size:
                bound = _rms(rounding[at]) + 2 * _rms(summing[at])
                assert _rms(error[at]) <= bound, f"rows {rows}, columns from {first}: error {_rms(error[at])} > {bound}"


def _rms(array: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(array))))


def _blocks(shape: tuple[int, ...], sizes: Any) -> list[tuple[Any, ...]]:
    if len(shape) == 3:
        return [(w, slice(None)) for w in range(shape[0])]
    if sizes is None:
        return [(slice(None),)]
    return [(slice(first, end),) for first, end in bounds(sizes, shape[0])]
