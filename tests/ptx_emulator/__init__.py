"""Executes the compiled PTX of a GPU kernel on a CPU, and finds its faults. See README.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ptx_emulator.costs import Costs
from ptx_emulator.emulator import Checks, EmulationError, Fault, Report, emulate
from ptx_emulator.launches import Launch
from ptx_emulator.memory import Memory

if TYPE_CHECKING:
    from ptx_emulator.kernels import Emulated


def implementation(arch: str, **options: Any) -> Emulated:
    """An implementation that runs every kernel in the emulator: see `kernels.implementation`."""
    from ptx_emulator import kernels  # noqa: PLC0415  (needs the package under test; the emulator itself does not)

    return kernels.implementation(arch, **options)


__all__ = ["Checks", "Costs", "EmulationError", "Fault", "Launch", "Memory", "Report", "emulate", "implementation"]
