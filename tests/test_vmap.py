"""vmap: any subset of the operands, any axis, nested, and in any order with the gradient."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import sweep
from test_ragged_dot import normal

import jax_ggemm

B, M, K, N, G, W = 3, 17, 5, 7, 4, 2
CORE = {"lhs": (M, K), "rhs": (W, K, N), "sizes": (G,), "offset": (), "bias": (W, N)}
SIZES = np.array([[3, 0, 5, 4], [0, 9, 0, 8], [1, -2, 30, 6]], np.int32)
SUBSETS = ["+".join(c) for size in range(1, 6) for c in itertools.combinations(CORE, size)]


def operands(batched: Any, axes: dict[str, int]) -> tuple[dict[str, Any], dict[str, int | None]]:
    """Arrays with a batch axis for the names in `batched`, and vmap's in_axes."""
    arrays: dict[str, Any] = {}
    for name, shape in CORE.items():
        full = {"sizes": SIZES, "offset": np.array([0, 1, 2], np.int32)}.get(name)
        if full is None:
            full = np.asarray(normal((B, *shape)))
        arrays[name] = jnp.asarray(np.moveaxis(full, 0, axes[name]) if name in batched else full[1])
    return arrays, {name: axes[name] if name in batched else None for name in CORE}


def element(arrays: dict[str, Any], in_axes: dict[str, int | None], index: int) -> dict[str, Any]:
    return {n: np.asarray(a if in_axes[n] is None else jnp.take(a, index, in_axes[n])) for n, a in arrays.items()}


def run(implementation: Any) -> Any:
    def op(o: dict[str, Any]) -> jax.Array:
        return jax_ggemm.ragged_dot(
            o["lhs"],
            o["rhs"],
            o["sizes"],
            group_offset=o["offset"],
            bias=o["bias"],
            implementation=implementation,
        )

    return op


def want(o: dict[str, Any]) -> oracle.Expected:
    return oracle.forward(o["lhs"], o["rhs"], o["sizes"], int(o["offset"]), o["bias"])


@pytest.mark.parametrize(("implementation", "batched"), sweep(SUBSETS))
def test_any_subset_of_the_operands(implementation: Any, batched: str) -> None:
    arrays, in_axes = operands(batched.split("+"), dict.fromkeys(CORE, 0))
    got = jax.jit(jax.vmap(run(implementation), in_axes=(in_axes,)))(arrays)
    for i in range(B):
        one = element(arrays, in_axes, i)
        oracle.assert_close(got[i], want(one), one["sizes"])


@pytest.mark.parametrize("axes", [(1, 1, 1, 0, 1), (2, 2, 0, 0, 2), (0, 3, 1, 0, 0), (-1, -1, -1, 0, -2)], ids=str)
def test_any_batch_axis_in_and_out(implementation: Any, axes: tuple[int, ...]) -> None:
    arrays, in_axes = operands(CORE, dict(zip(CORE, axes, strict=True)))
    got = jax.jit(jax.vmap(run(implementation), in_axes=(in_axes,), out_axes=1))(arrays)
    for i in range(B):
        one = element(arrays, in_axes, i)
        oracle.assert_close(got[:, i], want(one), one["sizes"])


def test_nested_vmaps_over_different_operands(implementation: Any) -> None:
    lhs, rhs, sizes = normal((2, M, K)), normal((B, W, K, N)), jnp.array([[3, 9], [8, 0], [0, 0], [20, 1]])

    def op(lhs: Any, rhs: Any, sizes: Any) -> jax.Array:
        return jax_ggemm.ragged_dot(lhs, rhs, sizes, implementation=implementation)

    mapped = jax.vmap(jax.vmap(jax.vmap(op, (None, 0, None)), (0, None, None)), (None, None, 0))
    got = jax.jit(mapped)(lhs, rhs, sizes)
    assert got.shape == (4, 2, B, M, N)
    for s, i, j in np.ndindex(4, 2, B):
        oracle.assert_close(got[s, i, j], oracle.forward(lhs[i], rhs[j], sizes[s]), sizes[s])


def test_nested_vmaps_over_the_same_operands(implementation: Any) -> None:
    lhs, rhs, sizes = normal((2, B, M, K)), normal((B, 2, W, K, N)), jnp.array([[3, 9], [8, 0]])

    def op(lhs: Any, rhs: Any, sizes: Any) -> jax.Array:
        return jax_ggemm.ragged_dot(lhs, rhs, sizes, implementation=implementation)

    got = jax.jit(jax.vmap(jax.vmap(op, (0, 0, None)), (0, 1, 0)))(lhs, rhs, sizes)
    for i, j in np.ndindex(2, B):
        oracle.assert_close(got[i, j], oracle.forward(lhs[i, j], rhs[j, i], sizes[i]), sizes[i])


@pytest.mark.parametrize("batch", [0, 1])
def test_batches_of_none_and_one(implementation: Any, batch: int) -> None:
    lhs, rhs, sizes = normal((batch, M, K)), normal((W, K, N)), jnp.array([4, 5])

    def op(lhs: Any) -> jax.Array:
        return jax_ggemm.ragged_dot(lhs, rhs, sizes, implementation=implementation)

    got = jax.jit(jax.vmap(op))(lhs)
    assert got.shape == (batch, M, N)
    gradient = jax.jit(jax.grad(lambda lhs: jnp.sum(jax.vmap(op)(lhs) ** 2)))(lhs)
    assert gradient.shape == lhs.shape
    for i in range(batch):
        oracle.assert_close(got[i], oracle.forward(lhs[i], rhs, sizes), sizes)


