"""jit, scan, remat, donation, export, symbolic shapes and threads."""

from __future__ import annotations

import concurrent.futures
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax import export, lax
from jax.ad_checkpoint import checkpoint_policies
from test_ragged_dot import normal

import jax_ggemm

M, K, N, G = 14, 5, 7, 3
SIZES = np.array([4, 0, 8], np.int32)


@pytest.fixture
def operands() -> tuple[jax.Array, jax.Array]:
    return normal((M, K)), normal((G, K, N))


def test_eager_equals_jit_and_nested_jit(ragged_dot: Any, operands: Any) -> None:
    eager = ragged_dot(*operands, SIZES)
    nested = jax.jit(lambda *a: jax.jit(ragged_dot)(*a))(*operands, SIZES)
    oracle.assert_close(eager, oracle.forward(*operands, SIZES), SIZES)
    np.testing.assert_array_equal(eager, nested)


def test_new_sizes_and_offsets_compile_nothing(ragged_dot: Any, operands: Any) -> None:
    step = jax.jit(jax.value_and_grad(lambda x, w, s, o: jnp.sum(ragged_dot(x, w, s, group_offset=o) ** 2), (0, 1)))
    for sizes in ([4, 0, 8], [0, 0, 0], [14, 0, 0], [5, 5, 5], [-1, 20, 3]):
        for offset in (0, 1):
            step(*operands, jnp.array(sizes), jnp.array(offset))
    assert step._cache_size() == 1


def test_scan_over_layers_and_its_gradient(ragged_dot: Any) -> None:
    lhs, layers = normal((M, K)), normal((4, G, K, K)) / K**0.5
    sizes = jnp.array([[4, 0, 8], [1, 1, 1], [0, 14, 0], [6, 6, 2]])

    def scanned(lhs: Any, layers: Any) -> jax.Array:
        return jnp.sum(lax.scan(lambda x, w: (jnp.tanh(ragged_dot(x, *w)) + x, None), lhs, (layers, sizes))[0] ** 2)

    def unrolled(lhs: Any, layers: Any) -> jax.Array:
        for i in range(4):
            lhs = jnp.tanh(ragged_dot(lhs, layers[i], sizes[i])) + lhs
        return jnp.sum(lhs**2)

    got, want = (jax.jit(jax.value_and_grad(f, (0, 1)))(lhs, layers) for f in (scanned, unrolled))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, want)


def test_while_loop_and_cond(ragged_dot: Any, operands: Any) -> None:
    lhs, rhs = operands

    def run(flag: Any, steps: Any) -> jax.Array:
        one = lax.cond(flag, lambda: ragged_dot(lhs, rhs, SIZES), lambda: jnp.zeros((M, N)))
        return lax.fori_loop(0, steps, lambda i, x: x + ragged_dot(lhs, rhs, SIZES), one)

    want = np.asarray(jax.jit(ragged_dot)(lhs, rhs, SIZES))
    np.testing.assert_allclose(jax.jit(run)(True, 2), 3 * want, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(run)(False, 2), 2 * want, rtol=1e-6)


@pytest.mark.parametrize(("saved", "products"), [(jax_ggemm.RESULT_NAME, 3), ("another_name", 4)])
def test_remat_recomputes_the_product_unless_its_name_is_saved(operands: Any, saved: str, products: int) -> None:
    op = functools.partial(jax_ggemm.ragged_dot, implementation="cpu")
    policy = checkpoint_policies.save_only_these_names(saved)
    loss = jax.checkpoint(lambda x, w: jnp.sum(jnp.sin(op(x, w, SIZES))), policy=policy)
    step = jax.jit(jax.value_and_grad(loss, (0, 1)))
    assert step.lower(*operands).as_text().count("custom_call @jax_ggemm") == products


def test_remat_gives_the_same_gradients(ragged_dot: Any, operands: Any) -> None:
    def loss(lhs: Any, rhs: Any) -> jax.Array:
        return jnp.sum(jnp.sin(ragged_dot(lhs, rhs, SIZES)))

    want = jax.jit(jax.grad(loss, (0, 1)))(*operands)
    for policy in (None, checkpoint_policies.save_only_these_names(jax_ggemm.RESULT_NAME)):
        got = jax.jit(jax.grad(jax.checkpoint(loss, policy=policy), (0, 1)))(*operands)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), got, want)


