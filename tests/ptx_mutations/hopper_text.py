"""The parts of a Hopper kernel's PTX: which warps run it, and which barrier an instruction acts on."""

from __future__ import annotations

from jax_ggemm.kernel.config import Sm90Config
from jax_ggemm.kernel.schedule import RING_DEPTH
from ptx_mutations.kernel_text import KernelText


class HopperText(KernelText):
    """The PTX of a kernel of `kernel/sm90.py`."""

    def __init__(self, ptx: str, config: Sm90Config):
        stages, ring = 8 * config.stages, 8 * RING_DEPTH
        # As in `Storage` of kernel/sm90.py.
        super().__init__(ptx, {"stage_full": stages, "stage_empty": stages, "ring_full": ring, "ring_empty": ring})
        self.config = config

    @property
    def prologue(self) -> range:
        """What all warps run first."""
        return range(self.find(r"^\{"), self.find(r"setmaxnreg\.dec"))

    @property
    def load(self) -> range:
        """What the load warp runs, from its first wait for a work tile."""
        producers = range(self.prologue.stop, self.products.start)
        return range(self.first_wait_for_work(producers), self.products.start)

    @property
    def products(self) -> range:
        """What the consumer warpgroups run."""
        return range(self.find(r"setmaxnreg\.inc"), len(self.lines))

    @property
    def tile(self) -> range:
        """What they run for a tile from its first product on: for a low one, where these have a part of their own."""
        return range(self.find(r"wgmma\.fence", self.products, -1), len(self.lines))

    @property
    def staged(self) -> range:
        """Whole tiles on their way through shared memory."""
        return range(self.find(r"stmatrix"), self.find(r"cp\.async\.bulk\.wait_group\.read\s+[1-9]", nth=-1) + 3)

    def constant(self, operand: str) -> int:
        """The same of an operand in another block of the cluster: at the same place there."""
        register, _, offset = operand.partition("+")
        for definition in self.definitions(register):
            if definition.startswith("mapa."):
                return self.constant(definition.split(", ")[1]) + (int(offset) if offset else 0)
        return super().constant(operand)