GRADIENT_SUBSETS = ["lhs+sizes", "lhs", "rhs", "sizes", "offset+bias", "lhs+rhs+sizes+offset+bias"]


@pytest.mark.parametrize(("implementation", "batched"), sweep(GRADIENT_SUBSETS))
def test_vmap_of_grad_and_grad_of_vmap(implementation: Any, batched: str) -> None:
    arrays, in_axes = operands(batched.split("+"), dict.fromkeys(CORE, 0))
    op = run(implementation)
    names = ("lhs", "rhs", "bias")
    cotangents = normal((B, M, N))

    def loss(wrt: dict[str, Any], rest: dict[str, Any], ct: Any) -> jax.Array:
        return jnp.sum(op({**wrt, **rest}) * ct)

    def split(tree: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        return {n: tree[n] for n in names}, {n: tree[n] for n in CORE if n not in names}

    axes = (*split(in_axes), 0)
    each = jax.jit(jax.vmap(jax.grad(loss), in_axes=axes))(*split(arrays), cotangents)
    total = jax.jit(jax.grad(lambda *a: jnp.sum(jax.vmap(loss, in_axes=axes)(*a))))(*split(arrays), cotangents)
    sums = dict.fromkeys(names, 0.0)
    for i in range(B):
        one = element(arrays, in_axes, i)
        offset, sizes, ct = int(one["offset"]), one["sizes"], cotangents[i]
        expected = {
            "lhs": oracle.d_lhs(ct, one["rhs"], sizes, offset),
            "rhs": oracle.d_rhs(one["lhs"], ct, sizes, W, offset),
            "bias": oracle.d_bias(ct, sizes, W, offset),
        }
        for name in names:
            oracle.assert_close(each[name][i], expected[name])
            sums[name] += expected[name].value
            if name in batched.split("+"):
                oracle.assert_close(total[name][i], expected[name])
    for name in set(names) - set(batched.split("+")):
        np.testing.assert_allclose(total[name], sums[name], rtol=1e-4, atol=1e-4)


def test_per_example_gradients_with_an_unbatched_cotangent(implementation: Any) -> None:
    """lax refuses these: an unbatched cotangent, jacrev."""
    lhs, rhs, sizes = normal((B, M, K)), normal((W, K, N)), jnp.array([4, 9])

    def total(lhs: Any, rhs: Any) -> jax.Array:
        return jax_ggemm.ragged_dot(lhs, rhs, sizes, implementation=implementation).sum()

    got = jax.jit(jax.vmap(jax.grad(total, 1), (0, None)))(lhs, rhs)
    for i in range(B):
        oracle.assert_close(got[i], oracle.d_rhs(lhs[i], np.ones((M, N)), sizes, W))


def test_vmap_of_transposed_weights(implementation: Any) -> None:
    lhs, rhs, sizes = normal((B, M, K)), normal((W, N, K)), jnp.array([4, 9])

    def op(lhs: Any) -> jax.Array:
        return jax_ggemm.ragged_dot(lhs, rhs, sizes, transpose_rhs=True, implementation=implementation)

    got = jax.jit(jax.vmap(op))(lhs)
    for i in range(B):
        oracle.assert_close(got[i], oracle.forward(lhs[i], np.swapaxes(rhs, 1, 2), sizes), sizes)


def test_an_unbatched_operand_is_not_copied() -> None:
    """The program of the native call holds no array of the batch's number of weights."""
    lhs, rhs, sizes = jnp.zeros((37, M, K)), jnp.zeros((W, K, N)), jnp.zeros((37, W), jnp.int32)

    def op(lhs: Any, sizes: Any) -> jax.Array:
        return jax_ggemm.ragged_dot(lhs, rhs, sizes, implementation="cpu")

    text = jax.jit(jax.vmap(op)).lower(lhs, sizes).as_text()
    assert "jax_ggemm" in text
    assert f"37x{W}x{K}x{N}" not in text


def test_per_example_second_derivatives(implementation: Any) -> None:
    lhs, rhs, sizes = normal((B, M, K)), normal((W, K, N)), jnp.array([[4, 9], [0, 3], [17, 1]])

    def second(lhs: Any, rhs: Any, sizes: Any) -> jax.Array:
        def loss(lhs: Any, rhs: Any) -> jax.Array:
            return jnp.sum(jnp.sin(jax_ggemm.ragged_dot(lhs, rhs, sizes, implementation=implementation)))

        return jax.grad(lambda x, w: jnp.sum(jax.grad(loss, 1)(x, w) ** 2))(lhs, rhs)

    got = jax.jit(jax.vmap(second, (0, None, 0)))(lhs, rhs, sizes)
    one = jax.jit(second)
    for i in range(B):
        np.testing.assert_allclose(got[i], one(lhs[i], rhs, sizes[i]), rtol=1e-4, atol=1e-4)
