"""vmap of the grouped products: the batch becomes leading axes of one call, with nothing copied."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jax_ggemm import partitioning
from jax_ggemm.products import Call, Operands


@functools.cache
def batchable(call: Call) -> jax.custom_batching.custom_vmap:
    """The product as a function of its operands with a vmap rule.

    Args:
      call: the product.

    Returns:
      A function from Operands to the result. Any subset of the operands may be mapped over; vmaps nest.
    """

    @jax.custom_batching.custom_vmap
    def product(operands: Operands) -> jax.Array:
        return partitioning.grouped_product(call, operands)

    @product.def_vmap
    def rule(axis_size: int, in_batched: list[Operands], operands: Operands) -> tuple[jax.Array, bool]:
        del axis_size  # the batched operands have it
        (batched,) = in_batched
        operands = jax.tree.map(lambda array, is_b: array if is_b else jnp.expand_dims(array, 0), operands, batched)
        return product(operands), True

    return product
