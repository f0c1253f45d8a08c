"""The native handler called directly: wrong calls are refused, and nothing that sizes hold reaches outside."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.errors import JaxRuntimeError
from test_ragged_dot import normal

from jax_ggemm import native

F32, I32 = jnp.float32, jnp.int32


@pytest.fixture(autouse=True)
def _registered() -> None:
    native.register()


def call(out: Any, *arrays: Any, **attributes: Any) -> jax.Array:
    return jax.jit(lambda *a: jax.ffi.ffi_call("jax_ggemm", out)(*a, **attributes))(*arrays)


def shaped(*shape: int, dtype: Any = F32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def ones(*shape: int, dtype: Any = F32) -> jax.Array:
    return jnp.ones(shape, dtype)


LHS, RHS, SIZES, OFFSET, OUT = ones(6, 3), ones(2, 3, 4), jnp.array([2, 3], I32), jnp.array(0, I32), shaped(6, 4)
FORWARD = {"product": "forward"}

WRONG: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any], str]] = {
    "product": (OUT, (LHS, RHS, SIZES, OFFSET), {"product": "backward"}, "unknown product 'backward'"),
    "product_empty": (OUT, (LHS, RHS, SIZES, OFFSET), {"product": ""}, "unknown product"),
    "product_missing": (OUT, (LHS, RHS, SIZES, OFFSET), {}, "product|attributes"),
    "product_integer": (OUT, (LHS, RHS, SIZES, OFFSET), {"product": 1}, "product|attribute"),
    "no_offset": (OUT, (LHS, RHS, SIZES), FORWARD, "argument|operand"),
    "no_operand": (OUT, (), FORWARD, "argument|operand"),
    "too_many": (OUT, (LHS, RHS, SIZES, OFFSET, ones(2, 4), ones(2, 4)), FORWARD, "too many operands"),
    "bias_of_drhs": (shaped(2, 3, 4), (LHS, ones(6, 4), SIZES, OFFSET, ones(2, 4)), {"product": "drhs"}, "too many"),
    "two_results": ((OUT, OUT), (LHS, RHS, SIZES, OFFSET), FORWARD, "result|ret"),
    "lhs_dtype": (OUT, (LHS.astype(I32), RHS, SIZES, OFFSET), FORWARD, "must be float32"),
    "rhs_dtype": (OUT, (LHS, RHS.astype(jnp.int8), SIZES, OFFSET), FORWARD, "must be float32"),
    "out_dtype": (shaped(6, 4, dtype=I32), (LHS, RHS, SIZES, OFFSET), FORWARD, "must be float32"),
    "complex": (OUT, (LHS.astype(jnp.complex64), RHS, SIZES, OFFSET), FORWARD, "must be float32"),
    "fp8": (OUT, (LHS.astype(jnp.float8_e4m3fn), RHS, SIZES, OFFSET), FORWARD, "must be float32"),
    "sizes_dtype": (OUT, (LHS, RHS, SIZES.astype(jnp.int16), OFFSET), FORWARD, "must be int32"),
    "sizes_float": (OUT, (LHS, RHS, SIZES.astype(F32), OFFSET), FORWARD, "must be int32"),
    "offset_dtype": (OUT, (LHS, RHS, SIZES, OFFSET.astype(jnp.uint32)), FORWARD, "must be int32"),
    "bias_dtype": (OUT, (LHS, RHS, SIZES, OFFSET, ones(2, 4, dtype=jnp.bfloat16)), FORWARD, "accumulation type"),
    "bias_shape": (OUT, (LHS, RHS, SIZES, OFFSET, ones(2, 3)), FORWARD, "bias|extents"),
    "bias_rank": (OUT, (LHS, RHS, SIZES, OFFSET, ones(4)), FORWARD, "rank"),
    "lhs_rank_0": (OUT, (ones(), RHS, SIZES, OFFSET), FORWARD, "rank"),
    "lhs_rank_1": (OUT, (ones(6), RHS, SIZES, OFFSET), FORWARD, "rank"),
    "lhs_rank_3": (OUT, (ones(1, 6, 3), RHS, SIZES, OFFSET), FORWARD, "rank"),
    "rhs_rank_2": (OUT, (LHS, ones(3, 4), SIZES, OFFSET), FORWARD, "rank"),
    "sizes_rank_0": (OUT, (LHS, RHS, OFFSET, OFFSET), FORWARD, "rank"),
    "sizes_rank_2": (OUT, (LHS, RHS, SIZES[None], OFFSET), FORWARD, "rank"),
    "offset_rank_1": (OUT, (LHS, RHS, SIZES, OFFSET[None]), FORWARD, "rank"),
    "out_rank_0": (shaped(), (LHS, RHS, SIZES, OFFSET), FORWARD, "rank"),
    "out_rank_3": (shaped(1, 6, 4), (LHS, RHS, SIZES, OFFSET), FORWARD, "rank"),
    "out_rows": (shaped(7, 4), (LHS, RHS, SIZES, OFFSET), FORWARD, "extents"),
    "out_columns": (shaped(6, 5), (LHS, RHS, SIZES, OFFSET), FORWARD, "extents"),
    "k": (OUT, (ones(6, 2), RHS, SIZES, OFFSET), FORWARD, "extents"),
    "dlhs_columns": (shaped(6, 3), (ones(6, 3), RHS, SIZES, OFFSET), {"product": "dlhs"}, "extents"),
    "drhs_rows": (shaped(2, 3, 4), (LHS, ones(5, 4), SIZES, OFFSET), {"product": "drhs"}, "extents"),
    "drhs_shape": (shaped(2, 4, 3), (LHS, ones(6, 4), SIZES, OFFSET), {"product": "drhs"}, "extents"),
    "batch_lhs": (
        shaped(3, 6, 4),
        (ones(2, 6, 3), ones(1, 2, 3, 4), SIZES[None], OFFSET[None]),
        FORWARD,
        "lhs.*batch axes",
    ),
    "batch_sizes": (
        shaped(3, 6, 4),
        (ones(3, 6, 3), ones(3, 2, 3, 4), ones(2, 2, dtype=I32), OFFSET[None]),
        FORWARD,
        "group_sizes.*batch axes",
    ),
    "batch_offset": (
        shaped(3, 6, 4),
        (ones(3, 6, 3), ones(3, 2, 3, 4), SIZES[None], ones(4, dtype=I32)),
        FORWARD,
        "group_offset.*batch axes",
    ),
    "batch_out": (
        shaped(1, 6, 4),
        (ones(3, 6, 3), ones(3, 2, 3, 4), SIZES[None], OFFSET[None]),
        FORWARD,
        "lhs.*batch axes",
    ),
    "batch_zero": (
        shaped(3, 6, 4),
        (ones(0, 6, 3), ones(3, 2, 3, 4), SIZES[None], OFFSET[None]),
        FORWARD,
        "lhs.*batch axes",
    ),
    "batch_bias": (
        shaped(3, 6, 4),
        (ones(3, 6, 3), ones(3, 2, 3, 4), SIZES[None], OFFSET[None], ones(2, 2, 4)),
        FORWARD,
        "bias.*batch axes",
    ),
}


@pytest.mark.parametrize(("out", "arrays", "attributes", "match"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_call_is_an_error_that_says_what_is_wrong(out: Any, arrays: Any, attributes: Any, match: str) -> None:
    with pytest.raises((JaxRuntimeError, ValueError), match=f"(?i){match}"):
        jax.block_until_ready(call(out, *arrays, **attributes))
    got = call(OUT, LHS, RHS, SIZES, OFFSET, **FORWARD)  # and the process goes on
    np.testing.assert_array_equal(got[:, 0], [3, 3, 3, 3, 3, 0])


def test_more_weights_than_groups_and_fewer_are_legal() -> None:
    for weights in (0, 1, 5):
        got = call(OUT, LHS, ones(weights, 3, 4), SIZES, OFFSET, **FORWARD)
        np.testing.assert_array_equal(got[:, 0], [3 * (row < [0, 2, 5, 5, 5, 5][weights]) for row in range(6)])


def test_batch_axes_of_full_length_and_of_length_one() -> None:
    lhs, rhs = normal((2, 1, 6, 3)), normal((1, 3, 2, 3, 4))
    sizes = jnp.array([[[2, 3], [6, 0], [0, 1]]], I32)
    offset = jnp.array([[0], [1]], I32)
    got = call(shaped(2, 3, 6, 4), lhs, rhs, sizes, offset, **FORWARD)
    for i, j in np.ndindex(2, 3):
        want = oracle.forward(lhs[i, 0], rhs[0, j], sizes[0, j], int(offset[i, 0]))
        oracle.assert_close(got[i, j], want, sizes[0, j])


@pytest.mark.parametrize("product", ["forward", "dlhs", "drhs"])
def test_garbage_sizes_and_offsets_stay_inside_the_arrays(product: str) -> None:
    """Arrays of ones between arrays of NaN: a read outside shows as NaN, a write outside as a changed neighbour."""
    m, k, n, w, groups = 37, 5, 9, 4, 11
    lhs_columns, out = (n if product == "dlhs" else k), (m, n)
    rhs = (w, k, n)
    if product == "drhs":
        rhs, out = (m, n), (w, k, n)
    elif product == "dlhs":
        out = (m, k)

    @jax.jit
    def run(lhs: Any, rhs: Any, sizes: Any, offset: Any) -> jax.Array:
        return jax.ffi.ffi_call("jax_ggemm", shaped(*out))(lhs, rhs, sizes, offset, product=product)

    rng = np.random.default_rng(0)
    extremes = np.array([-(2**31), 2**31 - 1, -1, 0, 1, 36, 37, 38, 2**30, -(2**30)])
    for trial in range(200):
        sizes = rng.integers(-(2**31), 2**31, groups) if trial % 2 else rng.choice(extremes, groups)
        offset = int(rng.choice(np.append(extremes, rng.integers(-(2**31), 2**31))))
        neighbours = [jnp.full(shape, jnp.nan) for shape in (out, (m, lhs_columns), rhs)]
        got = run(ones(m, lhs_columns), ones(*rhs), jnp.array(sizes, I32), jnp.array(offset, I32))
        if product == "drhs":
            want = oracle.d_rhs(np.ones((m, k)), np.ones((m, n)), sizes, w, offset).value
        else:
            want = oracle.forward(np.ones((m, lhs_columns)), np.ones((w, lhs_columns, out[1])), sizes, offset).value
        np.testing.assert_array_equal(got, want)
        assert all(np.isnan(array).all() for array in neighbours)


def test_thousands_of_tiny_groups_in_a_batch() -> None:
    sizes = np.random.default_rng(0).integers(0, 2, (16, 700)).astype(np.int32)
    lhs, rhs = normal((16, 400, 2)), normal((1, 700, 2, 3))
    got = call(shaped(16, 400, 3), lhs, rhs, sizes, jnp.zeros(16, I32), **FORWARD)
    for i in range(16):
        oracle.assert_close(got[i], oracle.forward(lhs[i], rhs[0], sizes[i]), sizes[i])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float64])
def test_split_contractions_equal_the_loop_and_themselves(dtype: Any, x64: None) -> None:
    """One group of 16384 rows or more is contracted in parts, whatever else the call holds."""
    m, k, n = 50_000, 7, 3
    lhs, rhs = normal((m, k), dtype), normal((m, n), dtype)
    for sizes in ([16384, 0, 16383, 17233], [m, 0, 0, 0], [0, 0, 0, 2**31 - 1]):
        arguments = lhs, rhs, jnp.array(sizes, I32), jnp.array(1, I32)
        got = call(shaped(3, k, n, dtype=dtype), *arguments, product="drhs")
        wide = np.float64 if dtype == jnp.float64 else np.float32
        oracle.assert_close(got, oracle.d_rhs(lhs, rhs, sizes, 3, 1), accumulation=wide)
        np.testing.assert_array_equal(got, call(shaped(3, k, n, dtype=dtype), *arguments, product="drhs"))
