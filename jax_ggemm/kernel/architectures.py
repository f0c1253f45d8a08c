"""The GPU architectures that there are kernels for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jax_ggemm.kernel import config, pick_sm100
from jax_ggemm.kernel.config import Sm90Config
from jax_ggemm.kernel.config_sm100 import Sm100Config
from jax_ggemm.products import Product

Config = Sm90Config | Sm100Config


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What the kernels of one architecture can, and which there are."""

    name: str
    """What they are compiled for."""
    capability: str
    """The compute capability of its GPUs."""
    candidates: Callable[[Product], tuple[Config, ...]]
    """The configurations for a product that are compiled ahead of time."""
    pick: Callable[[Product, int, int, int, int], Config]
    """The configuration for a call, from its product, m, k, n and number of groups."""
    multiplies_float32: bool
    """float32 operands are multiplied as they are, rounded to TF32."""


def _pick_sm90(product: Product, m: int, k: int, n: int, groups: int) -> Config:
    return config.pick(product, m, k, n, groups)  # looked up at each call, so that tests can replace it


_KNOWN = (
    Architecture("sm_90a", "9.0", config.candidates, _pick_sm90, multiplies_float32=False),
    Architecture("sm_100a", "10.0", pick_sm100.candidates, pick_sm100.pick, multiplies_float32=True),
    Architecture("sm_103a", "10.3", pick_sm100.candidates, pick_sm100.pick, multiplies_float32=True),
)

BY_NAME = {architecture.name: architecture for architecture in _KNOWN}
BY_CAPABILITY = {architecture.capability: architecture for architecture in _KNOWN}


def candidates(product: Product) -> tuple[Config, ...]:
    """The configurations for a product on any architecture."""
    return tuple(dict.fromkeys(found for architecture in _KNOWN for found in architecture.candidates(product)))
