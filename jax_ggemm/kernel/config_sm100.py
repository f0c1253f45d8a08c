"""Blackwell: what fits an SM, and which configuration a call takes. Plain Python: nothing here imports the DSL."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Container
from typing import ClassVar

import numpy as np

SMEM_BYTES = 227 * 1024
"""Shared memory that one block of compute capability 10.0 may have (CUDA C++ Programming Guide, table of
technical specifications per compute capability)."""

TMEM_COLUMNS = 512
"""32-bit columns of tensor memory, each of 128 lanes, that an SM has (PTX ISA, Tensor Memory)."""

LEAST_TMEM_COLUMNS = 32
"""Of an allocation."""

FIXED_BYTES = 1024
"""Room for the barriers, the ring of work tiles, and the answer of who asks for them, before the first operand tile."""

STAGING_ROWS = 32
STAGING_COLUMNS = 64
STAGING_BUFFERS = 2
"""Where results leave through shared memory: of each of four warps."""

K_TILE_BYTES = 128
"""Of a row in a tile of the contraction: one row of the widest swizzle."""

ATOM_COLUMNS = 256
"""Columns of the widest product that one instruction gives."""

_GRANULE = 16
"""Columns of the narrowest product of 128 rows, by which wider ones grow, for each block that shares it."""


class Eviction(enum.IntEnum):
    """How long L2 should hold what a TMA load brought, as the 64-bit policy that the load takes."""

    NORMAL = 0x1000000000000000
    FIRST = 0x12F0000000000000
    LAST = 0x14F0000000000000


@dataclasses.dataclass(frozen=True)
class Sm100Config:
    """A kernel for Blackwell: a persistent block per SM, with accumulators in tensor memory.

    Each switch of the four changes that make bytes in flight, or hide the epilogue, stands alone.
    """

    cluster: ClassVar[int] = 1
    """Blocks that share the contraction of a tile."""

    tile_m: int = 128
    """Rows of a tile: 64 or 128 of one block, or 256 of a pair of blocks that multiplies as one (`cta_group::2`). Where
    tiles are `varying`, the most rows of one."""
    tile_n: int = 256
    """Columns of a tile: 128 or 256, or 512 of a pair, which fill tensor memory."""
    stages: int = 4
    """Tiles of the left operand that shared memory holds."""
    weight_k_tiles: int = 1
    """Neighbouring tiles of the contraction that a stage of the right operand holds: 1, or 2 loaded at once."""
    weight_stages: int = 4
    """Stages of the right operand: `stages` where each holds one tile."""
    wide_boxes: bool = True
    """A stage of the right operand is loaded with as few requests as can be: see `wide_boxes`."""
    splits_accumulator: bool = False
    """Of 512 columns: each half is handed to the epilogue, and given back, on its own."""
    wide_stores: bool = True
    """Results leave registers 32 bytes at a time where they are aligned to that, otherwise 16."""
    staged: bool = False
    """16-bit results leave through shared memory and the TMA unit instead: what stores from registers do without."""
    swapped: bool = False
    """The weights are the product's A, and tokens its B: few of them, as they come. Not where rows are contracted."""
    varying: bool = False
    """Where operands are swapped: tiles have as many tokens as their group has left, in granules (`varying_sm100`).
    With 256 columns a tile is of a pair of blocks."""
    multicast: int = 1
    """Tiles side by side along n whose blocks share their rows of lhs: 2 load one half each, for both
    (`multicast_sm100`). Not where operands are swapped."""
    weight_eviction: Eviction = Eviction.NORMAL
    dynamic: bool = False
    """Multiprocessors take the next tile when they have room for it (`dynamic_sm100`), and are not dealt theirs."""
    swizzle: int = 8
    """Tiles of m that are visited before the next tile of n: what the blocks of a wave share through L2."""

    def __post_init__(self) -> None:
        rows, columns = self._extents()
        if self.tile_m not in rows or self.tile_n not in columns:
            raise ValueError(f"no kernel for tiles of {self.tile_m} x {self.tile_n}")
        if self.varying and not self.swapped:
            raise ValueError("no kernel for varying tiles of operands that are not swapped")
        if self.multicast not in ({1} if self.swapped else {1, 2}):
            swapped = " with swapped operands" if self.swapped else ""
            raise ValueError(f"no kernel{swapped} for {self.multicast} tiles that share their rows of lhs")
        if self.weight_k_tiles not in {1, 2}:
            raise ValueError(f"a stage of weights holds 1 or 2 tiles of the contraction, not {self.weight_k_tiles}")
        if self.weight_k_tiles == 1 and self.weight_stages != self.stages:
            raise ValueError(f"{self.stages} stages, but {self.weight_stages} of weights, which share their barriers")
        if self.splits_accumulator and self.tile_n <= ATOM_COLUMNS:
            raise ValueError(f"tiles of {self.tile_n} columns have an accumulator of one part")
        if self.staged and self.rows_of_warp != STAGING_ROWS:
            raise ValueError(f"no kernel that stages results in shared memory for tiles of {self.tile_m} rows")
        if min(self.stages, self.weight_stages) < 2 or self.shared_memory_bytes > SMEM_BYTES:
            raise ValueError(
                f"{self.stages} stages of {self.stage_bytes} bytes and {self.weight_stages} of "
                f"{self.weight_stage_bytes} are fewer than 2, or do not fit {SMEM_BYTES} bytes of shared memory"
            )

    def _extents(self) -> tuple[Container[int], set[int]]:
        """The heights and widths of tiles that there are kernels for."""
        if self.varying:
            return range(self.granule, 2 * ATOM_COLUMNS + 1, self.granule), {128, 256}
        if self.swapped:
            return {16, 32, 64, 128}, {128}
        return {64, 128, 256}, {128, 256, 512} if self.tile_m == 256 else {128, 256}

    @property
    def blocks(self) -> int:
        """Blocks that work on a tile together."""
        if self.varying:
            return self.tile_n // 128
        return 2 if self.tile_m == 256 else 1

    @property
    def granule(self) -> int:
        """Tokens by which tiles vary."""
        return _GRANULE * self.blocks

    @property
    def granules(self) -> int:
        """Of the highest tile."""
        return self.tile_m // self.granule

    @property
    def granule_bytes(self) -> int:
        """Bytes of a granule of a tile of the left operand in one block."""
        return _GRANULE * K_TILE_BYTES

    @property
    def cluster_blocks(self) -> int:
        """Blocks that are launched as a cluster."""
        return self.blocks * self.multicast

    @property
    def stage_bytes(self) -> int:
        """Bytes of one tile of the left operand in one block."""
        return self.tile_m // self.blocks * K_TILE_BYTES

    @property
    def weight_stage_bytes(self) -> int:
        """Bytes of one stage of the right operand in one block."""
        return self.tile_n // self.blocks * K_TILE_BYTES * self.weight_k_tiles

    @property
    def shared_memory_bytes(self) -> int:
        """Shared memory of one block, at most."""
        stages = self.stages * self.stage_bytes + self.weight_stages * self.weight_stage_bytes
        return FIXED_BYTES + stages + self.staging_bytes

    def shared_memory_for(self, out_dtype: np.dtype) -> int:
        """Shared memory that one block is launched with: results need none, but where they are staged."""
        return self.shared_memory_bytes - (0 if self.stages_results_of(out_dtype) else self.staging_bytes)

    def stages_results_of(self, out_dtype: np.dtype) -> bool:
        """Whether results of a type leave through shared memory."""
        return self.staged and out_dtype.itemsize == 2

    @property
    def staging_bytes(self) -> int:
        """Shared memory that results leave through, in one block."""
        return 4 * STAGING_BUFFERS * STAGING_ROWS * STAGING_COLUMNS * 2 if self.staged else 0

    @property
    def rows_of_warp(self) -> int:
        """Rows of a tile that each of the four warps of the epilogue writes; 0 where it has columns."""
        return 0 if self.swapped else self.tile_m // self.blocks // 4

    @property
    def slot_columns(self) -> int:
        """Columns of the accumulator that are handed over at once."""
        if self.varying:
            return min(1 << (self.tile_m - 1).bit_length(), ATOM_COLUMNS)
        if self.swapped:
            return self.tile_m
        return ATOM_COLUMNS if self.splits_accumulator else self.tile_n

    @property
    def slots(self) -> int:
        """Parts of tensor memory that take turns: two tiles, or two halves of one, where there is room."""
        return min(2, TMEM_COLUMNS // self.slot_columns)

    @property
    def tmem_columns(self) -> int:
        """Columns of tensor memory, a power of two."""
        return max(self.slots * self.slot_columns, LEAST_TMEM_COLUMNS)

    @property
    def slots_per_tile(self) -> int:
        """Parts that make a tile, at most."""
        return 2 if self.splits_accumulator or (self.varying and self.tile_m > ATOM_COLUMNS) else 1

    @property
    def held_stages(self) -> int:
        """Stages that wait for the second half of the accumulator after they were added to the first."""
        pairs = min(self.stages // 2, self.weight_stages * self.weight_k_tiles // 2)
        return max(pairs // self.weight_k_tiles * self.weight_k_tiles, 1)
