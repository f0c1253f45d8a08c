"""The tile scheduler of the persistent kernels: from group sizes to tiles of the result, with no tensor in it.

One warp of each block runs it. It finds the groups' boundaries itself, 32 groups at a time: each lane takes a
group, and two scans over the warp give the rows and the tiles that come before it. A ballot then finds the group of
a tile. The tiles go to the block's other warps through a ring in shared memory.

A batch (of `vmap`) is a longer list of groups: each batch element has its own sizes, which end at its own row m.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
from cutlass import Int32, Int64, cute, pipeline

from jax_ggemm.kernel.config import TILE_K, Sm90Config, ceil_div, place_in_group
from jax_ggemm.kernel.config_sm100 import Sm100Config
from jax_ggemm.products import Product

WARP = 32
FIELDS = 9
"""int32 fields of a work tile."""

ALONE, RECEIVES, SENDS, TOGETHER, SILENT = range(5)
"""The role of a block in a tile: it has the tile to itself, or shares its contraction with the other of its pair, or
its tile of rhs: TOGETHER, and SILENT, if the other writes the result."""

_SHARED_DEPTH = 8 * TILE_K
"""Rows of a group below which its contraction is not shared: passing the sums on takes as long as two stages."""

_SHARE_OF_LOAD = 4
"""A group's contraction is shared where it is more than one part in so many of what each multiprocessor multiplies."""

MAX_TILES = 2**30
"""A call has fewer."""


@dataclasses.dataclass(frozen=True)
class WorkTile:
    """One tile of the result."""

    k_tiles: Any
    """Tiles of the contraction: 0 where the result is zeros, negative after the last tile."""
    column: Any
    """First column of the tile: of rhs, and of the result."""
    a_row: Any
    """Where rows are ragged, the tile's first row of lhs. Where they are contracted, the group's."""
    b_row: Any
    """Where rows are ragged, the weight matrix in rhs. Where they are contracted, the group's first row of rhs."""
    out_row: Any
    """Where rows are ragged, the tile's first row of the result. Where they are contracted, its matrix."""
    rows: Any
    """Rows of the result that the tile may write."""
    a_column: Any
    """Where rows are contracted: the first column of lhs, which is the first row in the matrix of the result."""
    depth: Any
    """Where rows are contracted: the rows of the group. Otherwise the row of bias."""
    role: Any
    """ALONE, RECEIVES, SENDS, TOGETHER or SILENT."""

    def values(self) -> tuple[Any, ...]:
        """The fields, in the order of the ring."""
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))


@dataclasses.dataclass(frozen=True)
class Extents:
    """The run-time values that a call is described by."""

    m: Any
    """Rows of one batch element."""
    k: Any
    n: Any
    groups: Any
    weights: Any
    batch: Any
    lhs_step: Any
    """Rows of lhs from one batch element to the next: m, or 0 where lhs is not batched."""
    rhs_step: Any
    """Matrices (rows where they are contracted) of rhs from one batch element to the next, or 0."""
    bias_step: Any
    """Rows of bias from one batch element to the next, or 0."""
    multiprocessors: Any
    """As many blocks are launched."""

    COUNT = 10


@cute.jit
def inclusive_scan(value: Int32, limit: Int32) -> Int32:
    """The running sum over the lanes of a warp, saturating at `limit`; values lie in [0, limit], limit <= 2^30."""
    lane = cute.arch.lane_idx()
    for step in cutlass.range_constexpr(5):
        before = cute.arch.shuffle_sync_up(value, 1 << step)
        if lane >= (1 << step):
            value = cutlass.min(value + before, limit)
    return value


RING_DEPTH = 3
"""Work tiles that the scheduler is ahead by."""


