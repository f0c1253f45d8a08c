"""Dtypes: which result each pair of operands gives, in which dtype sums are kept, and how often they are rounded."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import CUTE, sweep
from jax import lax
from test_ragged_dot import check_everything, normal

import jax_ggemm

FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)
OTHERS = (
    *(jnp.int8, jnp.uint8, jnp.int16, jnp.int32, jnp.uint32, jnp.int64, jnp.int4, jnp.bool_, jnp.complex64),
    *(jnp.float8_e4m3fn, jnp.float8_e5m2),
)

run = jax.jit(jax_ggemm.ragged_dot, static_argnames=("precision", "preferred_element_type", "implementation"))


def name(value: Any) -> str:
    return str(value) if isinstance(value, str | int) or value is CUTE else jnp.dtype(value).name


# lhs, rhs, result and cotangent
COMBINATIONS = [
    *((dtype, dtype, dtype) for dtype in FLOATS[:2]),
    (jnp.float64, jnp.float64, jnp.float64),
    (jnp.bfloat16, jnp.bfloat16, jnp.float32),
    (jnp.float32, jnp.bfloat16, jnp.float32),
    (jnp.bfloat16, jnp.float32, jnp.bfloat16),
    (jnp.float16, jnp.bfloat16, jnp.float32),
    (jnp.float32, jnp.float64, jnp.float64),
    (jnp.float32, jnp.float32, jnp.float64),
    (jnp.bfloat16, jnp.bfloat16, jnp.float64),
    (jnp.float64, jnp.float64, jnp.float32),
]
SHAPES = [(33, 24), (1, 1), (5, 65), (63, 6), (64, 64), (513, 17)]


def mixes() -> list[Any]:
    """Every shape with every combination that the implementation takes."""
    cases = [(*shape, *combination) for shape in SHAPES for combination in COMBINATIONS]
    return [case for case in sweep(cases) if case.values[0] is not CUTE or jnp.float64 not in case.values[3:]]


@pytest.mark.parametrize(("implementation", "k", "n", "lhs", "rhs", "out"), mixes(), ids=name)
def test_floats_of_any_mix(implementation: Any, k: int, n: int, lhs: Any, rhs: Any, out: Any, x64: None) -> None:
    scale = 0.25  # float16 ends at 65504
    arguments = normal((200, k), lhs) * scale, normal((6, k, n), rhs) * scale
    for sizes in ([1, 17, 0, 33, 25, 100], [190, 0, 0, 0, 0, 3]):
        check_everything(implementation, *arguments, np.array(sizes, np.int32), normal((200, n), out) * scale)


@pytest.mark.parametrize(("lhs", "rhs"), list(itertools.combinations_with_replacement((*FLOATS, *OTHERS), 2)), ids=name)
def test_result_dtype_is_that_of_lax(lhs: Any, rhs: Any, x64: None) -> None:
    arguments = [jax.ShapeDtypeStruct(*of) for of in (((6, 3), lhs), ((2, 3, 4), rhs), ((2,), jnp.int32))]
    try:
        want = jax.eval_shape(lax.ragged_dot, *arguments)
    except TypeError:
        with pytest.raises(TypeError):
            jax.eval_shape(jax_ggemm.ragged_dot, *arguments)
        return
    got = jax.eval_shape(jax_ggemm.ragged_dot, *arguments)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)


@pytest.mark.parametrize("dtype", [d for d in OTHERS if d is not jnp.bool_], ids=name)
def test_integers_fp8_and_complex_equal_lax(dtype: Any, x64: None) -> None:
    """Through the default implementation, which falls back to plain JAX for these."""
    rng = np.random.default_rng(0)
    wide = dtype if dtype in (jnp.complex64, jnp.int64) else jnp.int32
    wide = jnp.float32 if jnp.issubdtype(dtype, jnp.floating) else wide
    lhs, rhs = (jnp.asarray(rng.integers(0, 4, shape), dtype) for shape in ((9, 5), (3, 5, 4)))
    sizes = jnp.array([2, 0, 6])
    got = run(lhs, rhs, sizes, preferred_element_type=wide)
    want = oracle.forward(*(np.asarray(a).real for a in (lhs, rhs)), sizes)
    assert got.dtype == wide
    np.testing.assert_array_equal(got, want.value)


def test_bool_operands_equal_lax() -> None:
    rng = np.random.default_rng(0)
    lhs, rhs = (jnp.asarray(rng.random(shape) < 0.3) for shape in ((9, 5), (3, 5, 4)))
    sizes = jnp.array([2, 0, 6])
    np.testing.assert_array_equal(run(lhs, rhs, sizes), lax.ragged_dot(lhs, rhs, sizes))


def test_integer_sums_do_not_wrap_in_the_operands_dtype() -> None:
    lhs, rhs = jnp.full((4, 64), 100, jnp.int8), jnp.full((1, 64, 3), 100, jnp.int8)
    got = run(lhs, rhs, jnp.array([4]), preferred_element_type=jnp.int32)
    np.testing.assert_array_equal(got, 640000)
    got = run(lhs, rhs, jnp.array([4]), preferred_element_type=jnp.float32)
    np.testing.assert_array_equal(got, 640000)


def test_cpu_refuses_integers_and_names_the_operand() -> None:
    lhs, rhs = jnp.ones((4, 2)), jnp.ones((1, 2, 3), jnp.int8)
    with pytest.raises(NotImplementedError, match=r"rhs.*int8"):
        jax_ggemm.ragged_dot(lhs, rhs, jnp.array([4]), implementation="cpu")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=name)
def test_sums_of_narrow_floats_are_kept_in_float32(implementation: Any, dtype: Any) -> None:
    """One large term and thousands of small ones: in the operands' dtype, the small ones would vanish."""
    lhs = jnp.full((2048, 2049), 1, dtype).at[:, 0].set(1024)
    rhs = jnp.full((1, 2049, 8), 0.5, dtype)
    sizes = jnp.array([2048])

    result, vjp = jax.vjp(lambda lhs, rhs: run(lhs, rhs, sizes, implementation=implementation), lhs, rhs)
    np.testing.assert_array_equal(result, 1536)
    _, d_rhs = vjp(jnp.full((2048, 8), 0.5, dtype).at[0].set(512))
    np.testing.assert_array_equal(d_rhs[0, 1:], jnp.asarray(512 + 2047 / 2, dtype))


