"""The Mixture-of-Experts layer with emulated kernels, of any architecture, beside plain JAX."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ggemm import ExpertOptions, ExpertParams, MoEOptions, MoEParams, Router, moe


def assert_layer_equals_plain_jax(emulated_kernels: Any) -> None:
    """A small layer and its gradients under jit, in bfloat16, on the emulated kernels and on "xla"."""
    tokens, width, hidden, experts = 24, 32, 64, 4
    rng = np.random.default_rng(0)

    def normal(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape) / np.sqrt(shape[-2]), dtype)

    x = normal(tokens, width)
    params = MoEParams(
        normal(width, experts, dtype=jnp.float32),
        ExpertParams(normal(experts, width, 2 * hidden), normal(experts, hidden, width)),
    )

    def loss(implementation: Any, params: MoEParams, x: jax.Array) -> jax.Array:
        options = MoEOptions(Router(2), ExpertOptions(implementation=implementation))
        y, _ = moe(x, params, options)
        return jnp.square(y.astype(jnp.float32)).sum()

    emulated = jax.jit(jax.value_and_grad(functools.partial(loss, emulated_kernels), (0, 1)))(params, x)
    reference = jax.jit(jax.value_and_grad(functools.partial(loss, "xla"), (0, 1)))(params, x)
    for got, want in zip(jax.tree.leaves(emulated), jax.tree.leaves(reference), strict=True):
        scale = np.abs(np.asarray(want, np.float32)).max()
        assert np.abs(np.asarray(got, np.float32) - np.asarray(want, np.float32)).max() <= 0.03 * scale