@dataclasses.dataclass(frozen=True)
class WorkRing:
    """Work tiles on their way from the scheduler's warp to the other warps of the block."""

    slots: cute.Tensor
    """(FIELDS, RING_DEPTH) int32 in shared memory."""
    pipeline: pipeline.PipelineAsync

    @staticmethod
    def create(slots: cute.Tensor, barriers: cute.Pointer, reader_warps: int) -> WorkRing:
        """Sets the barriers up; every thread of the block calls it."""
        return WorkRing(
            slots,
            pipeline.PipelineAsync.create(
                barrier_storage=barriers,
                num_stages=RING_DEPTH,
                producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 1),
                consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, reader_warps),
                defer_sync=True,
            ),
        )

    @staticmethod
    def writer() -> pipeline.PipelineState:
        """Where the scheduler's warp starts to write."""
        return pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, RING_DEPTH)

    @staticmethod
    def reader() -> pipeline.PipelineState:
        """Where the other warps start to read."""
        return pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, RING_DEPTH)

    @cute.jit
    def make_room(self, state: pipeline.PipelineState):
        """Waits until there is room for a tile; called by all lanes of a warp."""
        self.pipeline.producer_acquire(state)

    @cute.jit
    def put(self, state: pipeline.PipelineState, tile: WorkTile):
        """Writes a tile; called by all lanes of a warp."""
        self.make_room(state)
        values = tile.values()
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(len(values)):
                self.slots[i, state.index] = Int32(values[i])
            self.pipeline.producer_commit(state)

    @cute.jit
    def get(self, state: pipeline.PipelineState) -> WorkTile:
        """Reads the next tile; called by all lanes of a warp."""
        self.pipeline.consumer_wait(state)
        tile = WorkTile(*(self.slots[i, state.index] for i in range(FIELDS)))
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            self.pipeline.consumer_release(state)
        return tile


