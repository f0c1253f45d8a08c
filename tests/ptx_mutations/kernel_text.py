"""The parts that all grouped kernels have in common: a scheduler, a load warp, products, and barriers between them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ptx_mutations.text import NotFoundError, Text

_OPERAND = re.compile(r"(?:mbarrier\.[\w.:]+|tcgen05\.commit\.[\w.:]+)\s.*?\[(%\w+(?:\+\d+)?)\]")


class KernelText(Text):
    """The PTX of a grouped kernel.

    Args:
      ptx: the text.
      barriers: bytes of shared memory that barriers of each kind have; kinds that all have: ring_full, ring_empty,
        stage_full, stage_empty.
    """

    def __init__(self, ptx: str, barriers: Mapping[str, int]):
        super().__init__(ptx)
        self.barriers: dict[str, range] = {}
        place = 0
        for name, size in barriers.items():
            self.barriers[name] = range(place, place + size)
            place += size

    # Lines move when instructions are inserted: parts are looked up anew each time.
    @property
    def prologue(self) -> range:
        """What all warps run first."""
        raise NotImplementedError

    @property
    def load(self) -> range:
        """What the load warp runs, from its first wait for a work tile."""
        raise NotImplementedError

    @property
    def products(self) -> range:
        """What the warps run that multiply."""
        raise NotImplementedError

    @property
    def scheduler(self) -> range:
        """What the scheduler warp runs."""
        result = range(self.prologue.stop, self.load.start)
        self.find(r"vote\.sync\.ballot", result)
        return result

    def first_wait_for_work(self, part: range) -> int:
        """Where a role begins that reads work tiles."""
        return self.block(self.wait("ring_full", part)).start

    def barrier(self, line: int) -> str | None:
        """Which barriers the operand of an instruction is one of."""
        match = _OPERAND.search(self.lines[line])
        if match is None:
            return None
        place = self.constant(match.group(1))
        return next((name for name, where in self.barriers.items() if place in where), None)

    def on_barrier(self, pattern: str, barrier: str, part: range, nth: int = 0) -> int:
        """The nth instruction of a part that matches and acts on such a barrier."""
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

    def parity(self, wait: int) -> str:
        """The register with the parity of a wait."""
        return self.lines[wait].split("],")[1].split(",")[0].strip()

    def flip_parity(self, wait: int) -> None:
        """Has a wait wait for the other parity."""
        register = self.parity(wait)
        self.substitute(wait, rf"\], {register},", "], %mutant,")
        self.insert(self.block(wait).start, f"xor.b32 	%mutant, {register}, 1;")
        self.declare_mutant()

    def keep_parity(self, wait: int, part: range) -> None:
        """Never flips the parity of a wait."""
        register = self.parity(wait)
        self.drop(self.find(rf"xor\.b32\s+{register}, {register}", part))

    def wait_once(self, wait: int) -> None:
        """Does not repeat a wait that came back because its time was up."""
        self.drop(self.find(r"bra\.uni\s+LAB_WAIT;", self.block(wait)))

    def change_bytes(self, arrival: int, change: int) -> None:
        """Changes how many bytes an arrival expects, where a constant says so."""
        register = self.last_operand(arrival)
        self.substitute(arrival, rf", {register};", ", %mutant;")
        self.insert(arrival, f"add.s32 	%mutant, {register}, {change};")
        self.declare_mutant()

    def set_count(self, barrier: str, change: int) -> None:
        """Changes the number of arrivals that the barriers of a kind expect."""
        lines = [i for i in self.all(r"mbarrier\.init", self.prologue) if self.barrier(i) == barrier]
        registers = {self.last_operand(i) for i in lines}
        if len(registers) != 1:
            raise NotFoundError(f"the barriers {barrier} are not initialised from one register: {registers}")
        (register,) = registers
        count = int(self.last_operand(self.find(rf"mov\.b32\s+{register}, \d+;", self.prologue)))
        self.insert(lines[0], f"mov.b32 	%mutant, {count + change};")
        for i in lines:
            self.substitute(i + 1, rf", {register};", ", %mutant;")
        self.declare_mutant()

    def meet_alone(self, nth: int) -> None:
        """Has blocks of a cluster meet only within themselves, the nth time that they meet."""
        arrive = self.find(r"barrier\.cluster\.arrive", nth=nth)
        self.drop(self.find(r"barrier\.cluster\.wait", nth=nth))
        self.drop(arrive)
        self.insert(arrive, "bar.sync 	0;")

    def leave_early(self) -> None:
        """Has a block leave without waiting for what other blocks of the cluster still tell its barriers."""
        waits = [i for i in self.all(r"mbarrier\.try_wait", self.load) if self.barrier(i) == "stage_empty"]
        for wait in waits[1:]:
            self.drop_block(wait)
        self.meet_alone(-1)
