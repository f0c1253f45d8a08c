"""What a kernel is compiled for, and which configuration a call takes. Plain Python: nothing here imports the DSL."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jax_ggemm.kernel.config_sm100 import Sm100Config
from jax_ggemm.products import Product

SMEM_BYTES = 227 * 1024
"""Shared memory that one block of Hopper may have."""

_BARRIER_BYTES = 1024
"""Room for the barriers and the ring of work tiles, before the first operand tile."""

STAGING_COLUMNS = 32
STAGING_BUFFERS = 4
"""Tiles of 128 rows leave through as many buffers of as many columns."""

EXCHANGE_BUFFERS = 2
EXCHANGE_PIECE = 8
"""Sums of a pair of blocks go from one to the other by so many accumulators of each thread, through so many buffers."""

EXCHANGE_BYTES = 4 * EXCHANGE_PIECE * EXCHANGE_BUFFERS * 256
"""Of those buffers, for the two consumer warpgroups."""

LOW_ROWS = 64
"""Rows of one warpgroup's product. A tile that has no more is split by columns."""

TILE_K = 64
"""Contracted elements per pipeline stage: 128 bytes of a 16-bit type, one row of the widest swizzle."""


@dataclasses.dataclass(frozen=True)
class Sm90Config:
    """A kernel for Hopper: one tile of the result per block at a time, two consumer warpgroups.

    The warpgroups split a tile of 64 rows by columns, and any other by rows; the last tile of a group, where pairs
    of blocks multiply it and it has no more than 64 rows, by columns too.
    """

    tile_m: int = 128
    tile_n: int = 256
    stages: int = 4
    swizzle: int = 8
    """Tiles of m that are visited before the next tile of n: what the blocks of a wave share through L2."""
    cluster: int = 1
    """Blocks that work together: two load rhs for both where their tiles lie one below the other, and share the
    contraction of a group with many rows where rows are contracted."""

    def __post_init__(self) -> None:
        if self.tile_m not in {64, 128} or self.tile_n not in {128, 256}:
            raise ValueError(f"no kernel for tiles of {self.tile_m} x {self.tile_n}")
        if not 2 <= self.stages <= max_stages(self.tile_m, self.tile_n):
            raise ValueError(f"{self.stages} stages of {self.tile_m} x {self.tile_n} do not fit shared memory")
        if self.cluster not in {1, 2}:
            raise ValueError(f"no kernel for clusters of {self.cluster} blocks")

    @property
    def has_low_tiles(self) -> bool:
        """Whether tiles with 64 rows or fewer, where rows are ragged, take half of the products of whole ones."""
        return self.cluster == 2 and self.tile_m == 2 * LOW_ROWS

    @property
    def warpgroups(self) -> tuple[int, int]:
        """How the two consumer warpgroups divide a tile along m and n."""
        return (1, 2) if self.tile_m == 64 else (2, 1)

    @property
    def shared_memory_bytes(self) -> int:
        """Shared memory of one block, at most."""
        return _fixed_bytes(self.tile_m) + self.stages * stage_bytes(self.tile_m, self.tile_n)

    def shared_memory_for(self, out_dtype: np.dtype, product: Product) -> int:
        """Shared memory that one block is launched with: without buffers where neither results nor sums need them."""
        staging = _staging_bytes(self.tile_m)
        exchange = EXCHANGE_BYTES if self.cluster > 1 and not product.rows_are_ragged else 0
        needed = max(staging if out_dtype.itemsize == 2 else 0, exchange)
        return self.shared_memory_bytes - staging + needed


def stage_bytes(tile_m: int, tile_n: int) -> int:
    """Bytes of one pipeline stage: a tile of each operand."""
    return 2 * TILE_K * (tile_m + tile_n)


def max_stages(tile_m: int, tile_n: int) -> int:
    """The pipeline stages that fit shared memory."""
    return (SMEM_BYTES - _fixed_bytes(tile_m)) // stage_bytes(tile_m, tile_n)


def _fixed_bytes(tile_m: int) -> int:
    """Bytes beside the stages: barriers, and what results of 16-bit types leave through."""
    return _BARRIER_BYTES + _staging_bytes(tile_m)


def _staging_bytes(tile_m: int) -> int:
    """Bytes of the buffers that whole tiles of 16-bit results leave through."""
    return 2 * tile_m * STAGING_COLUMNS * STAGING_BUFFERS if tile_m == 128 else 0


_WIDE = Sm90Config(tile_m=128, tile_n=256, stages=4)
_NARROW = Sm90Config(tile_m=128, tile_n=128, stages=6)
_LOW = Sm90Config(tile_m=64, tile_n=256, stages=5)
_WIDE_PAIR = dataclasses.replace(_WIDE, cluster=2)
_NARROW_PAIR = dataclasses.replace(_NARROW, cluster=2)

