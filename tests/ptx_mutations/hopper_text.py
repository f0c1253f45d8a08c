"""The parts of a Hopper kernel's PTX: which warps run it, and which barrier an instruction acts on."""

from __future__ import annotations

import re

from jax_ggemm.kernel.config import Sm90Config
from jax_ggemm.kernel.schedule import RING_DEPTH
from ptx_mutations.text import NotFoundError, Text

_BARRIER_OPERAND = re.compile(r"mbarrier\.[\w.:]+\s.*?\[(%\w+(?:\+\d+)?)\]")


class HopperText(Text):
    """The PTX of a kernel of `kernel/sm90.py`."""

    def __init__(self, ptx: str, config: Sm90Config):
        super().__init__(ptx)
        stages = 8 * config.stages
        ring = 8 * RING_DEPTH
        # As in `Storage` of kernel/sm90.py: full, then empty ones.
        starts = {"stage_full": 0, "stage_empty": stages, "ring_full": 2 * stages, "ring_empty": 2 * stages + ring}
        self._barriers = {
            name: range(start, start + (ring if "ring" in name else stages)) for name, start in starts.items()
        }
        self.config = config

    # Lines move when instructions are inserted: parts are looked up anew each time.
    @property
    def producers(self) -> range:
        """What the first warpgroup runs."""
        return range(self.find(r"setmaxnreg\.dec"), self.find(r"setmaxnreg\.inc"))

    @property
    def prologue(self) -> range:
        """What all warps run first."""
        return range(self.find(r"^\{"), self.producers.start)

    @property
    def load(self) -> range:
        """What the load warp runs: from its first wait for a work tile."""
        lines = [i for i in self.producers if self.barrier(i) == "ring_full" and "try_wait" in self.lines[i]]
        if not lines:
            raise NotFoundError("no wait for a work tile before the consumers' part")
        return range(self._block(lines[0]).start, self.producers.stop)

    @property
    def scheduler(self) -> range:
        """What the scheduler warp runs."""
        result = range(self.producers.start, self.load.start)
        self.find(r"vote\.sync\.ballot", result)
        return result

    @property
    def products(self) -> range:
        """What the consumer warpgroups run."""
        return range(self.producers.stop, len(self.lines))

    @property
    def staged(self) -> range:
        """Whole tiles on their way through shared memory."""
        return range(self.find(r"stmatrix"), self.find(r"cp\.async\.bulk\.wait_group\.read\s+[1-9]", nth=-1) + 3)

    def barrier(self, line: int) -> str | None:
        """Which barriers the operand of an mbarrier instruction is one of."""
        match = _BARRIER_OPERAND.search(self.lines[line])
        if match is None:
            return None
        place = self.constant(match.group(1))
        return next((name for name, where in self._barriers.items() if place in where), None)

    def on_barrier(self, pattern: str, barrier: str, part: range, nth: int = 0) -> int:
        """The nth mbarrier instruction of a part that matches and acts on such a barrier."""
        lines = [i for i in self.all(pattern, part) if self.barrier(i) == barrier]
        try:
            return lines[nth]
        except IndexError:
            raise NotFoundError(f"{len(lines)} {pattern} on {barrier} here, none is number {nth}") from None

    def wait(self, barrier: str, part: range, nth: int = 0) -> int:
        """The nth wait of a part for such a barrier."""
        return self.on_barrier(r"mbarrier\.try_wait", barrier, part, nth)

    def arrive(self, barrier: str, part: range, nth: int = 0) -> int:
        """The nth arrival of a part at such a barrier."""
        return self.on_barrier(r"mbarrier\.arrive\.", barrier, part, nth)

    def set_count(self, barrier: str, change: int) -> None:
        """Changes the number of arrivals that the barriers of a kind expect."""
        lines = [i for i in self.all(r"mbarrier\.init", self.prologue) if self.barrier(i) == barrier]
        registers = {re.search(r", (%\w+);", self.lines[i]).group(1) for i in lines}  # type: ignore[union-attr]
        if len(registers) != 1:
            raise NotFoundError(f"the barriers {barrier} are not initialised from one register: {registers}")
        (register,) = registers
        place = self.find(rf"mov\.b32\s+{register}, \d+;", self.prologue)
        count = int(self.last_operand(place))
        self.insert(lines[0], f"mov.b32 	%mutant, {count + change};")
        self.declare_mutant()
        for i in lines:
            self.substitute(i + 2, rf", {register};", ", %mutant;")