def test_result_is_rounded_once_to_nearest_even(implementation: Any) -> None:
    """Products with one are exact: what is left is the rounding, at ties, near overflow and of tiny values."""
    values = np.concatenate(
        [
            np.random.default_rng(0).standard_normal(400) * 10.0 ** np.random.default_rng(1).uniform(-8, 5, 400),
            [0.0, -0.0, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 65504, 65519.99, 65520, -65536],
            [2.0**-24, 2.0**-25, 2.0**-25 * 1.0001, 3 * 2.0**-25, 6e-8, 2.0**-14 * 0.9999, 2.0**-14, 3.38e38, np.inf],
        ]
    ).astype(np.float32)
    lhs, rhs, sizes = jnp.asarray(values)[:, None], jnp.ones((1, 1, 1)), jnp.array([len(values)])
    for dtype in (jnp.bfloat16, jnp.float16):
        got = run(lhs, rhs, sizes, preferred_element_type=dtype, implementation=implementation)
        with np.errstate(over="ignore"):
            want = values.astype(dtype)
        np.testing.assert_array_equal(np.asarray(got)[:, 0], want)


def test_every_half_and_bfloat16_is_read_exactly(implementation: Any) -> None:
    bits = np.arange(65536, dtype=np.uint16)
    for dtype in (jnp.float16, jnp.bfloat16):
        values = bits.view(dtype)
        tiny = np.abs(values.astype(np.float32)) < np.finfo(np.float32).tiny  # flushed or not, as XLA likes
        lhs = jnp.asarray(values)[:, None]
        got = run(
            lhs,
            jnp.ones((1, 1, 1), dtype),
            jnp.array([65536]),
            preferred_element_type=jnp.float32,
            implementation=implementation,
        )
        np.testing.assert_array_equal(np.asarray(got)[~tiny, 0], values.astype(np.float32)[~tiny])


PRECISIONS = [None, "default", "high", "highest", lax.Precision.HIGHEST, ("default", "highest")]


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_precision_is_taken_as_in_lax(implementation: Any, precision: Any) -> None:
    lhs, rhs, sizes = normal((9, 5)), normal((2, 5, 4)), np.array([3, 4])
    got = run(lhs, rhs, jnp.asarray(sizes), precision=precision, implementation=implementation)
    oracle.assert_close(got, oracle.forward(lhs, rhs, sizes), sizes)


@pytest.mark.parametrize("precision", ["BF16_BF16_F32", lax.DotAlgorithmPreset.F32_F32_F32], ids=str)
def test_dot_algorithms_run_by_default_and_are_refused_by_name(precision: Any) -> None:
    lhs, rhs, sizes = jnp.ones((9, 5)), jnp.ones((2, 5, 4)), jnp.array([3, 4])
    np.testing.assert_array_equal(run(lhs, rhs, sizes, precision=precision)[:7], 5)
    with pytest.raises(NotImplementedError, match="algorithm"):
        jax_ggemm.ragged_dot(lhs, rhs, sizes, precision, implementation="cpu")
