"""Which configuration a call takes on Blackwell: the one that a simple model of a B200 finds fastest.

Nobody has measured these kernels on the hardware. The model says how long the tensor cores, the loads into shared
memory and the memory need for the tiles of a call, and how full the last wave is. `python -m jax_ggemm tune` measures,
and what it stores comes first.
"""

from __future__ import annotations

import math

from jax_ggemm.kernel.config import ceil_div
from jax_ggemm.kernel.config_sm100 import ATOM_COLUMNS, Eviction, Sm100Config
from jax_ggemm.products import Product

MULTIPROCESSORS = 148
"""Of a B200 (the first of the blog posts that docs/blackwell.md cites; NVIDIA's driver reports the same)."""

FLOPS = 2.25e15
"""Dense bfloat16, a second (NVIDIA HGX B200 datasheet: 36 PFLOPS for eight with sparsity)."""

MEMORY_RATE = 8e12
"""Bytes a second (the same datasheet)."""

FILL_RATE = 2 * MEMORY_RATE
"""Bytes a second that all SMs together take from L2. An assumption: NVIDIA gives no figure."""

_NARROWEST_ROWS = 128
"""Rows that a product of one block costs as much as, though it has fewer: 64 use half of tensor memory's lanes."""

_EXPOSED_EPILOGUE = 0.5
"""Of a tile that fills tensor memory: what the next one waits for, even where it is released by halves."""

TOKENS_16 = Sm100Config(16, 128, 12, 2, 6, swapped=True, weight_eviction=Eviction.FIRST)
TOKENS_96 = Sm100Config(96, 256, 10, 2, 5, swapped=True, varying=True, weight_eviction=Eviction.FIRST)
TOKENS_448 = Sm100Config(448, 256, 5, weight_stages=5, swapped=True, varying=True)
FEW_ROWS = Sm100Config(64, 128, 8, weight_k_tiles=2, weight_stages=5, weight_eviction=Eviction.FIRST)
SMALL = Sm100Config(128, 128, 7, weight_stages=7)
PAIR = Sm100Config(256, 256, 7, weight_stages=7)
WIDE_PAIR = Sm100Config(256, 512, 4, weight_stages=4, splits_accumulator=True)


_FOR_FEW_ROWS = {TOKENS_16: 8, TOKENS_96: 64}
"""Up to how many rows a group, on average, each is taken: where the emulator's timeline has groups fit their tile."""

_ROWS_OF_A_TILE = 384
"""Up to how many rows a group, on average, `TOKENS_448` may be taken: most groups are one tile then. `WIDE_PAIR` reads
less for each product of larger ones, and the timeline has it ahead."""

_FOR_ANY = (SMALL, PAIR, WIDE_PAIR)


def candidates(product: Product) -> tuple[Sm100Config, ...]:
    """The configurations for a product that are compiled ahead of time.

    `FEW_ROWS`, which the first post's tuner chose for few rows, is there for `tune` to measure.
    """
    return (*_FOR_FEW_ROWS, TOKENS_448, FEW_ROWS, *_FOR_ANY) if product.rows_are_ragged else _FOR_ANY


def estimate(config: Sm100Config, product: Product, m: int, k: int, n: int, groups: int) -> float:
    """Seconds that the model gives a call with operands of 16 bits.

    Args:
      config: which tiles.
      product: which product.
      m: rows.
      k: columns of the weights' first axis.
      n: columns of the weights' second axis.
      groups: number of groups.

    Returns:
      The larger of what the memory needs, and of what the SMs need in whole waves.
    """
    rows = m / groups
    contraction: float
    if product.rows_are_ragged:
        columns, contraction = (k, n) if product is Product.DLHS else (n, k)
        # A group of any size ends in the middle of a tile, on average.
        tiles_down = max(rows / config.tile_m + 0.5, 1.0)
    else:
        columns, contraction = n, max(rows, 1.0)
        tiles_down = float(ceil_div(k, config.tile_m))
    units = MULTIPROCESSORS // config.blocks
    share = config.blocks / MULTIPROCESSORS
    tiles = groups * tiles_down * ceil_div(columns, config.tile_n)
    # Varying tiles have the rows of their group, and half a granule more; operands that are swapped no lower limit.
    height = (rows + config.granule / 2) / tiles_down if config.varying else config.tile_m
    multiplied = height if config.swapped else max(height, _NARROWEST_ROWS * config.blocks)
    multiply = 2 * multiplied * config.tile_n * contraction / (FLOPS * share)
    fill = 2 * (height + config.tile_n) * contraction / (FILL_RATE * share)
    drain = 2 * height * config.tile_n / (FILL_RATE * share)
    fills_tmem = config.slots_per_tile > 1 and height * config.tile_n > ATOM_COLUMNS * ATOM_COLUMNS
    exposed = _EXPOSED_EPILOGUE * drain if fills_tmem else 0.0
    compute = math.ceil(tiles / units) * (max(multiply, fill, drain) + exposed)
    read_and_written = 2 * (m * (k + n) + groups * k * n)
    return max(compute, read_and_written / MEMORY_RATE)


def pick(product: Product, m: int, k: int, n: int, groups: int) -> Sm100Config:
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
    if product.rows_are_ragged:
        # Where memory decides, the model cannot tell: these read the least beside the weights.
        for config, rows in _FOR_FEW_ROWS.items():
            if m <= rows * groups:
                return config
    fits_a_tile = product.rows_are_ragged and m <= _ROWS_OF_A_TILE * groups
    known = (TOKENS_448, *_FOR_ANY) if fits_a_tile else _FOR_ANY
    return min(known, key=lambda config: estimate(config, product, m, k, n, groups))
