"""The Mixture-of-Experts layers on the GPU kernels: on a GPU, or as far as a machine without one can tell."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import moe_reference as reference
import numpy as np
import pytest
from conftest import CUTE, of
from flax import nnx
from test_moe import MODELS, loops, loss, make, moe
from wide_cute import HAS_GPU

from jax_ggemm import MoE, Router

cheap_compilation = reference.cheap_compilation

kernels = pytest.mark.parametrize("implementation", [of(CUTE)], ids=str)
"""In float32, each product as exact sums of the kernels' products."""


def on(implementation: Any, name: str, tokens: tuple[int, ...] = (11,)) -> Any:
    """A model of `test_moe` with its products on an implementation."""
    x, options, plain, stored = make(name, tokens)
    experts = dataclasses.replace(options.experts, implementation=implementation)
    return x, dataclasses.replace(options, experts=experts), plain, stored


@kernels
@pytest.mark.parametrize("name", MODELS)
def test_models_equal_the_reference(name: str, implementation: Any) -> None:
    x, options, plain, stored = on(implementation, name, (2, 5))
    y, stats = moe(x, stored, options)
    want, counts = loops(name, x, plain)
    reference.assert_close(y, want)
    np.testing.assert_array_equal(stats.counts, counts)


@kernels
@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3"])
def test_gradients_equal_those_of_plain_jax(name: str, implementation: Any) -> None:
    """With padding, whose NaN must not show."""
    mask = jnp.array([[1, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 0]], bool)
    got, want = (
        jax.jit(jax.grad(functools.partial(loss, options), argnums=(0, 1)))(
            jnp.where(mask[..., None], x, jnp.nan), stored, mask
        )
        for x, options, _, stored in (on(which, name, (3, 4)) for which in (implementation, "xla"))
    )
    jax.tree.map(functools.partial(reference.assert_close, tolerance=5e-5), got, want)


@kernels
def test_nan_reaches_no_other_token(implementation: Any) -> None:
    x, options, _, stored = on(implementation, "gpt_oss")
    clean, _ = moe(x, stored, options)
    y, _ = moe(x.at[3].set(jnp.nan), stored, options)
    others = np.arange(11) != 3
    np.testing.assert_array_equal(y[others], clean[others])
    assert np.isnan(y[3]).all()


@kernels
def test_vmap_remat_and_scan(implementation: Any) -> None:
    x, options, _, stored = on(implementation, "deepseek_v3", (3, 4))
    step = jax.value_and_grad(functools.partial(loss, options), argnums=(0, 1))
    again = jax.value_and_grad(jax.checkpoint(functools.partial(loss, options)), argnums=(0, 1))
    singly = jax.jit(step)
    want = jax.tree.map(lambda *a: np.stack(a), *[singly(row, stored) for row in x])
    mapped = jax.jit(jax.vmap(step, in_axes=(0, None)))(x, stored)
    scanned = jax.jit(lambda x: jax.lax.scan(lambda c, row: (c, again(row, stored)), 0, x)[1])(x)
    for got in (mapped, scanned):
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4), got, want)


@pytest.mark.parametrize("implementation", [of("cute") if HAS_GPU else of(CUTE)], ids=str)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_flax_layer_trains_in_16_bits(implementation: Any, dtype: Any) -> None:
    """One step on the kernels beside one in plain JAX."""
    x = jax.random.normal(jax.random.key(0), (2, 40, 64), dtype)

    def step(which: Any) -> Any:
        layer = MoE(
            64,
            48,
            num_experts=8,
            router=Router(top_k=2),
            implementation=which,
            param_dtype=dtype,
            dtype=dtype,
            rngs=nnx.Rngs(0),
        )
        graph, state = nnx.split(layer)

        def total(state: Any, x: Any) -> Any:
            y, _ = nnx.merge(graph, state)(x)
            return jnp.mean(y.astype(jnp.float32) ** 2)

        return jax.jit(jax.value_and_grad(total, (0, 1)))(state, x)

    for got, want in zip(*(jax.tree.leaves(step(which)) for which in (implementation, "xla")), strict=True):
        a, b = (np.asarray(leaf, np.float64) for leaf in (got, want))
        assert np.linalg.norm(a - b) <= 0.02 * np.linalg.norm(b)
