"""The parts of the PTX of the small tcgen05 product that is the emulator's own test bed."""

from __future__ import annotations

from ptx_mutations.kernel_text import KernelText

_STAGES = 2


class Tcgen05Text(KernelText):
    """The PTX of testbeds/tcgen05_gemm.py, which has no scheduler and no ring of work tiles."""

    def __init__(self, ptx: str, ctas: int):
        # As in its `Storage`.
        super().__init__(ptx, {"stage_full": 8 * _STAGES, "stage_empty": 8 * _STAGES, "done": 8})
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
        return range(self.prologue.stop, self.products.start)

    @property
    def products(self) -> range:
        """What the warp that multiplies runs."""
        wait = self.find(r"mbarrier\.try_wait", range(self.find(r"tcgen05\.mma")), -1)
        return range(self.block(wait).start, self.find(r"tcgen05\.commit", nth=-1) + 1)

    @property
    def store(self) -> range:
        """What the warps that write run, and the end of all."""
        return range(self.products.stop, len(self.lines))
