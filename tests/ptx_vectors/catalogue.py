"""Every probe."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from ptx_vectors import arithmetic, barriers, cluster, tma, warp, wgmma
from ptx_vectors.program import Program


@functools.cache
def programs() -> Mapping[str, Program]:
    """Programs by name."""
    result: dict[str, Program] = {}
    for module in (arithmetic, warp, barriers, cluster, tma, wgmma):
        for program in module.programs():
            if program.name in result:
                raise ValueError(f"two programs are named {program.name}")
            result[program.name] = program
    return result
