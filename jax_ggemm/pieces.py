"""Wide floats as sums of bfloat16 arrays, so that the tensor cores' 16-bit products add up to wider ones.

The first piece of a number is its leading 8 bits, cut off rather than rounded: it never overflows, and has the sign
of what is left. A product of two sums is the sum of the pieces' products, of which the smallest are left out.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_BITS = 8
"""Significant bits of bfloat16, the leading one included."""

_BFLOAT16 = np.dtype(jnp.bfloat16)


def count(dtype: np.dtype, precision: lax.PrecisionLike) -> int:
    """The pieces that a float of this dtype is split into.

    Args:
      dtype: bfloat16, float16 or float32.
      precision: `lax.Precision.HIGHEST` (of any operand) asks for all bits of float32; otherwise its leading 16 are
        used, where a TensorFloat-32 product would use 11.
    """
    if dtype == _BFLOAT16:
        return 1
    if dtype == np.float16:
        return 2
    given = precision if isinstance(precision, tuple) else (precision,)
    return 3 if lax.Precision.HIGHEST in given else 2


def split(array: jax.Array, pieces: int) -> list[jax.Array]:
    """The array as a sum of bfloat16 arrays, largest first. What is not finite is in the first piece alone."""
    if array.dtype == _BFLOAT16:
        return [array]
    result = []
    rest = array.astype(np.float32)
    for _ in range(pieces - 1):
        # Cut off by its bits: XLA may take a conversion to bfloat16 and back for none at all.
        bits = lax.bitcast_convert_type(rest, np.uint32) & np.uint32(0xFFFF0000)
        leading = jnp.where(jnp.isfinite(rest), lax.bitcast_convert_type(bits, np.float32), rest)
        result.append(leading.astype(_BFLOAT16))
        rest = jnp.where(jnp.isfinite(rest), rest - leading, np.float32(0))
    return [*result, rest.astype(_BFLOAT16)]


def pairs(lhs: int, rhs: int) -> list[tuple[int, int]]:
    """Which pieces of two operands are multiplied: those whose product is not below the last bits that are kept."""
    return [(i, j) for i in range(lhs) for j in range(rhs) if i + j < max(lhs, rhs)]
