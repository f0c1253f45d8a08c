"""The "cute" implementation: CuTe DSL kernels on NVIDIA GPUs, through the custom call."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ggemm import native, objects, pieces, tuned, xla
from jax_ggemm.kernel import architectures, config
from jax_ggemm.products import Call, Operands, Product

_NARROW = (np.dtype(jnp.bfloat16), np.dtype(np.float16))
_DTYPES = (*_NARROW, np.dtype(np.float32))
ARCHITECTURES = {capability: known.name for capability, known in architectures.BY_CAPABILITY.items()}
"""Compute capability to the architecture that kernels are compiled for."""

_ALIGNMENT = 8
"""The TMA unit reads rows whose length is a multiple of 16 bytes."""

_MAX_ROWS = 2**30
_MAX_OUT_ROWS = 2**31 - 1
_ROWS_PER_GROUP = 128
"""What the configuration of a call with an unknown number of rows is picked for."""


class Launcher(Protocol):
    """What a call's kernels run on: `Targets`, or what stands for GPUs in tests."""

    @property
    def architectures(self) -> tuple[str, ...]:
        """Those that the program is for."""

    def unavailable(self, spec: config.KernelSpec, arch: str) -> str | None:
        """Why a kernel cannot be had for one of the architectures, or None where it can."""

    def call(self, specs: Mapping[str, config.KernelSpec], arrays: list[jax.Array], result: Any) -> jax.Array:
        """Runs a kernel.

        Args:
          specs: the kernel for each of the architectures.
          arrays: lhs, rhs, group_sizes, group_offset and, where the kernel has one, bias; each with one batch axis, of
            the result's length or of length 1.
          result: the type of the result.

        Returns:
          The result.
        """


@dataclasses.dataclass(frozen=True)
class Targets:
    """The GPUs that a program is for."""

    architectures: tuple[str, ...]
    embedded: bool = False
    """The program holds its kernel objects; otherwise this process does, which is then to run it."""

    def unavailable(self, spec: config.KernelSpec, arch: str) -> str | None:
        """See `Launcher`."""
        return objects.unavailable(spec, arch, runs_here=not self.embedded)

    def call(self, specs: Mapping[str, config.KernelSpec], arrays: list[jax.Array], result: Any) -> jax.Array:
        """The custom call; see `Launcher`."""
        native.register_cuda()
        (product,) = {spec.product for spec in specs.values()}
        attributes: dict[str, object] = {"product": product.value}
        if self.embedded:
            loaded = {arch: objects.load(spec, arch) for arch, spec in specs.items()}
            attributes["keys"] = {arch: key for arch, (key, _) in loaded.items()}
            attributes["objects"] = dict(loaded.values())
        else:
            attributes["keys"] = {arch: objects.ensure(spec, arch) for arch, spec in specs.items()}
        return jax.ffi.ffi_call(native.TARGET, result)(*arrays, **attributes)


@functools.cache
def _architecture() -> str | None:
    """What kernels are compiled for on this machine; None where no kernel runs on all of its GPUs."""
    try:
        capabilities = {device.compute_capability for device in jax.devices("cuda")}
    except RuntimeError:
        return None
    return ARCHITECTURES.get(*capabilities) if len(capabilities) == 1 else None


def architecture() -> architectures.Architecture:
    """The architecture of this machine's GPUs; the first that there are kernels for where it has none."""
    return architectures.BY_NAME[_architecture() or next(iter(architectures.BY_NAME))]


def _here() -> Targets | None:
    name = _architecture()
    return None if name is None else Targets((name,))


def _known(length: int) -> bool:
    return not jax.export.is_symbolic_dim(length)


def _is_empty(call: Call, operands: Operands) -> bool:
    shapes = (operands.lhs.shape, operands.rhs.shape, operands.group_sizes.shape, (call.num_weights,))
    return any(_known(length) and length == 0 for shape in shapes for length in shape)


def _columns(call: Call, operands: Operands) -> dict[str, int]:
    """The columns of the weights' two axes."""
    match call.product:
        case Product.DRHS:
            k, n = operands.lhs.shape[-1], operands.rhs.shape[-1]
        case _:
            k, n = operands.rhs.shape[-2:]
    return {"k": k, "n": n}


def _may_round_float32(call: Call) -> bool:
    """Whether products of float32 may be those of TensorFloat-32: of GPUs, `lax.Precision` says so up to HIGH."""
    precisions = call.precision if isinstance(call.precision, tuple) else (call.precision,)
    return all(precision in {None, lax.Precision.DEFAULT, lax.Precision.HIGH} for precision in precisions)