_ROWS_FOR_LOW = ((0, 32), (128, 192))
"""Rows of an average group for which tiles of 64 rows are faster, on an H200 (docs/hopper.md).

Up to 32, where weights are read once and more stages are on their way. And where most groups are a whole tile of 128
rows and a low one, which a pair of blocks multiplies in the time of two whole ones. In between a group is one tile of
128 rows, and two of 64 would read its weights twice; above, tiles of 128 rows multiply faster.
"""

_PAIRS_OF_MULTIPROCESSORS = 66
"""Of an H200. A matrix of no more tiles cannot keep it busy, should one group have most rows."""


def candidates(product: Product) -> tuple[Sm90Config, ...]:
    """The configurations for a product that are compiled ahead of time."""
    if product.rows_are_ragged:
        return (_WIDE_PAIR, _NARROW, _LOW)
    return (_WIDE, _NARROW, _WIDE_PAIR, _NARROW_PAIR)


def pick(product: Product, m: int, k: int, n: int, groups: int) -> Sm90Config:
    """The configuration for a call, from its shapes alone: the sizes of the groups are not known yet.

    Args:
      product: which product.
      m: rows.
      k: columns of the weights' first axis.
      n: columns of the weights' second axis.
      groups: number of groups.

    Returns:
      One of `candidates(product)`.
    """
    columns = k if product is Product.DLHS else n
    narrow = columns <= _NARROW.tile_n
    if product.rows_are_ragged:
        if narrow:
            return _NARROW
        return _LOW if any(low * groups < m <= high * groups for low, high in _ROWS_FOR_LOW) else _WIDE_PAIR
    if ceil_div(k, _WIDE.tile_m) * ceil_div(n, _WIDE.tile_n) <= _PAIRS_OF_MULTIPROCESSORS:
        return _NARROW_PAIR if narrow else _WIDE_PAIR
    return _NARROW if narrow else _WIDE


def useful_rows(config: Sm90Config, group_sizes: Sequence[int]) -> float:
    """The fraction of the rows that are multiplied which are rows of a group, where rows are ragged."""
    rows = sum(group_sizes)
    height = LOW_ROWS if config.has_low_tiles else config.tile_m
    padded = sum(ceil_div(size, height) * height for size in group_sizes)
    return rows / padded if padded else 1.0


def place_in_group(index: Any, m_tiles: Any, n_tiles: Any, swizzle: int, smaller: Callable[[Any, Any], Any]) -> Any:
    """Where the tile of this index within its group lies: in bands of `swizzle` tiles of m, each from column to column.

    Works on Python's and on a kernel's integers.

    Args:
      index: of the tile, from 0 to m_tiles * n_tiles.
      m_tiles: tiles along m.
      n_tiles: tiles along n.
      swizzle: height of a band.
      smaller: the minimum of two integers.

    Returns:
      (m, n): the tile's place, in tiles.
    """
    band = index // (swizzle * n_tiles)
    height = smaller(m_tiles - band * swizzle, swizzle)
    within = index - band * swizzle * n_tiles
    return band * swizzle + within % height, within // height


def ceil_div(a: Any, b: int) -> Any:
    """The quotient a / b, rounded up."""
    return (a + (b - 1)) // b


@dataclasses.dataclass(frozen=True)
class KernelSpec:
    """Everything that a kernel object is compiled for. Shapes are not among it."""

    product: Product
    in_dtype: np.dtype
    out_dtype: np.dtype
    has_bias: bool
    config: Sm90Config | Sm100Config

    def __post_init__(self) -> None:
        if self.config.cluster > 1 and not self.product.rows_are_ragged and self.config.tile_m == 64:
            raise ValueError(f"the contraction of {self.product} is not shared by blocks with tiles of 64 rows")
        if isinstance(self.config, Sm100Config) and self.config.swapped and not self.product.rows_are_ragged:
            raise ValueError(f"{self.product} has no rows of few tokens: its operands are not swapped")

    @property
    def shared_memory_bytes(self) -> int:
        """Shared memory that one block is launched with."""
        if isinstance(self.config, Sm100Config):
            return self.config.shared_memory_for(self.out_dtype)
        return self.config.shared_memory_for(self.out_dtype, self.product)

    def describe(self) -> dict[str, object]:
        """As JSON."""
        return {
            "product": self.product.value,
            "dtypes": {"operands": self.in_dtype.name, "result": self.out_dtype.name},
            "bias": self.has_bias,
            "config": dataclasses.asdict(self.config),
        }


def default_specs(
    dtypes: Sequence[np.dtype], candidates: Callable[[Product], Sequence[Any]] = candidates
) -> Iterator[KernelSpec]:
    """The kernels of a release: every candidate of every product, with results of the operands' type or float32.

    Args:
      dtypes: of the operands.
      candidates: the configurations for a product.

    Yields:
      What to compile.
    """
    for product in Product:
        for dtype in dtypes:
            for out_dtype in dict.fromkeys((dtype, np.dtype(np.float32))):
                for has_bias in (False, True) if product.rows_are_ragged else (False,):
                    for config in candidates(product):
                        yield KernelSpec(product, dtype, out_dtype, has_bias, config)
