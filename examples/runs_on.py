"""Says what an example runs on: the device, the versions, and the implementation that a product really takes."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp

import jax_ggemm

NATIVE_NAMES = {"cpu": "cpu", "gpu": "cute"}
"""The implementation behind the custom call, per JAX platform."""


def device_line() -> str:
    """The device that the example uses, in words."""
    device, others = jax.devices()[0], jax.device_count() - 1
    cores = f", {len(os.sched_getaffinity(0))} cores" if device.platform == "cpu" else ""
    return f"{device.platform} ({device.device_kind}{cores})" + (f", {others} more not used" if others else "")


def versions_line() -> str:
    """The versions that decide what runs."""
    return ", ".join(f"{module.__name__} {module.__version__}" for module in (jax, jax_ggemm))


def implementation_that_runs(implementation: str | None, dtype: str) -> str:
    """Compiles a small product and looks which implementation is in the program.

    Args:
      implementation: as in `jax_ggemm.ragged_dot`.
      dtype: of the operands.

    Returns:
      "cute", "cpu" or "xla".

    Raises:
      ImportError: if the native library is missing or does not fit the installed jaxlib.
      NotImplementedError: if the implementation cannot take such a product here.
    """

    def product(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        return jax_ggemm.ragged_dot(lhs, rhs, sizes, implementation=implementation)

    shapes = (
        jax.ShapeDtypeStruct((16, 16), dtype),
        jax.ShapeDtypeStruct((2, 16, 16), dtype),
        jax.ShapeDtypeStruct((2,), jnp.int32),
    )
    program = jax.jit(product).lower(*shapes).compile().as_text()
    if program is not None and 'custom_call_target="jax_ggemm"' in program:
        return NATIVE_NAMES[jax.default_backend()]
    return "xla"