def _kernel_dtypes(call: Call, operands: Operands) -> tuple[np.dtype, np.dtype]:
    """The dtypes of a kernel's operands and of its result."""
    lhs, rhs, out = operands.lhs.dtype, operands.rhs.dtype, np.dtype(call.out_dtype)
    if lhs == rhs and lhs in _NARROW:
        return lhs, out if out == lhs else np.dtype(np.float32)
    if {lhs, rhs, out} == {np.dtype(np.float32)} and _may_round_float32(call):
        return lhs, out
    # Sums of several products, or rounded afterwards.
    return _NARROW[0], np.dtype(np.float32)


def _specs(call: Call, operands: Operands, arch: str) -> list[config.KernelSpec]:
    """The kernels that a supported call runs: the first product, and the further ones, which have no bias."""
    m, groups = operands.lhs.shape[-2], operands.group_sizes.shape[-1]
    k, n = (-(-length // _ALIGNMENT) * _ALIGNMENT for length in _columns(call, operands).values())
    groups = groups if _known(groups) else 1
    rows = m if _known(m) else _ROWS_PER_GROUP * groups
    in_dtype, out_dtype = _kernel_dtypes(call, operands)
    picked = tuned.pick(tuned.Problem(call.product, in_dtype, out_dtype, rows, k, n, groups), arch)
    first = config.KernelSpec(call.product, in_dtype, out_dtype, operands.bias is not None, picked)
    same = operands.lhs.dtype == operands.rhs.dtype == in_dtype
    return [first] if same or not first.has_bias else [first, dataclasses.replace(first, has_bias=False)]


def _unsupported_dtypes(call: Call, operands: Operands, launcher: Launcher | None) -> str | None:
    dtypes = {"lhs": operands.lhs.dtype, "rhs": operands.rhs.dtype, "the result": np.dtype(call.out_dtype)}
    for name, dtype in dtypes.items():
        if dtype not in _DTYPES:
            return f"{name} is {dtype}; the GPU kernels take bfloat16, float16 and, beside one of these, float32"
    # A set that the gradients share: they have the same three dtypes in other places.
    if not set(dtypes.values()) & set(_NARROW):
        names = () if launcher is None else launcher.architectures
        if not (names and all(architectures.BY_NAME[name].multiplies_float32 for name in names)):
            return (
                "lhs is float32, rhs and the result too; these GPU kernels need one of the three in bfloat16 or float16"
            )
        if not _may_round_float32(call):
            return f"precision {call.precision!r} asks for more of float32 than TensorFloat-32 has"
    if call.names_an_algorithm:
        return f"precision {call.precision!r} names an algorithm; the GPU kernels add in float32"
    return None


def _unsupported_shape(call: Call, operands: Operands) -> str | None:
    columns = _columns(call, operands)
    for name, length in columns.items():
        if not _known(length):
            return f"{name} = {length} is symbolic; the GPU kernels are picked for known columns"
    batch, m = math.prod(operands.batch_shape), operands.lhs.shape[-2]
    if _known(batch * m) and batch * m > _MAX_ROWS:
        return f"lhs has {batch * m} rows; the GPU kernels number them in 32 bits, up to {_MAX_ROWS}"
    for rows in (batch * call.num_weights * length for length in columns.values()):
        if _known(rows) and rows > _MAX_OUT_ROWS:
            return f"the weights have {rows} rows or columns, more than {_MAX_OUT_ROWS}"
    return None


def unsupported(call: Call, operands: Operands, launcher: Launcher | None = None) -> str | None:
    """Why the kernels cannot take the call, or None where they can.

    Where they take a call, they take its gradients of every order: the reasons are the same for all of them, but for
    shapes that grow under `vmap`.

    Args:
      call: the product.
      operands: its arrays; only their types are read.
      launcher: what the kernels run on; the GPUs of this machine where None.
    """
    launcher = launcher or _here()
    reason = _unsupported_dtypes(call, operands, launcher) or _unsupported_shape(call, operands)
    if reason is not None or _is_empty(call, operands):
        return reason
    if launcher is None:
        return f"no NVIDIA GPU of compute capability {' or '.join(ARCHITECTURES)} here"
    reasons = (
        launcher.unavailable(spec, arch) for arch in launcher.architectures for spec in _specs(call, operands, arch)
    )
    return next((reason for reason in reasons if reason is not None), None)


def grouped_product(call: Call, operands: Operands, launcher: Launcher | None = None) -> jax.Array:
    """One grouped product through the custom call.

    Args:
      call: the product, which is supported.
      operands: its arrays, with or without batch axes.
      launcher: what the kernels run on; the GPUs of this machine where None.

    Returns:
      The result, with the full batch axes in front.
    """
    if _is_empty(call, operands):
        return xla.grouped_product(call, operands)
    launcher = launcher or _here()
    assert launcher is not None
    axis = _axis_of_some_weights(call, operands)
    if axis is None:
        return _padded(call, operands, launcher)

    # The weights have some batch axes and not others: one kernel for each element of those that they have.
    def one(index: jax.Array) -> jax.Array:
        def at(array: jax.Array) -> jax.Array:
            return array if array.shape[axis] == 1 else lax.dynamic_index_in_dim(array, index, axis)

        return grouped_product(call, jax.tree.map(at, operands), launcher).squeeze(axis)

    length = operands.batch_shape[axis]
    return jnp.moveaxis(lax.map(one, jnp.arange(length, dtype=np.int32)), 0, axis)


def _axis_of_some_weights(call: Call, operands: Operands) -> int | None:
    """A batch axis of weights that lack another one. Those of the other operands are repeated: they are small."""
    own, full = operands.rhs.shape[: operands.batch_rank], operands.batch_shape
    if not call.product.rows_are_ragged or own == full:
        return None
    return next((axis for axis, length in enumerate(own) if length != 1), None)


def _padded(call: Call, operands: Operands, launcher: Launcher) -> jax.Array:
    """Pads columns with zeros to what the TMA unit can address."""
    columns = _columns(call, operands)
    k, n = (-length % _ALIGNMENT for length in columns.values())
    if not k and not n:
        return _sum_of_pieces(call, operands, launcher)

    def pad(array: jax.Array, *widths: int) -> jax.Array:
        config = [(0, 0, 0)] * (array.ndim - len(widths)) + [(0, width, 0) for width in widths]
        return lax.pad(array, np.zeros((), array.dtype), config)

    lhs, rhs, bias = operands.lhs, operands.rhs, operands.bias
    match call.product:
        case Product.FORWARD:
            lhs, rhs, out = pad(lhs, k), pad(rhs, k, n), n
        case Product.DLHS:
            lhs, rhs, out = pad(lhs, n), pad(rhs, k, n), k
        case Product.DRHS:
            lhs, rhs, out = pad(lhs, k), pad(rhs, n), n
    if bias is not None:
        bias = pad(bias, out)
    result = _sum_of_pieces(call, dataclasses.replace(operands, lhs=lhs, rhs=rhs, bias=bias), launcher)
    return result[tuple(slice(length) for length in operands.out_shape(call))]


def _sum_of_pieces(call: Call, operands: Operands, launcher: Launcher) -> jax.Array:
    """One kernel where lhs and rhs have one 16-bit dtype, otherwise one for each pair of their pieces."""
    in_dtype, out_dtype = _kernel_dtypes(call, operands)
    rounded, call = call.out_dtype, call.becomes(call.product, out_dtype)
    if operands.lhs.dtype == operands.rhs.dtype == in_dtype:
        return _kernel(call, operands, launcher).astype(rounded)
    lhs, rhs = (
        pieces.split(array, pieces.count(array.dtype, call.precision)) for array in (operands.lhs, operands.rhs)
    )
    total = None
    for i, j in reversed(pieces.pairs(len(lhs), len(rhs))):
        first = i == j == 0
        of_pair = dataclasses.replace(operands, lhs=lhs[i], rhs=rhs[j], bias=operands.bias if first else None)
        result = _kernel(call, of_pair, launcher)
        if not first:
            # 0 times infinity, where the first pieces have infinity or NaN.
            result = jnp.where(jnp.isnan(result), np.float32(0), result)
        total = result if total is None else total + result
    assert total is not None
    return total.astype(rounded)


def _kernel(call: Call, operands: Operands, launcher: Launcher) -> jax.Array:
    """One kernel: batch axes become one, columns are as the TMA unit takes them, dtypes are the kernel's."""
    batch_shape = operands.batch_shape
    rank, batch = len(batch_shape), math.prod(batch_shape)

    def fold(array: jax.Array, *, repeat: bool = False) -> jax.Array:
        own = array.shape[:rank]
        if own != batch_shape and (repeat or any(length != 1 for length in own)):
            array = jnp.broadcast_to(array, (*batch_shape, *array.shape[rank:]))
        return array.reshape(math.prod(array.shape[:rank]), *array.shape[rank:])

    sizes, offset = (fold(array, repeat=True) for array in (operands.group_sizes, operands.group_offset))
    arrays = [fold(operands.lhs), fold(operands.rhs), sizes, offset]
    if operands.bias is not None:
        arrays.append(fold(operands.bias.astype(np.float32)))
    shape = operands.out_shape(call)
    # Built from the type of an operand, so that it varies over the mesh axes that the operand varies over.
    result = jax.typeof(operands.lhs).update(shape=(batch, *shape[rank:]), dtype=call.out_dtype, weak_type=False)
    specs = {arch: _specs(call, operands, arch)[0] for arch in launcher.architectures}
    return launcher.call(specs, arrays, result).reshape(shape)
