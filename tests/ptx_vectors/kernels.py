"""Calls of the Hopper kernels that were run on a GPU: small shapes, every product, configuration and operand type."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from jax_ggemm.kernel import config
from jax_ggemm.products import Call, Operands, Product

K, N = 200, 136
"""Neither is a multiple of a tile."""


@dataclasses.dataclass(frozen=True)
class Groups:
    """Rows and how they are grouped."""

    m: int
    sizes: tuple[int, ...]
    offset: int = 0
    weights: int | None = None


EXACT_GROUPS = {
    "ragged": Groups(300, (40, 0, 1, 200, 55)),
    "whole_tiles": Groups(384, (128, 256)),
    "empty": Groups(64, (0, 0, 0)),
    "one_group": Groups(150, (0, 150, 0)),
    "single_rows": Groups(40, (1,) * 40),
    "rows_without_group": Groups(200, (50, 0, 17)),
    "past_the_end": Groups(130, (100, 100, 90)),
    "shifted": Groups(200, (50, 60, 70, 20), 1, 2),
    "thick": Groups(1400, (1, 0, 1300, 90)),
}
ROUNDED_GROUPS = {
    Product.FORWARD: Groups(96, (41, 0, 55)),
    Product.DLHS: Groups(96, (41, 0, 55)),
    Product.DRHS: Groups(1100, (0, 1060)),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One call. Its operands follow from it."""

    product: Product
    config: config.Sm90Config
    in_dtype: str
    out_dtype: str
    groups_name: str
    exact: bool
    """Whether operands are small integers, whose sums float32 holds exactly; else normal values."""

    @property
    def name(self) -> str:
        """Names the case in a recording.

        Where rows are ragged, a pair of blocks adds the same terms in the same order as one block: it has the same
        name, and was recorded as one block. On the H200 both gave the same bits on 14 products (2026-11-30).
        """
        pair = "x2" * (self.config.cluster > 1 and not self.product.rows_are_ragged)
        tile = f"{self.config.tile_m}x{self.config.tile_n}{pair}"
        return "-".join((self.product.value, tile, self.in_dtype, self.out_dtype, self.groups_name))

    @property
    def groups(self) -> Groups:
        """The rows."""
        return EXACT_GROUPS[self.groups_name] if self.exact else ROUNDED_GROUPS[self.product]

    @property
    def spec(self) -> config.KernelSpec:
        """The kernel."""
        types = (np.dtype(jnp.dtype(t)) for t in (self.in_dtype, self.out_dtype))
        return config.KernelSpec(self.product, *types, False, self.config)

    def operands(self) -> tuple[Call, Operands]:
        """The call's arguments."""
        groups = self.groups
        weights = len(groups.sizes) if groups.weights is None else groups.weights
        k, n = (K, N) if self.exact else (K, 40) if self.product is Product.DRHS else (K, N)
        shapes = {
            Product.FORWARD: ((groups.m, k), (weights, k, n)),
            Product.DLHS: ((groups.m, n), (weights, k, n)),
            Product.DRHS: ((groups.m, k), (groups.m, n)),
        }[self.product]
        # RandomState's values are the same in every version of NumPy.
        rng = np.random.RandomState(len(groups.sizes) + groups.m)
        draw = (lambda shape: rng.randint(-4, 5, shape)) if self.exact else (lambda shape: rng.randn(*shape))
        arrays = [jnp.asarray(draw(shape).astype(np.float32), self.in_dtype) for shape in shapes]
        sizes, offset = jnp.asarray(groups.sizes, jnp.int32), jnp.int32(groups.offset)
        call = Call(self.product, self.spec.out_dtype, weights, None, None)
        return call, Operands(arrays[0], arrays[1], sizes, offset)


def cases() -> Iterator[Case]:
    """Every case: exact ones first."""
    for product in Product:
        for picked in config.candidates(product):
            for dtype in ("bfloat16", "float16"):
                for out_dtype in (dtype, "float32"):
                    if dtype == "float16" and out_dtype == "float32":
                        continue
                    for groups in EXACT_GROUPS:
                        yield Case(product, picked, dtype, out_dtype, groups, exact=True)
                yield Case(product, picked, dtype, "float32", "normal", exact=False)
