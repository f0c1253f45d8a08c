"""Reverse mode of every order, against finite differences and against a loop over slices that JAX differentiates."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CUTE, sweep
from jax.test_util import check_grads
from test_ragged_dot import normal

import jax_ggemm

SIZES = (3, 0, 5, 1)
"""Of 11 rows: the last two belong to no group."""
M, K, N, G = 11, 4, 3, 4


def loop(lhs: jax.Array, rhs: jax.Array, bias: jax.Array | float = 0.0) -> jax.Array:
    """The product as a loop over slices, for SIZES."""
    rows, first = [], 0
    bias = jnp.broadcast_to(bias, (G, rhs.shape[2]))
    for g, size in enumerate(SIZES):
        rows.append(lhs[first : first + size] @ rhs[g] + bias[g])
        first += size
    return jnp.concatenate([*rows, jnp.zeros((lhs.shape[0] - first, rhs.shape[2]), lhs.dtype)])


@pytest.fixture
def operands(request: pytest.FixtureRequest, x64: None) -> tuple[jax.Array, ...]:
    """In float64, but for the kernels, which add in float32."""
    kernels = "implementation" in request.fixturenames and request.getfixturevalue("implementation") is CUTE
    dtype = jnp.float32 if kernels else jnp.float64
    return tuple(normal(shape, dtype) for shape in ((M, K), (G, K, N), (G, N)))


@pytest.fixture
def op(ragged_dot: Any) -> Any:
    return jax.jit(lambda lhs, rhs, bias=None: ragged_dot(lhs, rhs, jnp.array(SIZES, jnp.int32), bias=bias))


def close(got: Any, want: Any) -> None:
    def one(got: Any, want: Any) -> None:
        limit = 1e-10 if got.dtype == np.float64 else 5e-5 * max(1.0, float(jnp.abs(want).max()))
        np.testing.assert_allclose(got, want, rtol=limit, atol=limit)

    jax.tree.map(one, got, want)


def test_gradients_equal_finite_differences(op: Any, operands: Any) -> None:
    limit = 1e-6 if operands[0].dtype == np.float64 else 2e-2
    check_grads(lambda *o: jnp.sin(op(*o)), operands, order=1, modes=["rev"], rtol=limit, atol=limit)


def test_second_order_gradients_equal_finite_differences(operands: Any) -> None:
    def op(*o: Any) -> jax.Array:
        return jax_ggemm.ragged_dot(*o, jnp.array(SIZES, jnp.int32))

    check_grads(lambda *o: jnp.sin(op(*o)), operands[:2], order=2, modes=["rev"], rtol=1e-5, atol=1e-5)


def repeated_gradient(function: Any, arguments: tuple[Any, ...]) -> Any:
    """Gradients of gradients in these arguments; something nonlinear lies between each two."""

    def result(*o: Any) -> jax.Array:
        return jnp.sum(jnp.sin(function(*o)))

    for argument in arguments:
        gradient = jax.grad(result, argument)

        def result(*o: Any, _gradient: Any = gradient) -> jax.Array:
            return sum(jnp.sum(jnp.cos(x)) for x in jax.tree.leaves(_gradient(*o)))

    return jax.jit(gradient)


def test_second_reverse_derivatives_equal_the_loop(op: Any, operands: Any) -> None:
    arguments = (0, 1, 2), (0, 1, 2)
    close(repeated_gradient(op, arguments)(*operands), repeated_gradient(loop, arguments)(*operands))


@pytest.mark.parametrize(("implementation", "arguments"), sweep(["010", "111", "120"]))
def test_third_reverse_derivatives_equal_the_loop(op: Any, operands: Any, arguments: str) -> None:
    order = tuple(int(argument) for argument in arguments)
    close(repeated_gradient(op, order)(*operands), repeated_gradient(loop, order)(*operands))


def test_jacrev_and_jacrev_of_grad_equal_the_loop(op: Any, operands: Any) -> None:
    lhs, rhs, _ = operands
    close(jax.jacrev(op, 1)(lhs, rhs), jax.jacrev(loop, 1)(lhs, rhs))

    def hessian(function: Any) -> Any:
        return jax.jit(jax.jacrev(jax.grad(lambda x, w: jnp.sum(jnp.sin(function(x, w))), 1), 0))

    close(hessian(op)(lhs, rhs), hessian(loop)(lhs, rhs))


def test_forward_over_reverse_equals_the_loop_in_plain_jax(operands: Any) -> None:
    def op(lhs: Any, rhs: Any, bias: Any) -> jax.Array:
        return jax_ggemm.ragged_dot(lhs, rhs, jnp.array(SIZES, jnp.int32), bias=bias, implementation="xla")

    def hessian(function: Any) -> Any:
        return jax.jit(jax.hessian(lambda w, x, b: jnp.sum(jnp.sin(function(x, w, b)))))

    lhs, rhs, bias = operands
    close(hessian(op)(rhs, lhs, bias), hessian(loop)(rhs, lhs, bias))
    tangents = tuple(jnp.cos(o) for o in operands)
    close(jax.jvp(jax.jit(op), operands, tangents), jax.jvp(loop, operands, tangents))
    value, linear = jax.linearize(op, *operands)
    close((value, linear(*tangents)), jax.jvp(loop, operands, tangents))


def test_transposed_weights_have_second_derivatives(ragged_dot: Any, operands: Any) -> None:
    lhs, rhs, bias = operands

    def op(lhs: Any, rhs: Any, bias: Any) -> jax.Array:
        return ragged_dot(lhs, rhs.swapaxes(1, 2), jnp.array(SIZES, jnp.int32), bias=bias, transpose_rhs=True)

    def twice(function: Any) -> Any:
        first = jax.grad(lambda *o: jnp.sum(jnp.sin(function(*o))), (0, 1))
        return jax.jit(jax.grad(lambda *o: sum(jnp.sum(jnp.cos(x)) for x in first(*o)), (0, 1, 2)))

    close(twice(op)(lhs, rhs, bias), twice(loop)(lhs, rhs, bias))


def test_gradient_of_each_operand_alone(op: Any, operands: Any) -> None:
    for argument in range(3):
        gradients = [jax.grad(lambda *o, f=f: jnp.sum(f(*o) ** 2), argument)(*operands) for f in (op, loop)]
        close(*gradients)


def test_gradients_have_the_dtype_of_their_operand_and_are_rounded_once(ragged_dot: Any) -> None:
    """A float32 cotangent of bfloat16 operands is used as it is, not rounded to bfloat16 first."""
    lhs = jnp.ones((2, 1), jnp.bfloat16)
    rhs = jnp.ones((1, 1, 1), jnp.bfloat16)
    run = lambda x, w: ragged_dot(x, w, jnp.array([2]), preferred_element_type=jnp.float32)  # noqa: E731
    _, vjp = jax.vjp(jax.jit(run), lhs, rhs)
    d_lhs, d_rhs = vjp(jnp.array([[1 + 2.0**-10], [-1]], jnp.float32))
    assert (d_lhs.dtype, d_rhs.dtype) == (jnp.bfloat16, jnp.bfloat16)
    assert float(d_rhs[0, 0, 0]) == 2.0**-10


def test_group_sizes_take_no_gradient(ragged_dot: Any) -> None:
    lhs, rhs = normal((5, 2)), normal((2, 2, 3))
    run = jax.jit(lambda x, w, s: jnp.sum(ragged_dot(x, w, s)))
    gradient = jax.grad(run, 2, allow_int=True)(lhs, rhs, jnp.array([2, 3]))
    assert gradient.dtype == jax.dtypes.float0


def test_gradients_are_deterministic_in_second_order(op: Any, operands: Any) -> None:
    second = jax.jit(jax.grad(lambda x, w: jnp.sum(jax.grad(lambda x, w: jnp.sum(op(x, w) ** 2), 1)(x, w) ** 2)))
    first = second(*operands[:2])
    for _ in range(5):
        np.testing.assert_array_equal(second(*operands[:2]), first)
