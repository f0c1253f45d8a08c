"""Runs one launch of one kernel, and what comes back."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import re
from typing import Any

import numpy as np

from ptx_emulator import launches, native, parser
from ptx_emulator.costs import Costs
from ptx_emulator.launches import Launch
from ptx_emulator.memory import Memory
from ptx_emulator.syntax import UnsupportedInstructionError


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
    timeline: Costs | None = None
    """Runs by this cost model's time instead of in random order, and records what was busy when."""


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
    warnings: tuple[Fault, ...] = ()
    """What gives right results: "serialised", accumulators that are used before their wgmma.wait_group, which is slow;
    "unwaited", what comes after a tcgen05.ld by nothing but a use of its registers, which PTX does not promise."""
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
      ValueError, TypeError: for a launch that no GPU would take, or parameters that do not fit.
    """
    checks = checks or Checks()
    try:
        kernels = parser.parse(ptx)
    except UnsupportedInstructionError as error:
        report = Report((Fault("unsupported", str(error), kernel or "", error.text, error.line),), 0, {})
        if raises:
            raise EmulationError(report) from error
        return report
    report = _run(_entry(kernels, kernel), launch, memory, seed, checks)
    if report.faults and raises:
        raise EmulationError(report)
    return report


def _entry(kernels: dict[str, parser.Kernel], name: str | None) -> parser.Kernel:
    if name is None:
        if len(kernels) != 1:
            raise ValueError(f"the module has the kernels {sorted(kernels)}: name one")
        return next(iter(kernels.values()))
    if name not in kernels:
        raise ValueError(f"the module has no kernel {name!r}, but {sorted(kernels)}")
    return kernels[name]


def _run(kernel: parser.Kernel, launch: Launch, memory: Memory, seed: int, checks: Checks) -> Report:
    launches.check(kernel, launch)
    block = launches.param_block(kernel, launch)
    constants = bytearray(kernel.constants)
    for at, bits, offset in kernel.param_constants:
        address = block.ctypes.data + offset
        constants[at : at + 4 * bits] = address.to_bytes(8, "little")[: bits // 8] * 32
    instructions, operands = kernel.instruction_array(), kernel.operand_array()
    specials = np.array(kernel.specials, np.int64).reshape(-1, 3)
    counts = np.zeros(len(instructions), np.int64)
    buffers = [("the parameters", block, False, None)]
    buffers += [(b.name, b.array, b.writable, b.written) for b in memory.buffers.values()]
    buffer_arguments = (native.BufferArgument * len(buffers))()
    for argument, (name, array, writable, written) in zip(buffer_arguments, buffers, strict=True):
        argument.name = name.encode()
        argument.start, argument.bytes = array.ctypes.data, array.nbytes
        argument.writable = writable
        argument.written = None if written is None else written.ctypes.data
    costs = np.array(dataclasses.astuple(checks.timeline or Costs()), np.float64)
    raw_constants = (ctypes.c_uint8 * max(len(constants), 1)).from_buffer(constants or bytearray(1))
    argument = native.LaunchArgument(
        instructions=instructions.ctypes.data,
        instruction_count=len(instructions),
        operands=operands.ctypes.data,
        operand_count=len(operands),
        specials=specials.ctypes.data,
        special_count=len(specials),
        constants=ctypes.addressof(raw_constants),
        constant_bytes=len(constants),
        register_bytes=kernel.register_bytes,
        static_shared=kernel.static_shared,
        grid=tuple(map(int, launch.grid)),
        block=tuple(map(int, launch.block)),
        cluster=tuple(map(int, launch.cluster)),
        shared_bytes=kernel.static_shared + int(launch.shared_bytes),
        registers=launches.registers(kernel, launch),
        seed=seed,
        races=checks.races,
        blackwell=kernel.target.startswith("sm_10"),
        max_faults=checks.max_faults,
        resident_clusters=checks.resident_clusters,
        timeline=checks.timeline is not None,
        max_instructions=checks.max_instructions,
        costs=costs.ctypes.data,
        buffers=buffer_arguments,
        buffer_count=len(buffers),
        counts=counts.ctypes.data,
    )
    core = native.core()
    text = core.ptx_emulator_run(ctypes.byref(argument))
    try:
        result = json.loads(ctypes.string_at(text))
    finally:
        core.ptx_emulator_free(text)
    by_opcode: dict[str, int] = {}
    for statement, count in zip(kernel.statements, counts.tolist(), strict=True):
        if count:
            words = statement.text.split()
            opcode = words[1] if words[0].startswith("@") else words[0]
            by_opcode[opcode] = by_opcode.get(opcode, 0) + count
    return Report(
        tuple(_fault(kernel, fault) for fault in result["faults"]),
        argument.executed,
        by_opcode,
        tuple(_fault(kernel, fault) for fault in result["warnings"]),
        result.get("timeline"),
    )


def _fault(kernel: parser.Kernel, fault: dict[str, Any]) -> Fault:
    statement = kernel.statements[min(fault["pc"], len(kernel.statements) - 1)]
    names = kernel.register_names
    return Fault(
        fault["kind"],
        re.sub(r"\{register (\d+)\}", lambda place: names.get(int(place.group(1)), "a register"), fault["message"]),
        kernel.name,
        statement.text,
        statement.line,
        tuple(fault["cta"]),
        fault["warp"],
        fault["lanes"],
    )
