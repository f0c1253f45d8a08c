"""The grouped products under jit over a mesh: each device multiplies its part of the rows, groups or columns.

Without this XLA would gather every operand of a custom call to every device. A program for one device, and the inside
of `jax.shard_map`, do not see it. Mesh axes that split

  * rows (m): each device takes the sizes of its own rows; dW is summed over devices;
  * groups (g): each device holds the weights from a group offset on; results are summed, each row from one device;
  * k and n: columns of the result stay split; a contracted dimension is summed, in float32 before it is rounded;
  * batch axes of `vmap`: each device takes its elements.

Sums whose result is wanted split over the same axes are scattered. Nothing but sizes and offsets is gathered, unless
one mesh axis splits groups and rows both: rows are gathered then, not weights.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_ggemm import binding
from jax_ggemm.products import Call, Operands, Product, accumulation_dtype
from jax_ggemm.xla import group_ends

_FACTORS = {
    Product.FORWARD: (("m", "k"), ("g", "k", "n"), ("m", "n")),
    Product.DLHS: (("m", "n"), ("g", "k", "n"), ("m", "k")),
    Product.DRHS: (("m", "k"), ("m", "n"), ("g", "k", "n")),
}
"""The dimensions of lhs, rhs and result."""

_PRIORITY = ("g", "m", "k", "n")
"""Who gets a mesh axis that splits several dimensions."""


def grouped_product(call: Call, operands: Operands) -> jax.Array:
    """`binding.grouped_product`, for operands that may be sharded over a mesh.

    Args:
      call: the product.
      operands: its arrays, with or without batch axes.

    Returns:
      The result, with the full batch axes in front.
    """
    layout = _Layout.of(call, operands)
    arrays = [operands.lhs, operands.rhs, operands.group_sizes, operands.group_offset[..., None]]
    if operands.bias is not None:
        arrays.append(operands.bias)
    result: jax.Array = _partitioned(call, layout)(*arrays)
    return result


@dataclasses.dataclass(frozen=True)
class _Layout:
    """The dimensions of lhs, rhs, sizes, offset, bias if there is one, and result, by name.

    A batch dimension is "b0", "b1" and so on where an array has all of it, and "_" where it has length 1.
    """

    arrays: tuple[tuple[str, ...], ...]
    result: tuple[str, ...]

    @classmethod
    def of(cls, call: Call, operands: Operands) -> _Layout:
        lhs, rhs, result = _FACTORS[call.product]
        cores = [lhs, rhs, ("s",), ("o",)]
        arrays = [operands.lhs, operands.rhs, operands.group_sizes, operands.group_offset[..., None]]
        if operands.bias is not None:
            cores.append(("g", result[1]))
            arrays.append(operands.bias)
        full = operands.batch_shape

        def batch(array: jax.Array) -> tuple[str, ...]:
            lengths = array.shape[: len(full)]
            return tuple(f"b{i}" if n == full[i] else "_" for i, n in enumerate(lengths))

        names = tuple(f"b{i}" for i in range(len(full)))
        return cls(tuple(batch(a) + core for a, core in zip(arrays, cores, strict=True)), names + result)

    @property
    def contracted(self) -> tuple[str, ...]:
        """The dimensions that a product sums over; those of groups among them for m rows."""
        names = dict.fromkeys((*self.arrays[0], *self.arrays[1]))
        return tuple(name for name in names if name not in self.result and name != "_")

    def rule(self) -> str:
        """The sharding rule in the notation of `custom_partitioning.def_partition`."""
        number = iter(range(99))
        terms = [" ".join(f"u{next(number)}" if n == "_" else n for n in names) for names in self.arrays]
        return ", ".join(terms) + " -> " + " ".join(self.result)

    def sizes(self, shapes: list[tuple[int, ...]], result: tuple[int, ...]) -> dict[str, int]:
        """The length of each dimension."""
        pairs = zip((*self.arrays, self.result), (*shapes, result), strict=True)
        return {name: n for names, shape in pairs for name, n in zip(names, shape, strict=True) if name != "_"}


@functools.cache
def _partitioned(call: Call, layout: _Layout) -> custom_partitioning:
    """The product as a function of flat arrays that says how to split it."""

    def run(*arrays: jax.Array) -> jax.Array:
        lhs, rhs, sizes, offset, *bias = arrays
        return binding.grouped_product(call, Operands(lhs, rhs, sizes, offset[..., 0], *bias))

    def partition(mesh: Mesh, arg_shapes: Any, result_shape: Any) -> Any:
        split = _Split.of(mesh, call, layout, arg_shapes, result_shape)
        return split.mesh, split.run, split.sharding(layout.result), tuple(map(split.sharding, layout.arrays))

    product = custom_partitioning(run)
    product.def_partition(
        partition,
        sharding_rule=layout.rule(),
        need_replication_factors=("s", "o"),
        reduction_factors=layout.contracted,
    )
    return product


@dataclasses.dataclass(frozen=True)
class _Split:
    """Which mesh axes split which dimension of a product; what a device does with its part."""

    mesh: Mesh
    call: Call
    layout: _Layout
    axes: dict[str, tuple[str, ...]]
    """Of the operands' dimensions."""
    lengths: dict[str, int]
    scatter: dict[str, tuple[str, ...]]
    """Mesh axes that are summed over and then split a dimension of the result, within its part in `axes` if any."""

    @classmethod
    def of(cls, mesh: Mesh, call: Call, layout: _Layout, arg_shapes: Any, result_shape: Any) -> _Split:
        shapes = [tuple(arg.shape) for arg in arg_shapes]
        lengths = layout.sizes(shapes, tuple(result_shape.shape))
        if mesh.empty:  # the compiler's shardings are not those of a mesh: every device takes everything
            devices = sorted(result_shape.sharding.device_set, key=lambda device: device.id)
            return cls(Mesh(np.array(devices), ("devices",)), call, layout, {}, lengths, {})

        wanted: dict[str, tuple[str, ...]] = {}
        for names, arg in zip(layout.arrays[:2], arg_shapes[:2], strict=True):
            for name, entry in zip(names, _entries(arg), strict=True):
                wanted[name] = wanted.get(name) or entry
        out = dict(zip(layout.result, _entries(result_shape), strict=True))
        for name, entry in out.items():
            wanted[name] = wanted.get(name) or entry

        axes: dict[str, tuple[str, ...]] = {}
        used: set[str] = set()
        order = sorted(wanted, key=lambda name: _PRIORITY.index(name) if name in _PRIORITY else -1)
        for name in order:
            free = tuple(axis for axis in wanted[name] if axis not in used)
            ranks = math.prod(mesh.shape[axis] for axis in free)
            if name != "_" and free and lengths[name] % ranks == 0:
                axes[name] = free
                used.update(free)
        summed = {axis for name in layout.contracted for axis in axes.get(name, ())}
        scatter = {}
        for name, entry in out.items():
            held = axes.get(name, ())
            rest = entry[len(held) :]
            fits = lengths[name] % math.prod(mesh.shape[axis] for axis in entry) == 0
            if rest and entry[: len(held)] == held and summed.issuperset(rest) and fits:
                scatter[name] = rest
        return cls(mesh, call, layout, axes, lengths, scatter)

    def sharding(self, names: tuple[str, ...]) -> NamedSharding:
        """How an array with these dimensions is split."""
        scatter = self.scatter if names == self.layout.result else {}
        entries = (self.axes.get(name, ()) + scatter.get(name, ()) for name in names)
        return NamedSharding(self.mesh, PartitionSpec(*(entry or None for entry in entries)))

    def run(self, *arrays: jax.Array) -> jax.Array:
        """The product on one device, with its part of the arrays."""
        lhs, rhs, sizes, offset, *bias = arrays
        call, offset = self.call, offset[..., 0]
        if "m" in self.axes:
            rows = self.lengths["m"] // self._ranks("m")
            starts, ends = (jnp.clip(at - self._index("m") * rows, 0, rows) for at in _bounds(sizes, self.lengths["m"]))
            sizes = ends - starts
        if "g" in self.axes:
            weights = self.lengths["g"] // self._ranks("g")
            offset = offset + self._index("g") * weights
            call = dataclasses.replace(call, num_weights=weights)
        # Each row comes from the one device that holds its group; what is added up in parts is rounded afterwards.
        parts = tuple(name for name in self.layout.contracted if name in self.axes and name != "g")
        if parts:
            call = dataclasses.replace(call, out_dtype=accumulation_dtype(lhs.dtype, rhs.dtype, call.out_dtype))
            bias = [jnp.where(self._index(parts[0]) == 0, array, 0) for array in bias]  # added once
        result = binding.grouped_product(call, Operands(lhs, rhs, sizes, offset, *bias))
        summed = tuple(axis for name in self.layout.contracted for axis in self.axes.get(name, ()))
        for name, rest in self.scatter.items():
            result = lax.psum_scatter(result, rest, scatter_dimension=self.layout.result.index(name), tiled=True)
        scattered = {axis for rest in self.scatter.values() for axis in rest}
        if whole := tuple(axis for axis in summed if axis not in scattered):
            result = lax.psum(result, whole)
        return result.astype(self.call.out_dtype)

    def _ranks(self, name: str) -> int:
        return math.prod(self.mesh.shape[axis] for axis in self.axes[name])

    def _index(self, name: str) -> jax.Array:
        """Which part of a dimension this device has."""
        return lax.axis_index(self.axes[name])


def _bounds(sizes: jax.Array, m: int) -> tuple[jax.Array, jax.Array]:
    """The first and the end row of each group, like `sizes`, which may have batch axes."""
    ends = jax.vmap(lambda one: group_ends(one, m))(sizes.reshape(-1, sizes.shape[-1])).reshape(sizes.shape)
    return jnp.concatenate([jnp.zeros_like(ends[..., :1]), ends[..., :-1]], axis=-1), ends


def _entries(array: Any) -> list[tuple[str, ...]]:
    """The mesh axes that split each dimension of an array."""
    spec = tuple(getattr(array.sharding, "spec", ()) or ())
    spec += (None,) * (len(array.shape) - len(spec))
    return [() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in spec]
