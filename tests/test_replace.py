"""Model code that calls jax.lax.ragged_dot runs unchanged."""

from __future__ import annotations

import functools
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from test_ragged_dot import normal

import jax_ggemm

ORIGINALS = lax.ragged_dot, lax.ragged_dot_general
SIZES = np.array([5, 0, 9, 4], np.int32)


def model(params: dict[str, Any], x: Any, sizes: Any) -> jax.Array:
    """A model file as users have it: keyword calls, jit inside, names looked up in jax.lax."""

    def expert(x: Any, up: Any, down: Any, sizes: Any) -> jax.Array:
        hidden = jax.lax.ragged_dot(lhs=x, rhs=up, group_sizes=sizes, preferred_element_type=jnp.float32)
        hidden = jax.nn.silu(hidden).astype(x.dtype)
        return jax.lax.ragged_dot(hidden, down, sizes, precision=lax.Precision.HIGHEST, group_offset=None)

    return jnp.sum(jnp.sin(jax.jit(expert)(x, params["up"], params["down"], sizes)))


@pytest.fixture
def arguments() -> Any:
    return {"up": normal((4, 6, 10)), "down": normal((4, 10, 6))}, normal((20, 6)), SIZES


def calls_ours(function: Any, *arguments: Any) -> bool:
    return "jax_ggemm" in jax.jit(function).lower(*arguments).as_text()


def test_a_model_runs_unchanged_with_equal_loss_and_gradients(arguments: Any) -> None:
    want = jax.jit(jax.value_and_grad(model))(*arguments)
    with jax_ggemm.replace_lax_ragged_dot():
        assert calls_ours(jax.value_and_grad(model), *arguments)
        got = jax.jit(jax.value_and_grad(model))(*arguments)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)


def test_a_function_that_was_traced_outside_is_traced_again_inside(arguments: Any) -> None:
    jitted = jax.jit(model)
    outside = jitted.lower(*arguments).as_text()
    jitted(*arguments)
    with jax_ggemm.replace_lax_ragged_dot():
        inside = jitted.lower(*arguments).as_text()
        jitted(*arguments)
    after = jitted.lower(*arguments).as_text()
    assert ["jax_ggemm" in text for text in (outside, inside, after)] == [False, True, False]


def test_the_originals_come_back_after_nesting_and_errors() -> None:
    with jax_ggemm.replace_lax_ragged_dot():
        with jax_ggemm.replace_lax_ragged_dot():
            assert lax.ragged_dot is not ORIGINALS[0]
        assert lax.ragged_dot is not ORIGINALS[0]
        assert lax.ragged_dot_general is not ORIGINALS[1]

    def fail() -> None:
        with jax_ggemm.replace_lax_ragged_dot():
            raise RuntimeError("from the model")

    with pytest.raises(RuntimeError, match="from the model"):
        fail()
    assert (lax.ragged_dot, lax.ragged_dot_general) == ORIGINALS


def test_it_decorates_a_function(arguments: Any) -> None:
    decorated = jax_ggemm.replace_lax_ragged_dot()(model)
    assert calls_ours(decorated, *arguments)
    assert calls_ours(decorated, *arguments)
    assert not calls_ours(model, *arguments)


def test_the_general_form_is_replaced_too() -> None:
    numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())

    def run(lhs: Any, rhs: Any) -> jax.Array:
        return jax.lax.ragged_dot_general(lhs, rhs, SIZES, ragged_dot_dimension_numbers=numbers)

    lhs, rhs = normal((20, 3)), normal((20, 4))
    want = run(lhs, rhs)
    with jax_ggemm.replace_lax_ragged_dot():
        assert calls_ours(run, lhs, rhs)
        np.testing.assert_allclose(run(lhs, rhs), want, rtol=1e-5, atol=1e-5)


def test_the_default_implementation_inside_may_fall_back_to_plain_jax() -> None:
    lhs, rhs = jnp.ones((20, 3), jnp.int8), jnp.ones((4, 3, 2), jnp.int8)
    want = jax.jit(lambda: jax.lax.ragged_dot(lhs, rhs, SIZES))()
    with jax_ggemm.replace_lax_ragged_dot():
        np.testing.assert_array_equal(jax.jit(lambda: jax.lax.ragged_dot(lhs, rhs, SIZES))(), want)


def test_other_threads_keep_laxs_own(arguments: Any) -> None:
    results = {}
    inside, done = threading.Event(), threading.Event()

    def holder() -> None:
        with jax_ggemm.replace_lax_ragged_dot():
            results["holder"] = calls_ours(model, *arguments)
            inside.set()
            done.wait(60)

    thread = threading.Thread(target=holder)
    thread.start()
    assert inside.wait(60)
    results["other"] = calls_ours(model, *arguments)
    with jax_ggemm.replace_lax_ragged_dot():
        done.set()
        thread.join()
        results["overlapping"] = calls_ours(model, *arguments)
    assert results == {"holder": True, "other": False, "overlapping": True}
    assert lax.ragged_dot is ORIGINALS[0]


def test_entering_again_compiles_nothing_new(arguments: Any) -> None:
    """Inside the context twice: one program."""
    jitted = jax.jit(functools.partial(model))
    for _ in range(2):
        with jax_ggemm.replace_lax_ragged_dot():
            jitted(*arguments)
    assert jitted._cache_size() == 1
