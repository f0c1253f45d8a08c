"""Grouped matrix products for JAX: `ragged_dot`, its gradients, and Mixture-of-Experts layers on top."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax_ggemm.api import RESULT_NAME, ragged_dot, ragged_dot_general
    from jax_ggemm.replace import replace_lax_ragged_dot

_EXPORTS = {
    "RESULT_NAME": "api",
    "ragged_dot": "api",
    "ragged_dot_general": "api",
    "replace_lax_ragged_dot": "replace",
    "export_checks": "export",
}
__all__ = [*_EXPORTS, "__version__"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.metadata.version(__name__)
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