def test_donated_operands_may_become_the_result(ragged_dot: Any) -> None:
    rhs, sizes = normal((G, K, K)), np.array([4, 0, 8], np.int32)
    step = jax.jit(lambda x, w: ragged_dot(x, w, sizes) + x, donate_argnums=0)
    update = jax.jit(lambda w, x: w - 0.1 * jax.grad(lambda w: jnp.sum(ragged_dot(x, w, sizes)))(w), donate_argnums=0)
    x = np.asarray(normal((M, K)))
    want = oracle.forward(x, rhs, sizes).value + x
    np.testing.assert_allclose(step(jnp.array(x), rhs), want, rtol=1e-5, atol=1e-5)
    want = np.asarray(rhs) - 0.1 * oracle.d_rhs(x, np.ones((M, K)), sizes, G).value
    np.testing.assert_allclose(update(jnp.array(rhs), x), want, rtol=1e-5, atol=1e-5)


def test_export_survives_serialisation(ragged_dot: Any, operands: Any) -> None:
    step = jax.jit(jax.value_and_grad(lambda x, w, s: jnp.sum(ragged_dot(x, w, s) ** 2), (0, 1)))
    exported = export.export(step, disabled_checks=jax_ggemm.export_checks)(*operands, SIZES)
    loaded = export.deserialize(exported.serialize())
    for sizes in (SIZES, np.array([0, 14, 0], np.int32)):
        got, want = loaded.call(*operands, sizes), step(*operands, sizes)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), got, want)


def test_export_with_a_symbolic_number_of_rows(ragged_dot: Any, operands: Any) -> None:
    _, rhs = operands
    (m,) = export.symbolic_shape("m")
    shapes = jax.ShapeDtypeStruct((m, K), jnp.float32), rhs, SIZES
    exported = export.export(jax.jit(ragged_dot), disabled_checks=jax_ggemm.export_checks)(*shapes)
    loaded = export.deserialize(exported.serialize())
    for rows in (1, 14, 33):
        lhs = normal((rows, K))
        oracle.assert_close(loaded.call(lhs, rhs, SIZES), oracle.forward(lhs, rhs, SIZES), SIZES)


def test_export_of_gradients_with_a_symbolic_number_of_rows(ragged_dot: Any, operands: Any) -> None:
    _, rhs = operands
    (m,) = export.symbolic_shape("m")
    step = jax.jit(jax.grad(lambda x, w, s: jnp.sum(ragged_dot(x, w, s)), (0, 1)))
    exported = export.export(step, disabled_checks=jax_ggemm.export_checks)(
        jax.ShapeDtypeStruct((m, K), jnp.float32), rhs, SIZES
    )
    for rows in (1, 33):
        lhs = normal((rows, K))
        d_lhs, d_rhs = exported.call(lhs, rhs, SIZES)
        oracle.assert_close(d_lhs, oracle.d_lhs(np.ones((rows, N)), rhs, SIZES), SIZES)
        oracle.assert_close(d_rhs, oracle.d_rhs(lhs, np.ones((rows, N)), SIZES, G))


def test_export_refuses_the_custom_call_where_the_checks_are_not_disabled(operands: Any) -> None:
    with pytest.raises(ValueError, match="jax_ggemm"):
        export.export(jax.jit(jax_ggemm.ragged_dot))(*operands, SIZES)


def test_the_call_has_no_side_effect(operands: Any) -> None:
    """A result that nothing uses is not computed."""
    op = functools.partial(jax_ggemm.ragged_dot, implementation="cpu")
    unused = jax.jit(lambda x, w: (op(x, w, SIZES), x + 1)[1])
    assert "jax_ggemm" not in unused.lower(*operands).compile().as_text()
    one = jax.jit(jax.grad(lambda x, w: jnp.sum(op(x, w, SIZES)))).lower(*operands).compile().as_text()
    assert one.count('custom_call_target="jax_ggemm"') == 1


def test_many_python_threads_at_once(ragged_dot: Any) -> None:
    lhs, rhs = normal((300, 65)), normal((8, 65, 33))
    step = jax.jit(lambda x, w, s: jax.vjp(lambda x, w: ragged_dot(x, w, s), x, w)[0])
    rng = np.random.default_rng(0)
    vectors = [rng.integers(0, 75, 8).astype(np.int32) for _ in range(48)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda sizes: np.asarray(step(lhs, rhs, sizes)), vectors))
    for sizes, result in zip(vectors, results, strict=True):
        oracle.assert_close(result, oracle.forward(lhs, rhs, sizes), sizes)


def test_first_calls_from_many_threads(operands: Any) -> None:
    """Tracing, registration and compilation race here; each thread has a shape of its own."""

    def one(rows: int) -> None:
        lhs = normal((rows, K))
        oracle.assert_close(jax_ggemm.ragged_dot(lhs, operands[1], SIZES), oracle.forward(lhs, operands[1], SIZES))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(3, 19)))
