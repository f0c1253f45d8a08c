"""Rings of barriers in shared memory, for products that one block or a pair of blocks shares."""

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
        """Arrives in every block, once the products issued before are done; called by a warp."""
        mask: Any = None
        group = tcgen05.CtaGroup.ONE
        if cutlass.const_expr(self.blocks == 2):
            mask, group = 0b11, tcgen05.CtaGroup.TWO
        with cute.arch.elect_one():
            tcgen05.commit(self.at(position), mask, group)

    @cute.jit
    def arrive_at_first(self, position: pipeline.PipelineState):
        """Arrives in the block that multiplies; called by a warp."""
        with cute.arch.elect_one():
            if cutlass.const_expr(self.blocks == 2):
                cute.arch.mbarrier_arrive(self.at(position), 0)
            else:
                cute.arch.mbarrier_arrive(self.at(position))
