"""Gradients of the grouped products, in reverse mode and of any order."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ggemm.batching import batchable
from jax_ggemm.products import Call, Operands, Product, accumulation_dtype

_NO_GRADIENT: Any = None
"""The cotangent of an array of integers."""

_EXACT = jax.lax.Precision.HIGHEST
"""For sums, which are to lose nothing to the precision that products may have."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def grouped_product(call: Call, operands: Operands) -> jax.Array:
    """One grouped product, differentiable in lhs, rhs and bias.

    The cotangent is used in its own dtype, and each gradient is rounded once, from the accumulator
    to the dtype of its operand.

    Args:
      call: the product.
      operands: its arrays, without batch axes (those come with vmap).

    Returns:
      The result, of shape `operands.out_shape(call)` and dtype `call.out_dtype`.
    """
    return batchable(call)(operands)


def _forward(call: Call, operands: Operands) -> tuple[jax.Array, Operands]:
    return grouped_product(call, operands), operands


def _backward(call: Call, operands: Operands, cotangent: jax.Array) -> tuple[Operands]:
    lhs, rhs, bias = operands.lhs, operands.rhs, operands.bias

    def product(which: Product, a: jax.Array, b: jax.Array, dtype: np.dtype) -> jax.Array:
        groups = Operands(a, b, operands.group_sizes, operands.group_offset)
        return grouped_product(call.becomes(which, dtype), groups)

    match call.product:
        case Product.FORWARD:
            d_lhs = product(Product.DLHS, cotangent, rhs, lhs.dtype)
            d_rhs = product(Product.DRHS, lhs, cotangent, rhs.dtype)
        case Product.DLHS:
            d_lhs = product(Product.FORWARD, cotangent, rhs, lhs.dtype)
            d_rhs = product(Product.DRHS, cotangent, lhs, rhs.dtype)
        case Product.DRHS:
            d_lhs = product(Product.DLHS, rhs, cotangent, lhs.dtype)
            d_rhs = product(Product.FORWARD, lhs, cotangent, rhs.dtype)
    d_bias = None
    if bias is not None:
        d_bias = _sum_of_rows(call, operands, cotangent)[:, 0].astype(bias.dtype)
    return (Operands(d_lhs, d_rhs, _NO_GRADIENT, _NO_GRADIENT, d_bias),)


def _sum_of_rows(call: Call, operands: Operands, rows: jax.Array) -> jax.Array:
    """(w, 1, columns): the rows of each group added up, as their product with a column of ones."""
    # Ones are exact in any dtype, and two float32 operands take a slower path on some GPUs.
    dtype = np.dtype(jnp.bfloat16) if rows.dtype == np.float32 else rows.dtype
    ones = jnp.ones_like(rows, shape=(rows.shape[0], 1), dtype=dtype)
    exact = dataclasses.replace(call.becomes(Product.DRHS, accumulation_dtype(rows.dtype)), precision=_EXACT)
    return grouped_product(exact, Operands(ones, rows, operands.group_sizes, operands.group_offset))


grouped_product.defvjp(_forward, _backward)
