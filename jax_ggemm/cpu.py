"""The "cpu" implementation: the native handler of the custom call, on XLA's CPU backend."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jax_ggemm import native
from jax_ggemm.products import Call, Operands, accumulation_dtype

_DTYPES = frozenset(np.dtype(d) for d in (jnp.bfloat16, np.float16, np.float32, np.float64))


def unsupported(call: Call, operands: Operands) -> str | None:
    """Why the handler cannot take the call, or None where it can."""
    for name, dtype in (("lhs", operands.lhs.dtype), ("rhs", operands.rhs.dtype), ("result", call.out_dtype)):
        if dtype not in _DTYPES:
            return f"{name} has dtype {dtype}; the CPU handler takes bfloat16, float16, float32 and float64"
    if call.names_an_algorithm:
        return f"precision {call.precision!r} names an algorithm; the CPU handler multiplies in float32 or float64"
    return None


def grouped_product(call: Call, operands: Operands) -> jax.Array:
    """One grouped product through the custom call.

    Args:
      call: the product.
      operands: its arrays, with or without batch axes.

    Returns:
      The result, with the full batch axes in front.
    """
    native.register()
    dtype = accumulation_dtype(operands.lhs.dtype, operands.rhs.dtype, call.out_dtype)
    arrays = [operands.lhs, operands.rhs, operands.group_sizes, operands.group_offset]
    if operands.bias is not None:
        arrays.append(operands.bias.astype(dtype))
    # Built from the type of an operand, so that it varies over the mesh axes that the operand varies over.
    result = jax.typeof(operands.lhs).update(shape=operands.out_shape(call), dtype=call.out_dtype, weak_type=False)
    return jax.ffi.ffi_call(native.TARGET, result)(*arrays, product=call.product.value)
