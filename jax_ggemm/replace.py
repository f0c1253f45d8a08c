"""Lets model code that calls `jax.lax.ragged_dot` use this package unchanged."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jax_ggemm import api

_NAMES = ("ragged_dot", "ragged_dot_general")

# A user context belongs to one thread and is part of the keys of JAX's trace caches: a function that was
# jitted outside is traced again inside, and the other way around.
_inside = jax.make_user_context(False)


class _Patch:
    """The functions in `jax.lax` that look at `_inside`, there as long as any thread needs them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._originals: dict[str, Callable[..., jax.Array]] = {}

    def enter(self) -> None:
        with self._lock:
            if self._users == 0:
                self._originals = {name: getattr(jax.lax, name) for name in _NAMES}
                for name, original in self._originals.items():
                    setattr(jax.lax, name, self._switch(original, getattr(api, name)))
            self._users += 1

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                for name, original in self._originals.items():
                    setattr(jax.lax, name, original)

    @staticmethod
    def _switch(original: Callable[..., jax.Array], ours: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> jax.Array:
            return (ours if _inside.value else original)(*args, **kwargs)

        return call


_patch = _Patch()


@contextlib.contextmanager
def replace_lax_ragged_dot() -> Iterator[None]:
    """Within this context, or a function decorated with it, `jax.lax.ragged_dot` is `jax_ggemm.ragged_dot`.

    `jax.lax.ragged_dot_general` is replaced likewise. Only code of this thread that looks the functions up
    in `jax.lax` is affected: not a name bound earlier by `from jax.lax import ragged_dot`.
    Contexts nest, and may be open in several threads at once.
    """
    _patch.enter()
    try:
        with _inside(True):
            yield
    finally:
        _patch.leave()
