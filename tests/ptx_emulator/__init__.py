"""Executes the compiled PTX of a GPU kernel on a CPU, and finds its faults. See README.md."""

from __future__ import annotations

from ptx_emulator.emulator import Checks, EmulationError, Fault, Launch, Report, emulate
from ptx_emulator.memory import Memory

__all__ = ["Checks", "EmulationError", "Fault", "Launch", "Memory", "Report", "emulate"]
