"""Operands that are views in the program: transposed, sliced, strided, broadcast. They must act as copies would."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import sweep
from test_ragged_dot import normal

M, K, N, G = 29, 13, 11, 4
SIZES = np.array([8, 0, 15, 3], np.int32)

LHS_VIEWS: dict[str, tuple[tuple[int, ...], Any]] = {
    "transposed": ((K, M), lambda a: a.T),
    "column_slice": ((M, K + 6), lambda a: a[:, 3 : 3 + K]),
    "row_slice": ((M + 5, K), lambda a: a[5:]),
    "strided": ((2 * M, 3 * K), lambda a: a[::2, ::3]),
    "reversed": ((M, K), lambda a: a[::-1, ::-1]),
    "broadcast_row": ((K,), lambda a: jnp.broadcast_to(a, (M, K))),
    "broadcast_scalar": ((), lambda a: jnp.broadcast_to(a, (M, K))),
    "reshaped": ((K, M), lambda a: a.reshape(M, K)),
    "gathered": ((5, K), lambda a: a[jnp.arange(M) % 5]),
    "padded": ((M - 4, K - 2), lambda a: jnp.pad(a, ((2, 2), (1, 1)))),
}
RHS_VIEWS: dict[str, tuple[tuple[int, ...], Any]] = {
    "swapaxes": ((G, N, K), lambda a: a.swapaxes(1, 2)),
    "experts_last": ((K, N, G), lambda a: jnp.moveaxis(a, 2, 0)),
    "first_half": ((G, K, 2 * N), lambda a: a[..., :N]),
    "second_half": ((G, K, 2 * N), lambda a: a[..., N:]),
    "interleaved": ((G, K, 2 * N), lambda a: a[..., 1::2]),
    "expert_slice": ((G + 3, K, N), lambda a: a[2 : 2 + G]),
    "broadcast": ((K, N), lambda a: jnp.broadcast_to(a, (G, K, N))),
    "stacked": ((K, N), lambda a: jnp.stack([a * i for i in range(G)])),
}
CT_VIEWS: dict[str, tuple[tuple[int, ...], Any]] = {
    "broadcast_scalar": ((), lambda a: jnp.broadcast_to(a, (M, N))),
    "broadcast_rows": ((N,), lambda a: jnp.broadcast_to(a, (M, N))),
    "broadcast_columns": ((M, 1), lambda a: jnp.broadcast_to(a, (M, N))),
    "split": ((M, 2 * N), lambda a: jnp.split(a, 2, axis=1)[1]),
    "transposed": ((N, M), lambda a: a.T),
}
VIEWS = [
    *(("lhs", *view) for view in LHS_VIEWS.items()),
    *(("rhs", *view) for view in RHS_VIEWS.items()),
    *(("ct", *view) for view in CT_VIEWS.items()),
]


@pytest.mark.parametrize(
    ("implementation", "operand", "name", "view"), sweep(VIEWS), ids=lambda v: v if isinstance(v, str) else ""
)
def test_a_view_acts_as_its_copy(ragged_dot: Any, operand: str, name: str, view: Any) -> None:
    shape, make = view
    bases = {"lhs": normal((M, K)), "rhs": normal((G, K, N)), "ct": normal((M, N)), operand: normal(shape, seed=1)}

    def run(bases: dict[str, Any]) -> tuple[jax.Array, ...]:
        arrays = {**bases, operand: make(bases[operand])}
        result, vjp = jax.vjp(lambda x, w: ragged_dot(x, w, SIZES), arrays["lhs"], arrays["rhs"])
        return result, *vjp(arrays["ct"])

    arrays = {**bases, operand: make(bases[operand])}
    result, d_lhs, d_rhs = jax.jit(run)(bases)
    oracle.assert_close(result, oracle.forward(arrays["lhs"], arrays["rhs"], SIZES), SIZES)
    oracle.assert_close(d_lhs, oracle.d_lhs(arrays["ct"], arrays["rhs"], SIZES), SIZES)
    oracle.assert_close(d_rhs, oracle.d_rhs(arrays["lhs"], arrays["ct"], SIZES, G))


def test_gradients_flow_into_the_base_of_a_view(ragged_dot: Any) -> None:
    lhs, base = normal((M, K)), normal((G, 2 * N, K))
    run = jax.jit(jax.grad(lambda b: jnp.sum(ragged_dot(lhs, b.swapaxes(1, 2)[..., N:], SIZES))))
    want = oracle.d_rhs(lhs, np.ones((M, N)), SIZES, G)
    got = run(base)
    np.testing.assert_array_equal(got[:, :N], 0)
    oracle.assert_close(got[:, N:].swapaxes(1, 2), want)


@pytest.mark.parametrize("order", ["C", "F"])
def test_numpy_arrays_of_any_memory_order(ragged_dot: Any, order: Any) -> None:
    lhs = np.asarray(np.asarray(normal((M, K))), order=order)
    rhs = np.asarray(np.asarray(normal((G, K, N))), order=order)
    oracle.assert_close(jax.jit(ragged_dot)(lhs, rhs, SIZES), oracle.forward(lhs, rhs, SIZES), SIZES)


def test_objects_that_give_an_array_are_taken(ragged_dot: Any) -> None:
    class Wrapped:
        def __init__(self, array: Any) -> None:
            self.array = array

        def __jax_array__(self) -> jax.Array:
            return jnp.asarray(self.array)

    lhs, rhs = normal((M, K)), normal((G, K, N))
    got = ragged_dot(Wrapped(lhs), Wrapped(rhs), Wrapped(SIZES))
    oracle.assert_close(got, oracle.forward(lhs, rhs, SIZES), SIZES)


def test_one_array_as_both_operands(ragged_dot: Any) -> None:
    """lhs and rhs that share a buffer, and a cotangent that is the result itself."""
    base = normal((G, N, N))

    def loss(base: jax.Array) -> jax.Array:
        return jnp.sum(ragged_dot(base[2], base, np.array([4, 0, 6, 1])) ** 2)

    def reference(base: jax.Array) -> jax.Array:
        rows = (base[2][:4] @ base[0], base[2][4:10] @ base[2], base[2][10:] @ base[3])
        return sum(jnp.sum(r**2) for r in rows)

    np.testing.assert_allclose(jax.jit(jax.grad(loss))(base), jax.grad(reference)(base), rtol=1e-4, atol=1e-4)
