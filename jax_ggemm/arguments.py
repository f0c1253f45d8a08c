"""Checks of the public functions' arguments; each error names the argument, what came and what would do."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

_INT32 = jnp.iinfo(jnp.int32)


def as_array(name: str, value: Any) -> jax.Array:
    """The argument as a JAX array.

    Raises:
      TypeError: for lists, tuples and other values that are no arrays.
      NotImplementedError: for an array that is sharded over an explicit mesh axis.
    """
    if not (hasattr(value, "dtype") and hasattr(value, "shape")) and not hasattr(value, "__jax_array__"):
        hint = "; jnp.asarray makes one" if isinstance(value, list | tuple) else ""
        raise TypeError(f"{name} must be an array, got {type(value).__name__}{hint}")
    array = jnp.asarray(value)
    spec = getattr(jax.typeof(array).sharding, "spec", ())
    if any(entry is not None for entry in spec):
        raise NotImplementedError(
            f"{name} is sharded as {spec} over a mesh with explicit axes, which is not supported yet: "
            "make the mesh with axis_types=(jax.sharding.AxisType.Auto,) * (number of axes), or call inside "
            "jax.shard_map, where every device multiplies its own rows"
        )
    return array


def check_rank(name: str, array: jax.Array, rank: int, shape: str) -> None:
    """Raises TypeError unless the array has this rank."""
    if array.ndim != rank:
        raise TypeError(f"{name} must have rank {rank}, of shape {shape}; got shape {array.shape}")


def check_out_sharding(out_sharding: Any) -> None:
    """Raises NotImplementedError for an out_sharding."""
    if out_sharding is not None:
        raise NotImplementedError(
            f"out_sharding={out_sharding} is not supported yet; call inside jax.shard_map, with out_specs"
        )


def as_int32(name: str, value: ArrayLike) -> jax.Array:
    """An argument of integers of any dtype as int32, clamped to its range.

    Raises:
      TypeError: unless it is an array of integers, or an int.
    """
    if isinstance(value, bool):
        value = np.asarray(value)
    elif isinstance(value, int):
        value = np.asarray(max(min(value, _INT32.max), _INT32.min), np.int32)
    # NumPy arrays first: JAX would wrap their 64-bit integers where x64 is off.
    array = value if isinstance(value, np.ndarray) else as_array(name, value)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} must have an integer dtype, got {array.dtype}; .astype(jnp.int32) gives it one")
    own = jnp.iinfo(array.dtype)
    if own.min < _INT32.min or own.max > _INT32.max:
        array = array.clip(max(own.min, _INT32.min), min(own.max, _INT32.max))
    return as_array(name, array.astype(jnp.int32))


def check_arrays(
    lhs: ArrayLike, rhs: ArrayLike, group_sizes: ArrayLike, group_offset: ArrayLike | None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The four arrays of a call, checked but for their ranks; the sizes and the offset as int32.

    Returns:
      lhs, rhs, group_sizes and a () shaped group_offset.
    """
    sizes = as_int32("group_sizes", group_sizes)
    if sizes.ndim == 0:
        raise TypeError("group_sizes must have rank 1, of shape (g,); got a scalar")
    offset = _no_offset() if group_offset is None else as_int32("group_offset", group_offset)
    if offset.shape not in ((), (1,)):
        raise TypeError(f"group_offset must be of shape () or (1,); got shape {offset.shape}")
    return as_array("lhs", lhs), as_array("rhs", rhs), sizes, offset.reshape(())


@functools.partial(jax.jit, inline=True)
def _no_offset() -> jax.Array:
    # jitted, since it is then a constant of a program, and not a transfer to the device
    return jnp.zeros((), jnp.int32)


def check_bias(bias: ArrayLike, shape: tuple[int, int]) -> jax.Array:
    """The bias as an array, checked.

    Args:
      bias: the argument.
      shape: (g, n), what it must be.
    """
    array = as_array("bias", bias)
    if array.shape != shape:
        raise TypeError(f"bias must be of shape (g, n) = {shape}; got shape {array.shape}")
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"bias must have a float dtype, got {array.dtype}")
    return array


def canonical_precision(precision: Any) -> Any:
    """The precision as a hashable value: None, a lax.Precision, an algorithm, or a pair of them.

    As for `jax.lax.dot`, None is what `jax.default_matmul_precision` says where the call is traced: gradients keep it.

    Raises:
      ValueError: for a name that `jax.lax.dot` does not know.
    """
    if precision is None:
        precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]  # JAX adds it
    if isinstance(precision, tuple | list):
        return tuple(canonical_precision(one) for one in precision)
    if isinstance(precision, str) and precision in lax.DotAlgorithmPreset.__members__:
        return lax.DotAlgorithmPreset[precision]
    if isinstance(precision, str):
        try:
            return lax.Precision(precision)
        except ValueError:
            raise ValueError(
                "precision must be None, a lax.Precision or its name (default, high, highest), or a lax.DotAlgorithm; "
                f"got {precision!r}"
            ) from None
    if not isinstance(precision, lax.Precision | lax.DotAlgorithm | lax.DotAlgorithmPreset | None):
        raise TypeError(
            f"precision must be None, a lax.Precision or its name, or a lax.DotAlgorithm; got {precision!r}"
        )
    return precision


def result_dtype(lhs: np.dtype, rhs: np.dtype, preferred: DTypeLike | None) -> np.dtype:
    """The dtype that `jax.lax.dot_general` gives these operands.

    Raises:
      TypeError: where it takes none of them.
      ValueError: for a preferred dtype of 64 bits with x64 switched off.
    """
    if preferred is None:
        return _dot_dtype(lhs, rhs, None)
    try:
        wanted = jnp.dtype(preferred)
    except TypeError:
        raise TypeError(f"preferred_element_type must be a dtype, got {preferred!r}") from None
    wide = (np.float64, np.int64, np.uint64, np.complex128)
    if wanted in wide and not jax.config.read("jax_enable_x64"):
        raise ValueError(f"preferred_element_type={wanted} needs jax_enable_x64")
    return _dot_dtype(lhs, rhs, wanted)


@functools.cache
def _dot_dtype(lhs: np.dtype, rhs: np.dtype, preferred: np.dtype | None) -> np.dtype:
    one = [jax.ShapeDtypeStruct((), dtype) for dtype in (lhs, rhs)]
    dot = functools.partial(lax.dot_general, dimension_numbers=(((), ()), ((), ())), preferred_element_type=preferred)
    return np.dtype(jax.eval_shape(dot, *one).dtype)
