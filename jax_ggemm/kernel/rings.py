"""Rings of barriers in shared memory, for products that one block or a pair of blocks, a team, does together."""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
from cutlass import Int32, cute, pipeline
from cutlass.cute.nvgpu import tcgen05


def writer(stages: int) -> pipeline.PipelineState:
    """Where who fills a ring starts: every stage is empty."""
    return pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, stages)


def reader(stages: int) -> pipeline.PipelineState:
    """Where who empties a ring starts: no stage is full."""
    return pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, stages)


@dataclasses.dataclass(frozen=True)
class Barriers:
    """One barrier for each stage of a ring, of which every block has its own."""

    first: cute.Pointer
    stages: int
    blocks: int
    """That work as one: 1 or 2. The first of them is the one that multiplies."""
    teams: int = 1
    """In a cluster, each of so many blocks."""

    def at(self, position: pipeline.PipelineState) -> cute.Pointer:
        """The barrier of a stage."""
        return self.first + position.index

    @cute.jit
    def create(self, arrivals: cutlass.Constexpr):
        """Sets the barriers up; run by one warp."""
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(self.stages):
                cute.arch.mbarrier_init(self.first + i, arrivals)

    @cute.jit
    def wait(self, position: pipeline.PipelineState):
        """Waits for this block's barrier."""
        cute.arch.mbarrier_wait(self.at(position), position.phase)

    @cute.jit
    def expect(self, position: pipeline.PipelineState, num_bytes: Int32):
        """Arrives, and waits for so many bytes with it; called by a warp."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.at(position), num_bytes)

    @cute.jit
    def commit(self, position: pipeline.PipelineState):
        """Arrives in every block of the team, once the products issued before are done; called by a warp."""
        mask: Any = None
        if cutlass.const_expr(self.blocks == 2):
            mask = 0b11 << self._first()
        self._commit(position, mask)

    @cute.jit
    def commit_to_cluster(self, position: pipeline.PipelineState):
        """The same, in every block of the cluster."""
        if cutlass.const_expr(self.teams == 1):
            self.commit(position)
        else:
            self._commit(position, 2 ** (self.blocks * self.teams) - 1)

    @cute.jit
    def _commit(self, position: pipeline.PipelineState, mask: Any):
        group = tcgen05.CtaGroup.TWO if self.blocks == 2 else tcgen05.CtaGroup.ONE
        with cute.arch.elect_one():
            tcgen05.commit(self.at(position), mask, group)

    def _first(self) -> Any:
        """The place in the cluster of the block that multiplies."""
        if self.teams == 1:
            return 0
        return cute.arch.block_idx()[0] % (self.blocks * self.teams) // self.blocks * self.blocks

    @cute.jit
    def arrive_at_first(self, position: pipeline.PipelineState):
        """Arrives in the block that multiplies; called by a warp."""
        with cute.arch.elect_one():
            if cutlass.const_expr(self.blocks == 2):
                cute.arch.mbarrier_arrive(self.at(position), self._first())
            else:
                cute.arch.mbarrier_arrive(self.at(position))
