"""The parts of the PTX of the small tcgen05 product that is the emulator's own test bed."""

from __future__ import annotations

import re

from ptx_mutations.text import NotFoundError, Text

_BARRIER_OPERAND = re.compile(r"\[(%\w+(?:\+\d+)?)\]")
_BARRIERS = {"full": range(16), "empty": range(16, 32), "done": range(32, 40)}
"""As in `Storage` of testbeds/tcgen05_gemm.py: two stages."""


class Tcgen05Text(Text):
    """The PTX of testbeds/tcgen05_gemm.py."""

    def __init__(self, ptx: str, ctas: int):
        super().__init__(ptx)
        self.ctas = ctas

    @property
    def meeting(self) -> str:
        """Where all threads meet: matches the instruction that waits."""
        return r"barrier\.cluster\.wait" if self.ctas == 2 else r"bar\.sync\s+0;"

    @property
    def prologue(self) -> range:
        """What all warps run first."""
        return range(self.find(r"^\{"), self.find(self.meeting) + 1)

    @property
    def load(self) -> range:
        """What the load warp runs."""
        return range(self.prologue.stop, self.multiply.start)

    @property
    def multiply(self) -> range:
        """What the warp that multiplies runs."""
        mma = self.find(r"tcgen05\.mma")
        wait = self.find(r"mbarrier\.try_wait", range(mma), -1)
        return range(self._block(wait).start, self.find(r"tcgen05\.commit", nth=-1) + 1)

    @property
    def store(self) -> range:
        """What the warps that write run, and the end of all."""
        return range(self.multiply.stop, len(self.lines))

    def barrier(self, line: int) -> str | None:
        """Which barriers the operand of an instruction is one of."""
        match = _BARRIER_OPERAND.search(self.lines[line].split("mbarrier", 1)[-1])
        if match is None:
            return None
        place = self.constant(match.group(1))
        return next((name for name, where in _BARRIERS.items() if place in where), None)

    def on_barrier(self, pattern: str, barrier: str, part: range, nth: int = 0) -> int:
        """The nth instruction of a part that matches and acts on such a barrier."""
        lines = [i for i in self.all(pattern, part) if self.barrier(i) == barrier]
        if nth >= len(lines):
            raise NotFoundError(f"{len(lines)} {pattern} on {barrier} here, none is number {nth}")
        return lines[nth]
