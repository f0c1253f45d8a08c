"""The tile scheduler that takes tiles as multiprocessors become free: Blackwell's cluster launch control.

As many clusters of blocks are launched as there can be tiles: the sizes of the groups are not known on the host. The
first ones start, one on each multiprocessor or pair of them, each with the tile of its number. When there is room for
one more tile in the ring of work tiles, the scheduler asks for a cluster that has not started: that one will never
start, and its number is the next tile. Where a number is past the last tile, there is nothing to do for it.

A cluster of blocks asks once, and each gets the answer. Each has said before that there is room for it:

    answered   of each block: 1, and the 16 bytes of an answer
    ready      of the first block of a cluster: 2 or 4, one from the scheduler's warp of each block

An answer may name any cluster that has not started. They come in order, most likely; where one does not, the walk over
the groups begins again.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
from cutlass import Int32, cute, pipeline
from cutlass._mlir.dialects.nvvm import MemScopeKind

from jax_ggemm.kernel import rings
from jax_ggemm.kernel.config import ceil_div
from jax_ggemm.kernel.rings import Barriers
from jax_ggemm.kernel.schedule import FIELDS, MAX_TILES, Extents, Scheduler, WorkRing, WorkTile

BARRIERS = 2
ANSWER_BYTES = 16

_NONE = 2**31 - 1
"""In place of a cluster's number: all have started."""

_BEHIND = MAX_TILES
"""Is added to a number that is smaller than the one before, which ends a walk over the groups."""

_READ = """{
.reg .b64 low, high;
.reg .b128 answer;
.reg .pred taken;
ld.shared.v2.b64 {low, high}, [{$r0}];
mov.b128 answer, {low, high};
clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 taken, answer;
mov.b32 {$w0}, -1;
@taken clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 {$w0}, answer;
}"""
"""The first block of the cluster that was taken, or -1: an answer that is none has no number in it."""


@dataclasses.dataclass(frozen=True)
class Requests:
    """Where answers come, in one block."""

    answer: cute.Pointer
    """ANSWER_BYTES in shared memory."""
    answered: Barriers
    ready: Barriers

    @staticmethod
    def create(answer: cute.Pointer, barriers: cute.Pointer, blocks: int) -> Requests:
        """Sets nothing up: `initialise` does.

        Args:
          answer: ANSWER_BYTES in shared memory.
          barriers: BARRIERS in shared memory.
          blocks: of a cluster.
        """
        return Requests(answer, Barriers(barriers, 1, blocks), Barriers(barriers + 1, 1, blocks))

    @cute.jit
    def initialise(self):
        """Sets the barriers up; run by one warp."""
        self.answered.create(1)
        self.ready.create(self.ready.blocks)

    @cute.jit
    def ask(self, position: pipeline.PipelineState) -> Int32:
        """The number of a cluster that will not start, or `_NONE`; called by one warp of each block.

        Args:
          position: in a ring of one answer. Nothing is asked after `_NONE`.
        """
        blocks = self.ready.blocks
        self.answered.expect(position, Int32(ANSWER_BYTES))
        if cutlass.const_expr(blocks == 1):
            self._request()
        else:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(self.ready.first, 0, scope=MemScopeKind.CLUSTER)
            if cute.arch.block_idx()[0] % blocks == 0:
                self.ready.wait(position)
                self._request()
        self.answered.wait(position)
        first = cute.arch.inline_ptx(_READ, write_only_types=[Int32], read_only_args=[self.answer.toint()])
        # It has been read before the next one is written, by another proxy.
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        return first // blocks if first >= 0 else Int32(_NONE)

    @cute.jit
    def _request(self):
        with cute.arch.elect_one():
            cute.arch.issue_clc_query(self.answered.first, self.answer, multicast=self.ready.blocks > 1)


@cute.jit
def _number(deal: Int32) -> Int32:
    """Of a deal that may be `_BEHIND`."""
    return deal - _BEHIND if deal >= _BEHIND and deal < _NONE else deal


class DynamicScheduler(Scheduler):
    """Takes tiles of all groups, one at a time, each when there is room for it."""

    def grid(self, e: Extents) -> Any:
        """As many blocks as there can be work for.

        Where rows are ragged, `used` groups at most have rows, the one of the rows of no group among them. Each of
        those has one row for its first tile, and whoever gets `tile_m` more, one more tile.
        """
        n_tiles, _ = self._limits(e)
        if cutlass.const_expr(self.ragged_rows):
            used = cutlass.min(e.groups + 1, e.m)
            m_tiles = used + (e.m - used) // self.config.tile_m
        else:
            m_tiles = e.weights * ceil_div(e.k, self.config.tile_m)
        return cutlass.max(m_tiles * n_tiles * e.batch, 1) * self.blocks

    @cute.jit
    def take(self, groups: tuple, e: Extents, ring: WorkRing, requests: Requests):
        """Puts tiles into the ring, as long as there are any, then one with negative k_tiles; run by one warp."""
        limits = (*self._limits(e), Int32(0))
        block, _, _ = cute.arch.block_idx()
        next_deal = block // self.blocks
        state, asked = ring.writer(), rings.reader(1)
        while next_deal < _NONE:
            state, next_deal, asked, deals = self._deal(groups, e, limits, ring, (state, next_deal, asked), requests)
            next_deal = _number(next_deal)
            # Past the last tile. Others may lie before it, all the same.
            while next_deal >= deals and next_deal < _NONE:
                next_deal, asked = self._next(next_deal, asked, requests, (ring, state))
                next_deal = _number(next_deal)
        ring.put(state, WorkTile(*(Int32(-1) for _ in range(FIELDS))))

    @cute.jit
    def _next(self, deal: Int32, count: pipeline.PipelineState, source: Requests, to: tuple) -> tuple:
        ring, position = to
        # Not earlier: what is taken cannot go to another multiprocessor that is free before this one.
        ring.make_room(position)
        answer = source.ask(count)
        count.advance()
        return answer + _BEHIND if answer < deal else answer, count
