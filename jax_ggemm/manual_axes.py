"""Typing of values inside `jax.shard_map`."""

from __future__ import annotations

from typing import TypeVar

import jax
from jax import lax

_Tree = TypeVar("_Tree")


def vary_alike(arrays: _Tree) -> _Tree:
    """Inside `jax.shard_map`: lets every array vary over the mesh axes that any of them varies over.

    A product and its gradients then have one type, as a gradient rule must. The transpose of this cast sums the
    gradient of an array that is replicated over an axis over that axis: once.

    Args:
      arrays: a pytree of arrays.

    Returns:
      The same arrays, cast where needed; outside of shard_map, as they are.
    """
    axes = frozenset().union(*(jax.typeof(array).mat.varying for array in jax.tree.leaves(arrays)))

    def cast(array: jax.Array) -> jax.Array:
        missing = tuple(axes - jax.typeof(array).mat.varying)
        return lax.pcast(array, missing, to="varying") if missing else array

    alike: _Tree = jax.tree.map(cast, arrays)
    return alike
