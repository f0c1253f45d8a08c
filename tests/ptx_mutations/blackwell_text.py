"""The parts of a Blackwell kernel's PTX: which warps run it, and which barrier an instruction acts on."""

from __future__ import annotations

import re

from jax_ggemm.kernel.config_sm100 import Sm100Config
from jax_ggemm.kernel.schedule import FIELDS, RING_DEPTH
from ptx_mutations.kernel_text import KernelText


class BlackwellText(KernelText):
    """The PTX of a kernel of `kernel/sm100.py`."""

    def __init__(self, ptx: str, config: Sm100Config):
        stages, slots, ring = 8 * config.stages, 8 * config.slots, 8 * RING_DEPTH
        # As in `Storage` of kernel/sm100.py.
        barriers = {"stage_full": stages, "stage_empty": stages, "weights_empty": 8 * config.weight_stages}
        barriers |= {"slot_full": slots, "slot_empty": slots, "ring_full": ring, "ring_empty": ring}
        if config.dynamic:
            # Work tiles, from a multiple of 16 on, and the address of tensor memory are between.
            barriers["none"] = -sum(barriers.values()) % 16 + 4 * FIELDS * RING_DEPTH + 4
            barriers |= {"answered": 8, "ready": 8}
        super().__init__(ptx, barriers)
        self.config = config

    @property
    def prologue(self) -> range:
        """What all warps run first."""
        meeting = r"barrier\.cluster\.wait" if self.config.cluster_blocks > 1 else r"bar\.sync\s+0;"
        return range(self.find(r"^\{"), self.find(meeting) + 1)

    @property
    def load(self) -> range:
        """What the load warp runs, from its first wait for a work tile."""
        loads = self.find(r"cp\.async\.bulk\.tensor")
        before = [i for i in self.all(r"mbarrier\.try_wait", range(loads)) if self.barrier(i) == "ring_full"]
        return range(self.block(before[-1]).start, self.products.start)

    @property
    def products(self) -> range:
        """What the warp that multiplies runs."""
        product = self.find(r"tcgen05\.mma")
        before = [i for i in self.all(r"mbarrier\.try_wait", range(product)) if self.barrier(i) == "ring_full"]
        return range(self.block(before[-1]).start, self.epilogue.start)

    @property
    def epilogue(self) -> range:
        """What the warps run that write."""
        reads = self.find(r"tcgen05\.ld")
        before = [i for i in self.all(r"mbarrier\.try_wait", range(reads)) if self.barrier(i) == "ring_full"]
        return range(self.block(before[-1]).start, len(self.lines))

    def commit(self, barrier: str, nth: int = 0) -> int:
        """The nth commit of the products that arrives at such a barrier."""
        return self.on_barrier(r"tcgen05\.commit", barrier, self.products, nth)

    def tell_one_block(self, commit: int) -> None:
        """Lets a commit to both blocks of a pair arrive at the first one alone."""
        self.substitute(self.find(rf"mov\.b16\s+{self.last_operand(commit)}, 3;", self.products), r"3;", "1;")


def out_of_order(ptx: str, blocks: int) -> str:
    """A dynamic kernel for which neighbouring clusters have changed places, two by two: their number must be even."""
    first = re.compile(r"(mov\.u32\s+(%r\d+), %ctaid\.x;)")
    taken = re.compile(r"(@taken clusterlaunchcontrol\.query_cancel\.get_first_ctaid\S+ (%r\d+), answer;)")
    for pattern, guard in ((first, ""), (taken, "@taken ")):
        ptx, found = pattern.subn(rf"\1 {guard}xor.b32 \2, \2, {blocks};", ptx)
        assert found
    return ptx
