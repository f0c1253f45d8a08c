"""Runs one launch of one kernel, and what comes back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ptx_emulator.memory import Memory


@dataclasses.dataclass(frozen=True)
class Launch:
    """How a kernel is launched."""

    grid: tuple[int, int, int] = (1, 1, 1)
    """CTAs."""
    block: tuple[int, int, int] = (32, 1, 1)
    """Threads of a CTA."""
    cluster: tuple[int, int, int] = (1, 1, 1)
    """CTAs of a cluster."""
    shared_bytes: int = 0
    """Dynamic shared memory of a CTA."""
    params: Sequence[bytes | int] = ()
    """One value per .param of the kernel: its bytes, or an integer of the declared size."""


@dataclasses.dataclass(frozen=True)
class Checks:
    """What is looked for, and when to stop."""

    races: bool = True
    max_faults: int = 8
    """Races are collected up to here; any other fault ends the run."""
    max_instructions: int = 200_000_000
    """Warp instructions of the launch."""
    resident_clusters: int = 2
    """Clusters that run at the same time; the others wait for their turn."""
    timeline: bool = False
    """Runs by the cost model's time instead of in random order, and records what was busy when."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """Something that a kernel must not do."""

    kind: str
    """deadlock, out-of-bounds, misaligned, read-only, uninitialised, race, barrier, protocol, unsupported or limit."""
    message: str
    """What happened, and the order of events before it."""
    kernel: str
    instruction: str
    """The PTX text of the instruction."""
    line: int
    """Its line in the PTX."""
    cta: tuple[int, int, int] | None = None
    warp: int | None = None
    lanes: int = 0
    """Bit mask."""

    def __str__(self) -> str:
        place = "" if self.cta is None else f", CTA {self.cta} warp {self.warp} lanes {self.lanes:#010x}"
        return f"{self.kind}: {self.message}\n  at line {self.line}: {self.instruction}\n  in {self.kernel}{place}"


@dataclasses.dataclass(frozen=True)
class Report:
    """What a launch did."""

    faults: tuple[Fault, ...]
    instructions: int
    """Warp instructions that were executed."""
    counts: dict[str, int]
    """The same by opcode."""
    timeline: dict[str, Any] | None = None
    """With `Checks.timeline`; see README.md."""


class EmulationError(AssertionError):
    """A kernel has faults."""

    def __init__(self, report: Report):
        super().__init__("\n".join(map(str, report.faults)))
        self.report = report


def emulate(
    ptx: str,
    launch: Launch,
    memory: Memory,
    *,
    kernel: str | None = None,
    seed: int = 0,
    checks: Checks | None = None,
    raises: bool = True,
) -> Report:
    """Runs one launch to its end, or to its first fault.

    Args:
      ptx: the text of a PTX module.
      launch: grid, block, cluster, shared memory and parameters.
      memory: what the kernel may touch; results are written in place.
      kernel: the entry's name; not needed where there is one entry.
      seed: of the random order in which warps and asynchronous operations take their turns.
      checks: what is looked for.
      raises: whether faults raise.

    Returns:
      Faults and counts.

    Raises:
      EmulationError: for faults, with `raises`.
    """
    raise NotImplementedError
