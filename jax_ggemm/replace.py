"""Lets model code that calls `jax.lax.ragged_dot` use this package unchanged."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jax_ggemm import api

# A user context is local to a thread and part of JAX's trace caches: a function that was jitted outside
# is traced again inside, and the other way around.
_inside = jax.make_user_context(False)
_lock = threading.Lock()
_depth = 0
_originals: dict[str, Callable[..., jax.Array]] = {}


def _switch(original: Callable[..., jax.Array], ours: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> jax.Array:
        return (ours if _inside.value else original)(*args, **kwargs)

    return call


@contextlib.contextmanager
def replace_lax_ragged_dot() -> Iterator[None]:
    """Within this context, or a function decorated with it, `jax.lax.ragged_dot` is `jax_ggemm.ragged_dot`.

    `jax.lax.ragged_dot_general` is replaced likewise. Only code of this thread that looks the functions up
    in `jax.lax` is affected: not a name bound earlier by `from jax.lax import ragged_dot`.
    Contexts nest, and may be open in several threads at once.
    """
    global _depth
    with _lock:
        if _depth == 0:
            for name in ("ragged_dot", "ragged_dot_general"):
                _originals[name] = getattr(jax.lax, name)
                setattr(jax.lax, name, _switch(_originals[name], getattr(api, name)))
        _depth += 1
    try:
        with _inside(True):
            yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                for name, original in _originals.items():
                    setattr(jax.lax, name, original)
