"""Grouped matrix products for JAX: `ragged_dot`, its gradients, and Mixture-of-Experts layers on top."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jax_ggemm.api import RESULT_NAME, ragged_dot, ragged_dot_general
from jax_ggemm.exchanges import AllToAll, Gather, Replicated, Ring
from jax_ggemm.expert_parallel import ExpertParallel
from jax_ggemm.experts import ExpertOptions
from jax_ggemm.export import GpuKernels, export_checks, register
from jax_ggemm.layouts import ExpertLayout, ExpertParams
from jax_ggemm.moe_layer import MoEOptions, MoEParams, moe, moe_experts
from jax_ggemm.products import Implementation
from jax_ggemm.replace import replace_lax_ragged_dot
from jax_ggemm.routing import Router, update_selection_bias

if TYPE_CHECKING:
    from jax_ggemm.nnx_moe import MoE

__all__ = [
    "RESULT_NAME",
    "AllToAll",
    "ExpertLayout",
    "ExpertOptions",
    "ExpertParallel",
    "ExpertParams",
    "Gather",
    "GpuKernels",
    "Implementation",
    "MoE",
    "MoEOptions",
    "MoEParams",
    "Replicated",
    "Ring",
    "Router",
    "export_checks",
    "moe",
    "moe_experts",
    "ragged_dot",
    "ragged_dot_general",
    "register",
    "replace_lax_ragged_dot",
    "update_selection_bias",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # The only module that needs flax, which takes a second to import.
    if name == "MoE":
        from jax_ggemm.nnx_moe import MoE  # noqa: PLC0415

        return MoE
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
