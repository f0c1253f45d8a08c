"""The "cute" implementation: CuTe DSL kernels on NVIDIA GPUs, through the custom call."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jax_ggemm import native, objects, tuned, xla
from jax_ggemm.kernel import config
from jax_ggemm.products import Call, Operands, Product

_DTYPES = (np.dtype(jnp.bfloat16), np.dtype(np.float16))
_ARCHITECTURES = {"9.0": "sm_90a"}
"""Compute capability to the architecture that kernels are compiled for."""

_ALIGNMENT = 8
"""The TMA unit reads rows whose length is a multiple of 16 bytes."""

_MAX_ROWS = 2**30
_MAX_OUT_ROWS = 2**31 - 1


@functools.cache
def _architecture() -> str | None:
    """What kernels are compiled for on this machine; None where no kernel runs on all of its GPUs."""
    try:
        capabilities = {device.compute_capability for device in jax.devices("cuda")}
    except RuntimeError:
        return None
    return _ARCHITECTURES.get(*capabilities) if len(capabilities) == 1 else None


def _spec(call: Call, operands: Operands) -> config.KernelSpec:
    """The kernel for a call that is supported."""
    m = operands.lhs.shape[-2]
    if call.product is Product.DRHS:
        k, n = operands.lhs.shape[-1], operands.rhs.shape[-1]
    else:
        k, n = operands.rhs.shape[-2:]
    in_dtype, out_dtype = operands.lhs.dtype, np.dtype(call.out_dtype)
    picked = tuned.pick(tuned.Problem(call.product, in_dtype, out_dtype, m, k, n, operands.group_sizes.shape[-1]))
    return config.KernelSpec(call.product, in_dtype, out_dtype, operands.bias is not None, picked)


def _unsupported_shape(call: Call, operands: Operands) -> str | None:
    shapes = [operands.lhs.shape, operands.rhs.shape, operands.group_sizes.shape, (call.num_weights,)]
    if any(jax.export.is_symbolic_dim(length) for shape in shapes for length in shape):
        return "a shape is symbolic; the GPU kernels are picked for known ones"
    if any(length == 0 for shape in shapes for length in shape):
        return "an operand is empty"
    columns = {"k": operands.lhs.shape[-1], "n": operands.rhs.shape[-1]}
    if call.product is Product.DLHS:
        columns = {"k": operands.rhs.shape[-2], "n": operands.lhs.shape[-1]}
    for name, length in columns.items():
        if length % _ALIGNMENT:
            return f"{name} = {length} is not a multiple of {_ALIGNMENT}"
    batch = math.prod(operands.batch_shape)
    m = operands.lhs.shape[-2]
    if batch * m > _MAX_ROWS:
        return f"lhs has {batch * m} rows; the GPU kernels number them in 32 bits, up to {_MAX_ROWS}"
    if batch * call.num_weights * columns["k"] > _MAX_OUT_ROWS:
        return f"the weights have more than {_MAX_OUT_ROWS} rows"
    return None


def unsupported(call: Call, operands: Operands) -> str | None:
    """Why the kernels cannot take the call on this machine, or None where they can."""
    lhs, rhs, out = operands.lhs.dtype, operands.rhs.dtype, np.dtype(call.out_dtype)
    if lhs not in _DTYPES or rhs != lhs:
        return f"lhs is {lhs} and rhs is {rhs}; the GPU kernels take two of bfloat16, or two of float16"
    if out not in (lhs, np.dtype(np.float32)):
        return f"the result is {out}; the GPU kernels give {lhs} or float32"
    if call.names_an_algorithm:
        return f"precision {call.precision!r} names an algorithm; the GPU kernels add in float32"
    reason = _unsupported_shape(call, operands)
    if reason is not None:
        return reason
    architecture = _architecture()
    if architecture is None:
        return f"no NVIDIA GPU of compute capability {' or '.join(_ARCHITECTURES)} here"
    return objects.unavailable(_spec(call, operands), architecture)


def _fold(array: jax.Array, batch_shape: tuple[int, ...]) -> jax.Array | None:
    """One batch axis for all, of length 1 where the array is not batched; None where it is along some axes only."""
    rank = len(batch_shape)
    own = array.shape[:rank]
    if own == batch_shape or all(length == 1 for length in own):
        return array.reshape(math.prod(own), *array.shape[rank:])
    return None


def grouped_product(call: Call, operands: Operands) -> jax.Array:
    """One grouped product through the custom call.

    Args:
      call: the product.
      operands: its arrays, with or without batch axes.

    Returns:
      The result, with the full batch axes in front.
    """
    batch_shape = operands.batch_shape
    lhs, rhs = _fold(operands.lhs, batch_shape), _fold(operands.rhs, batch_shape)
    bias = None if operands.bias is None else _fold(operands.bias, batch_shape)
    if unsupported(call, operands) or lhs is None or rhs is None or (bias is None) != (operands.bias is None):
        return xla.grouped_product(call, operands)

    # Sizes and offsets are small: repeating them costs nothing.
    sizes, offset = (
        jnp.broadcast_to(array, (*batch_shape, *array.shape[len(batch_shape) :])).reshape(
            math.prod(batch_shape), *array.shape[len(batch_shape) :]
        )
        for array in (operands.group_sizes, operands.group_offset)
    )
    architecture = _architecture()
    assert architecture is not None
    native.register_cuda()
    key = objects.ensure(_spec(call, operands), architecture)
    arrays = [lhs, rhs, sizes, offset]
    if bias is not None:
        arrays.append(bias.astype(np.float32))
    shape = operands.out_shape(call)
    folded = (math.prod(batch_shape), *shape[len(batch_shape) :])
    result = jax.typeof(operands.lhs).update(shape=folded, dtype=call.out_dtype, weak_type=False)
    return jax.ffi.ffi_call(native.TARGET, result)(*arrays, product=call.product.value, key=key).reshape(shape)
