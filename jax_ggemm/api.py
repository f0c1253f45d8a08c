"""`ragged_dot` and `ragged_dot_general`: the public functions, their checks and the choice of implementation."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike, DTypeLike

from jax_ggemm import arguments, binding, dimension_numbers, vjp, xla
from jax_ggemm.forward_mode import reverse_mode_only
from jax_ggemm.manual_axes import vary_alike
from jax_ggemm.products import Call, Implementation, Operands, Product, accumulation_dtype

RESULT_NAME = "jax_ggemm_ragged_dot"
"""The `checkpoint_name` of every result, for policies such as `save_only_these_names`."""


def ragged_dot(
    lhs: ArrayLike,
    rhs: ArrayLike,
    group_sizes: ArrayLike,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: ArrayLike | None = None,
    out_sharding: Any = None,
    *,
    transpose_rhs: bool = False,
    bias: ArrayLike | None = None,
    implementation: str | Implementation | None = None,
) -> jax.Array:
    """Multiplies each group of rows of lhs with its own matrix of rhs.

    A drop-in for `jax.lax.ragged_dot`. The rows of a group are consecutive: group i holds the rows
    from sum(group_sizes[:i]) on. Rows past the last group are exact zeros in the result and in the
    gradient of lhs, whatever lhs holds there. Group sizes are data: changing them compiles nothing.

    Differentiable in lhs, rhs and bias in reverse mode, any number of times; in every mode with
    `implementation="xla"`. Gradients have the dtype of their operand, rounded once from the accumulator.

    Under jit, operands that are sharded over a mesh stay so: rows, groups, k and n, in gradients too (for "cute" and
    "cpu"; see `jax_ggemm.partitioning`). Over explicit mesh axes the call must be inside `jax.shard_map`.

    Args:
      lhs: (m, k) array.
      rhs: (g, k, n) array of weights, or (g, n, k) with `transpose_rhs`. Both are read in place.
      group_sizes: (g,) integers. Negative sizes count as 0, and rows past m are cut off.
      precision: as in `jax.lax.dot`, by default that of `jax.default_matmul_precision`. Sums are kept in float32 for
        floats (float64 for float64) and in 32 or 64 bits for integers, always.
      preferred_element_type: dtype of the result; by default what `jax.lax.dot_general` gives.
      group_offset: integer, () or (1,) shaped: rhs holds only the groups from this one on, of the
        len(group_sizes) ones. Rows of groups that rhs does not hold are zeros. Default 0.
      out_sharding: must be None; see `jax.shard_map`.
      transpose_rhs: rhs is (g, n, k).
      bias: (g, n) array of floats, added to the rows of each group before rounding.
      implementation: "cute" (CuTe DSL kernels on NVIDIA GPUs), "cpu" (native handler), "xla" (plain
        JAX), an object like `Implementation`, or None for the first of these that takes the call.

    Returns:
      (m, n) array.

    Raises:
      TypeError: for a wrong dtype or rank, and for sizes that do not match.
      ValueError: for an unknown implementation.
      NotImplementedError: where the implementation cannot take the call; the message says why.
    """
    lhs, rhs, sizes, offset = arguments.check_arrays(lhs, rhs, group_sizes, group_offset)
    arguments.check_rank("lhs", lhs, 2, "(m, k)")
    arguments.check_rank("rhs", rhs, 3, "(g, n, k)" if transpose_rhs else "(g, k, n)")
    arguments.check_rank("group_sizes", sizes, 1, "(g,)")
    arguments.check_out_sharding(out_sharding)
    k_axis = 2 if transpose_rhs else 1
    if lhs.shape[1] != rhs.shape[k_axis]:
        hint = ""
        if lhs.shape[1] == rhs.shape[3 - k_axis]:
            hint = f"; rhs has k on axis {3 - k_axis}: transpose_rhs={not transpose_rhs} would read it so"
        raise TypeError(
            f"lhs of shape {lhs.shape} has k = {lhs.shape[1]} columns and rhs of shape {rhs.shape}, with "
            f"transpose_rhs={transpose_rhs}, has k = {rhs.shape[k_axis]} on axis {k_axis}; they must be equal{hint}"
        )
    if group_offset is None and sizes.shape[0] != rhs.shape[0]:
        raise TypeError(
            f"group_sizes has {sizes.shape[0]} groups and rhs of shape {rhs.shape} has {rhs.shape[0]}; they must be "
            "equal, unless group_offset says which of the groups rhs holds"
        )
    if bias is not None:
        bias = arguments.check_bias(bias, (rhs.shape[0], rhs.shape[3 - k_axis]))
    product = Product.DLHS if transpose_rhs else Product.FORWARD
    options = _Options(precision, preferred_element_type, implementation)
    return _run(product, Operands(lhs, rhs, sizes, offset, bias), options)


def ragged_dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike,
    group_sizes: ArrayLike,
    ragged_dot_dimension_numbers: lax.RaggedDotDimensionNumbers,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: ArrayLike | None = None,
    out_sharding: Any = None,
    *,
    implementation: str | Implementation | None = None,
) -> jax.Array:
    """`ragged_dot` with any number of free, contracting and batch dimensions, and a ragged one of any kind.

    A drop-in for `jax.lax.ragged_dot_general`, with its three modes:

    1. The ragged dimension m is free: [b..., m..., k...] x [g, b..., k..., n...] -> [b..., m..., n...].
    2. It is contracting: [b..., m..., k...] x [b..., m..., n...] -> [g, b..., k..., n...], a product per group.
    3. It is a batch dimension: the groups do not matter, and this is `lax.dot_general`.

    Args:
      lhs: array.
      rhs: array.
      group_sizes: integers, (g,) shaped, or (b..., x..., g) with x the dimensions of lhs of the ragged one's
        kind that come before it.
      ragged_dot_dimension_numbers: which dimension is what.
      precision: as in `ragged_dot`.
      preferred_element_type: as in `ragged_dot`.
      group_offset: as in `ragged_dot`, in mode 1 only.
      out_sharding: must be None; see `jax.shard_map`.
      implementation: as in `ragged_dot`.

    Returns:
      The array that `lax.ragged_dot_general` returns.

    Raises:
      TypeError: for a wrong dtype, and for dimensions that do not match.
      ValueError: for an unknown implementation.
      NotImplementedError: where the implementation cannot take the call; the message says why.
    """
    lhs, rhs, sizes, offset = arguments.check_arrays(lhs, rhs, group_sizes, group_offset)
    arguments.check_out_sharding(out_sharding)
    axes = dimension_numbers.Axes.of(lhs, rhs, ragged_dot_dimension_numbers)
    full_shape = (*(lhs.shape[axis] for axis in axes.outer()), sizes.shape[-1])
    if sizes.ndim != 1 and sizes.shape != full_shape:
        raise TypeError(f"group_sizes has shape {sizes.shape}; it must be (g,) or {(*full_shape[:-1], 'g')}")
    if axes.ragged in axes.lhs_batch:
        return lax.dot_general(
            lhs,
            rhs,
            ragged_dot_dimension_numbers.dot_dimension_numbers,
            precision=precision,
            preferred_element_type=preferred_element_type,
        )

    options = _Options(precision, preferred_element_type, implementation)

    def matrices(product: Product, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        return _run(product, Operands(lhs, rhs, sizes, offset), options)

    if axes.ragged in axes.lhs_contract:
        if group_offset is not None:
            raise NotImplementedError("group_offset needs a free ragged dimension (mode 1)")
        dtype = arguments.result_dtype(lhs.dtype, rhs.dtype, preferred_element_type)
        if sizes.ndim > 1:  # a sum of products over the outer axes, which is to be rounded once too
            wide = accumulation_dtype(lhs.dtype, rhs.dtype, dtype)
            options = dataclasses.replace(options, preferred_element_type=wide)
        matrices_of_groups = functools.partial(matrices, Product.DRHS)
        return dimension_numbers.ragged_contracting(axes, lhs, rhs, sizes, matrices_of_groups).astype(dtype)
    groups = rhs.shape[axes.rhs_group[0]]
    if group_offset is None and sizes.shape[-1] != groups:
        raise TypeError(
            f"group_sizes has {sizes.shape[-1]} groups and rhs of shape {rhs.shape} has {groups} on its group "
            "dimension; they must be equal, unless group_offset says which of the groups rhs holds"
        )
    product = Product.DLHS if dimension_numbers.weights_are_transposed(axes) else Product.FORWARD
    return dimension_numbers.ragged_free(axes, lhs, rhs, sizes, functools.partial(matrices, product))


@dataclasses.dataclass(frozen=True)
class _Options:
    precision: lax.PrecisionLike
    preferred_element_type: DTypeLike | None
    implementation: str | Implementation | None


def _run(product: Product, operands: Operands, options: _Options) -> jax.Array:
    """One product of matrices on checked operands, through the chosen implementation."""
    lhs, rhs = operands.lhs, operands.rhs
    call = Call(
        product=product,
        out_dtype=arguments.result_dtype(lhs.dtype, rhs.dtype, options.preferred_element_type),
        num_weights=operands.group_sizes.shape[0] if product is Product.DRHS else rhs.shape[0],
        precision=arguments.canonical_precision(options.precision),
        implementation=options.implementation,
    )
    return _run_chosen(binding.choose(call, operands), operands)


@functools.partial(jax.jit, static_argnums=0, inline=True)  # so that a call outside jit is traced once
def _run_chosen(call: Call, operands: Operands) -> jax.Array:
    if call.implementation == "xla":
        result = xla.grouped_product(call, operands)
    else:
        result = vjp.grouped_product(call, vary_alike(jax.tree.map(_reverse_mode_only, operands)))
    return checkpoint_name(result, RESULT_NAME)


def _reverse_mode_only(array: jax.Array) -> jax.Array:
    return reverse_mode_only(array) if jnp.issubdtype(array.dtype, jnp.inexact) else array
