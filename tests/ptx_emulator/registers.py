"""Which registers something may read before it is written, so that the core watches those and no others."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ptx_emulator.opcodes import NAMES
from ptx_emulator.operands import ADDRESS, FLAG, OP, REGISTER

if TYPE_CHECKING:
    from ptx_emulator.parser import Kernel

READ, WRITTEN = 1, 2
READS_LOADED, WRITES_LOADED = 4, 8
"""Of registers that tcgen05.ld writes (core/program.h)."""
LOAD_SHIFT = 8
"""From this bit on: 1 + the tcgen05.ld whose value an operand reads, maybe through moves, or MANY_LOADS."""
MANY_LOADS = 1 << 32

_WITHOUT_RESULT = {
    OP[name]
    for name in NAMES["OP"]
    if name in ("st", "st_async", "bra", "ret", "nop", "trap", "setmaxnreg", "stmatrix", "tensormap_replace")
    or name.startswith(("bar_", "cluster_", "fence", "tma_", "bulk_", "prefetch", "wgmma_", "tc_", "clc_try"))
    or (name.startswith("mbarrier_") and name not in ("mbarrier_arrive", "mbarrier_wait"))
}
_TWO_RESULTS = {OP[name] for name in ("setp", "shfl", "elect")}
_VECTORS = {OP[name] for name in ("unpack", "ld", "ldmatrix", "tc_ld")}


def results(op: int, count: int) -> int:
    """How many of an instruction's first operands it writes; `count` is its field of this name."""
    if op in _VECTORS:
        return count
    if op == OP["wgmma_mma"]:
        return count // 2
    if op in _WITHOUT_RESULT:
        return 0
    return 2 if op in _TWO_RESULTS else 1


def _accesses(kernel: Kernel, fields: list[int]) -> tuple[list[int], list[int]]:
    """(operands that are read, operands that are written), by their number in the kernel."""
    op, first, count = fields[0], fields[5], fields[6]
    written = results(op, fields[11])
    kinds = [kernel.operands[at][0] for at in range(first, first + count)]
    reads = [first + i for i, kind in enumerate(kinds) if kind == ADDRESS or (kind == REGISTER and i >= written)]
    writes = [first + i for i, kind in enumerate(kinds[:written]) if kind == REGISTER]
    if op == OP["wgmma_mma"]:
        reads += writes  # where it adds
    return reads, writes


def _successors(kernel: Kernel, at: int) -> list[int]:
    fields = kernel.instructions[at]
    op, guarded = fields[0], fields[2] >= 0
    if op == OP["bra"]:
        return [fields[4], at + 1] if guarded else [fields[4]]
    if op in (OP["ret"], OP["trap"]) and not guarded:
        return []
    return [at + 1]


class _Numbers:
    """Bits for places of registers, so that a set of registers is one integer."""

    def __init__(self) -> None:
        self.of: dict[int, int] = {}

    def bit(self, place: int) -> int:
        return 1 << self.of.setdefault(place, len(self.of))

    def bits(self, places: Iterable[int]) -> int:
        return functools.reduce(operator.or_, map(self.bit, places), 0)


def _certain(kernel: Kernel, start: int, adds: list[int]) -> list[int]:
    """Of each instruction, the registers that every path to it has written, or -1 where no path leads.

    Args:
      kernel: its instructions.
      start: registers that hold values from the start.
      adds: of each instruction, the registers that it writes for certain.
    """
    before = [-1] * (len(adds) + 1)
    before[0] = start
    pending = [0]
    while pending:
        at = pending.pop()
        while at < len(adds):
            after = before[at] | adds[at]
            changed = [target for target in _successors(kernel, at) if before[target] & after != before[target]]
            for target in changed:
                before[target] &= after
            if not changed:
                break
            pending += changed[1:]
            at = changed[0]
    return before


def track(kernel: Kernel) -> None:
    """Marks the registers that are read where nothing may have written them, at these reads and at all writes.

    What is written for certain is found by dataflow: a register that every path to a read writes, without a guard,
    needs no watching. The core watches the others, lane by lane.
    """
    accesses = [_accesses(kernel, fields) for fields in kernel.instructions]
    numbers = _Numbers()

    def place(operand: int) -> int:
        return kernel.operands[operand][1]

    start = numbers.bits(place for _, place, _ in kernel.specials)
    adds = [
        numbers.bits(map(place, writes)) if fields[2] < 0 else 0
        for fields, (_, writes) in zip(kernel.instructions, accesses, strict=True)
    ]
    watched: set[int] = set()
    known = _certain(kernel, start, adds)
    for before, fields, (reads, _) in zip(known, kernel.instructions, accesses, strict=False):
        if before < 0:
            continue
        unsure = [operand for operand in reads if not before & numbers.bit(place(operand))]
        kernel.tracked.update(dict.fromkeys(unsure, READ))
        watched.update(map(place, unsure))
        if fields[2] >= 0 and not before & numbers.bit(fields[2]):
            watched.add(fields[2])
            fields[13] |= 1 << FLAG["tracked_guard"]
    for fields, (reads, writes) in zip(kernel.instructions, accesses, strict=True):
        for operand in writes:
            if place(operand) in watched:
                kernel.tracked[operand] = kernel.tracked.get(operand, 0) | WRITTEN
        if any(operand in kernel.tracked for operand in (*reads, *writes)):
            fields[13] |= 1 << FLAG["tracked"]