class Scheduler:
    """Deals the tiles of all groups out to the blocks of the grid, round robin.

    Pairs of blocks (`cluster` = 2) are dealt two tiles of a group at a time. Where one is below the other, both read
    the same tile of rhs. Of an odd number of tiles, the last is dealt twice, and written once. Where rows are
    contracted, a pair may be dealt one tile, whose contraction they share: that of a group with so many rows that its
    tiles would keep some blocks busy while others are done. Such groups come first.
    """

    def __init__(
        self, config: Sm90Config | Sm100Config, product: Product, tile_k: int = TILE_K, blocks: int = 1, tiles: int = 1
    ):
        self.config = config
        self.tile_k = tile_k
        self.blocks = blocks  # that are dealt to as one
        self.tiles = tiles  # side by side along n, that are dealt as one, each to as many of these blocks
        self.columns = config.tile_n * tiles
        self.ragged_rows = product.rows_are_ragged
        self.columns_are_n = product is not Product.DLHS
        self.pairs = config.cluster == 2
        self.shares = self.pairs and not self.ragged_rows
        self.granule = config.granule if isinstance(config, Sm100Config) and config.varying else 0

    @cute.jit
    def run(self, sizes: cute.Pointer, offsets: cute.Pointer, extents: Extents, ring: WorkRing):
        """Puts each tile of this block into the ring, then one with negative k_tiles; run by one warp."""
        limits = self._limits(extents)
        cluster = self.config.cluster
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        if cutlass.const_expr(self.blocks > 1):
            block //= self.blocks
            blocks //= self.blocks
        first, rank, stride = block // cluster, block % cluster, blocks // cluster
        at = (ring.writer(), first, Int32(0))
        state, _, _, _ = self._deal((sizes, offsets), extents, (*limits, rank), ring, at, stride)
        ring.put(state, WorkTile(*(Int32(-1) for _ in range(FIELDS))))

    @cute.jit
    def _limits(self, e: Extents) -> tuple:
        """The tiles along n, and the rows from which on a group is shared."""
        n_tiles = ceil_div(e.n if cutlass.const_expr(self.columns_are_n) else e.k, self.columns)
        return n_tiles, self._shared_from(e, n_tiles)

    @cute.jit
    def _deal(self, groups: tuple, e: Extents, limits: tuple, ring: WorkRing, at: tuple, source: Any) -> tuple:
        """Puts tiles into the ring, from group to group, until the next deal is past the last.

        Args:
          groups: pointers to their sizes and to group_offset.
          e: of the call.
          limits: `_limits`, and which block of a pair that shares this one is.
          ring: where to.
          at: (position in the ring, the next deal, what `_next` counts).
          source: of further deals, for `_next`.

        Returns:
          `at`, and how many deals there are up to where this ended.
        """
        sizes, offsets = groups
        n_tiles, shared_from, rank = limits
        state, next_deal, count = at
        passes = 2 if self.shares else 1
        deals_before = Int32(0)
        element = Int32(0)
        # Over all batch elements: first their shared groups, where there are any, then the others.
        while element < e.batch * passes:
            sharing = element < e.batch * (passes - 1)
            of_batch = element % e.batch
            offset, first, last = self._range(offsets, e, of_batch)
            rows_before = Int32(0)
            while first < last:
                start, end, weight, m_tiles = self._groups(sizes, e, of_batch, first, offset, rows_before)
                deals = self._deals(m_tiles * n_tiles, end - start >= shared_from, sharing)
                deals_end = inclusive_scan(deals, Int32(MAX_TILES)) + deals_before
                chunk_end = cute.arch.shuffle_sync(deals_end, WARP - 1)
                while next_deal < chunk_end:
                    # deals_end grows from lane to lane: the deal belongs to the first one that it is below.
                    owner = WARP - cute.arch.popc(cute.arch.vote_ballot_sync(next_deal < deals_end))
                    g_start = cute.arch.shuffle_sync(start, owner)
                    g_rows = cute.arch.shuffle_sync(end, owner) - g_start
                    g_weight = cute.arch.shuffle_sync(weight, owner)
                    g_m_tiles = cute.arch.shuffle_sync(m_tiles, owner)
                    index = next_deal - cute.arch.shuffle_sync(deals_end, owner) + cute.arch.shuffle_sync(deals, owner)
                    group = (g_start, g_rows, g_weight)
                    if cutlass.const_expr(self.pairs):
                        tile = self._one_of_two(e, of_batch, group, (index, g_m_tiles, n_tiles), (rank, sharing))
                    else:
                        place = place_in_group(index, g_m_tiles, n_tiles, self.config.swizzle, cutlass.min)
                        tile = self._work_tile(e, of_batch, group, place)
                    ring.put(state, tile)
                    state.advance()
                    next_deal, count = self._next(next_deal, count, source, (ring, state))
                rows_before = cute.arch.shuffle_sync(end, WARP - 1)
                deals_before = chunk_end
                first += WARP
            element += 1
        return state, next_deal, count, deals_before

    @cute.jit
    def _next(self, deal: Int32, count: Any, source: Any, to: tuple) -> tuple:
        """The deal after one, and the new count: here `source` is the number of those who are dealt to.

        Args:
          deal: the one before.
          count: of what the source has given.
          source: of deals.
          to: (ring, position), where the next tile is put.
        """
        return deal + source, count

    @cute.jit
    def _range(self, offsets: cute.Pointer, e: Extents, element: Int32) -> tuple:
        """The group that the first weights belong to; the first group to deal out, and the end of them."""
        # Groups whose weights are held are those from `offset` on. They may reach past either end of the
        # list: those are empty, and their dW is zeros. Clamping changes none that is in the list.
        offset = cute.make_tensor(offsets + element, cute.make_layout(1))[0]
        offset = cutlass.max(cutlass.min(offset, e.groups), -e.weights)
        # Rows past the last group are one more group, without weights.
        first = Int32(0)
        last = e.groups + 1
        if cutlass.const_expr(not self.ragged_rows):
            first = cutlass.min(offset, 0)
            last = cutlass.max(offset + e.weights, e.groups)
        return offset, first, last

    @cute.jit
    def _deals(self, tiles: Int32, shared: cutlass.Boolean, sharing: cutlass.Boolean) -> Int32:
        """How many times the tiles of a group are dealt, now that only groups to share are, or only the others."""
        deals = tiles
        if cutlass.const_expr(self.pairs):
            if not sharing:
                deals = ceil_div(tiles, 2)
            if cutlass.const_expr(self.shares) and sharing != shared:
                deals = Int32(0)
        return deals

    @cute.jit
    def _one_of_two(self, e: Extents, element: Int32, group: tuple, at: tuple, of_pair: tuple) -> WorkTile:
        """This block's tile of the two that a pair is dealt, or its half of the one whose contraction they share.

        Both blocks have as many tiles of the contraction: their stages stay in step, and each may fill the other's.

        Args:
          e: of the call.
          element: of the batch.
          group: (first row, rows, weight matrix).
          at: (the deal's index in the group, tiles of the group along m, along n).
          of_pair: (which block of it this one is, whether the contraction is shared).
        """
        index, m_tiles, n_tiles = at
        rank, sharing = of_pair
        first = index if sharing else 2 * index
        second = first if sharing else cutlass.min(first + 1, m_tiles * n_tiles - 1)
        upper = place_in_group(first, m_tiles, n_tiles, self.config.swizzle, cutlass.min)
        lower = place_in_group(second, m_tiles, n_tiles, self.config.swizzle, cutlass.min)
        role = Int32(TOGETHER) if upper[1] == lower[1] else Int32(ALONE)
        if rank == 1 and first == second:
            role = Int32(SILENT)
        tile = self._work_tile(e, element, group, lower if rank == 1 else upper)
        tile = dataclasses.replace(tile, role=role)
        if cutlass.const_expr(self.shares):
            tile = self._half(tile, rank, sharing)
        return tile

    @cute.jit
    def _shared_from(self, e: Extents, n_tiles: Int32) -> Int32:
        """The rows from which on a group's contraction is shared."""
        tiles = Int64(ceil_div(e.k, self.config.tile_m)) * Int64(n_tiles)
        of_load = tiles * Int64(e.m) * Int64(e.batch) // Int64(_SHARE_OF_LOAD * e.multiprocessors)
        return Int32(cutlass.max(cutlass.min(of_load, Int64(MAX_TILES)), Int64(_SHARED_DEPTH)))

    @cute.jit
    def _half(self, tile: WorkTile, rank: Int32, sharing: cutlass.Boolean) -> WorkTile:
        """The half of a tile's contraction that this block of a pair multiplies, or the tile where it is not shared."""
        k_tiles, depth, skipped, role = tile.k_tiles, tile.depth, Int32(0), tile.role
        if sharing:
            # The second half may be shorter by one tile, whose rows are then out of bounds: zeros.
            k_tiles = ceil_div(k_tiles, 2)
            if rank == 0:
                role = Int32(RECEIVES)
                depth = k_tiles * self.tile_k
            else:
                role = Int32(SENDS)
                skipped = k_tiles * self.tile_k
                depth -= skipped
        return dataclasses.replace(
            tile, k_tiles=k_tiles, a_row=tile.a_row + skipped, b_row=tile.b_row + skipped, depth=depth, role=role
        )

    @cute.jit
    def _groups(
        self, sizes: cute.Pointer, e: Extents, element: Int32, first: Int32, offset: Int32, rows_before: Int32
    ) -> tuple:
        """The group of each lane: its first and end row, its weight matrix (or -1), and its tiles along m."""
        lane = cute.arch.lane_idx()
        group = first + lane
        size = Int32(0)
        if group >= 0 and group < e.groups:
            at = Int64(element) * Int64(e.groups) + Int64(group)
            size = cute.make_tensor(sizes + at, cute.make_layout(1))[0]
            size = cutlass.max(cutlass.min(size, e.m), 0)
        weight = group - offset
        held = weight >= 0 and weight < e.weights
        if cutlass.const_expr(self.ragged_rows):
            held = held and group < e.groups
            size = e.m if group == e.groups else size
        end = cutlass.min(inclusive_scan(size, e.m) + rows_before, e.m)
        start = cute.arch.shuffle_sync_up(end, 1)
        start = rows_before if lane == 0 else start
        weight = weight if held else Int32(-1)
        if cutlass.const_expr(self.ragged_rows):
            m_tiles = ceil_div(end - start, self.config.tile_m)
        else:
            m_tiles = ceil_div(e.k, self.config.tile_m) if held else Int32(0)
        return start, end, weight, m_tiles

    @cute.jit
    def _height(self, rows: Int32) -> Any:
        """Rows of the tiles of a group, but for its last one.

        Tiles that vary are as even as can be. A whole one and a short one, by turns, would go to the same two blocks
        again and again.
        """
        height = self.config.tile_m
        if cutlass.const_expr(self.granule > 0):
            tiles = cutlass.max(ceil_div(rows, self.config.tile_m), 1)
            height = ceil_div((rows + tiles - 1) // tiles, self.granule) * self.granule
        return height

    @cute.jit
    def _work_tile(self, e: Extents, element: Int32, group: tuple, place: tuple) -> WorkTile:
        """The tile at `place`, in tiles, of a group (first row, rows, weight matrix)."""
        start, rows, weight = group
        height = self._height(rows)
        down = place[0] * height
        column = place[1] * self.columns
        if cutlass.const_expr(self.tiles > 1):
            # There may be nothing left for the last ones: their columns lie past the last of the result.
            rank = cute.arch.block_idx()[0] % self.blocks
            column += rank // (self.blocks // self.tiles) * self.config.tile_n
        if cutlass.const_expr(not self.ragged_rows):
            return WorkTile(
                k_tiles=ceil_div(rows, self.tile_k),
                column=column,
                a_row=element * e.lhs_step + start,
                b_row=element * e.rhs_step + start,
                out_row=element * e.weights + weight,
                rows=cutlass.min(e.k - down, self.config.tile_m),
                a_column=down,
                depth=rows,
                role=Int32(ALONE),
            )
        contracted = e.k if cutlass.const_expr(self.columns_are_n) else e.n
        return WorkTile(
            k_tiles=ceil_div(contracted, self.tile_k) if weight >= 0 else Int32(0),
            column=column,
            a_row=element * e.lhs_step + start + down,
            b_row=element * e.rhs_step + weight,
            out_row=element * e.m + start + down,
            rows=cutlass.min(rows - down, height),
            a_column=Int32(0),
            depth=element * e.bias_step + weight,
            role=Int32(ALONE),
        )
