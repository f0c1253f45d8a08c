"""The rates that a machine reaches at most, measured, and the time that they allow for a product."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jax_ggemm.device_state import State
from jax_ggemm.device_time import measure
from jax_ggemm.shapes import Work


@dataclasses.dataclass(frozen=True)
class Rates:
    """What a machine reaches.

    Attributes:
      dense_flops: FLOP/s of a large dense product.
      read_bytes: bytes/s of a reduction that reads memory once.
      written_bytes: bytes/s of filling memory.
    """

    dense_flops: float
    read_bytes: float
    written_bytes: float

    def least_seconds(self, work: Work) -> float:
        """The larger of the time to multiply and the time to move every operand and the result once."""
        moving = work.read_bytes / self.read_bytes + work.written_bytes / self.written_bytes
        return max(work.flops / self.dense_flops, moving)


def measure_rates(dtype: str, state: State = State.STEADY) -> Rates:
    """Measures the rates of the default device.

    Args:
      dtype: of the dense product.
      state: that the device is brought into for each.

    Returns:
      The rates; for reading the better one of two reductions.
    """
    # Large enough that caches and launches do not count.
    size, memory_bytes = (8192, 4 * 2**30) if jax.default_backend() == "gpu" else (1024, 2**27)
    keys = jax.random.split(jax.random.key(0), 2)
    lhs, rhs = (jax.random.normal(key, (size, size), dtype) for key in keys)
    dense = 2 * size**3 / measure(jnp.dot, lhs, rhs, state=state).seconds
    rows = memory_bytes // (4 * size)
    data = jax.random.normal(keys[0], (rows, size), jnp.float32)
    read = data.nbytes / min(
        measure(reduction, data, state=state).seconds
        for reduction in (lambda data: data.max(axis=1), lambda data: data.sum(axis=1))
    )
    del data
    fill = measure(lambda value: jnp.full((rows, size), value), jnp.float32(1), state=state).seconds
    return Rates(dense, read, 4 * rows * size / fill)
