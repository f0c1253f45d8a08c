"""Small PTX programs for the tests of the emulator: a common head, a body, and what running it gave."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from ptx_emulator import Checks, Fault, Launch, Memory, emulate
from ptx_emulator.memory import empty

HEAD = """
.version 8.6
.target {target}
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry k(.param .u64 x, .param .u64 y)
{{
  .reg .pred %p<8>; .reg .b16 %h<8>; .reg .b32 %r<64>; .reg .b64 %rd<16>; .reg .f32 %f<8>; .reg .f64 %d<8>;
  ld.param.u64 %rd1, [x];
  ld.param.u64 %rd2, [y];
  mov.u32 %r1, %tid.x;
  mov.u32 %r2, smem;
  shl.b32 %r3, %r1, 2;
  add.s32 %r4, %r2, %r3;
  cvt.u64.u32 %rd3, %r3;
  add.s64 %rd4, %rd1, %rd3;
  add.s64 %rd5, %rd2, %rd3;
{body}
  ret;
}}
"""


@dataclasses.dataclass
class Ran:
    """What a small program did."""

    faults: tuple[Fault, ...]
    y: np.ndarray
    warnings: tuple[Fault, ...] = ()

    @property
    def kinds(self) -> set[str]:
        return {fault.kind for fault in self.faults}


@dataclasses.dataclass(frozen=True)
class Setting:
    """Of a run, what is not as usual."""

    threads: int = 32
    cluster: int = 1
    """CTAs of the one cluster that is launched."""
    shared: int = 4096
    target: str = "sm_90a"
    x_writable: bool = False


def run(body: str, *, seed: int = 0, **setting: Any) -> Ran:
    """Runs a body between the common head and `ret`; x and y have 64 words."""
    how = Setting(**setting)
    x, y = empty((64,), np.dtype(np.uint32)), empty((64,), np.dtype(np.uint32))
    x[:] = np.arange(64)
    space = Memory()
    space.add("x", x, writable=how.x_writable)
    space.add("y", y, writable=True, initialised=False)
    block, cluster = (how.threads, 1, 1), (how.cluster, 1, 1)
    launch = Launch(cluster, block, cluster, how.shared, [x.ctypes.data, y.ctypes.data])
    text = HEAD.format(target=how.target, body=body)
    checks = Checks(max_instructions=200_000)
    report = emulate(text, launch, space, seed=seed, checks=checks, raises=False)
    return Ran(report.faults, y, report.warnings)


def kinds_of(body: str, seeds: Sequence[int] = range(8), **setting: Any) -> list[set[str]]:
    """The kinds of faults with each seed."""
    return [run(body, seed=seed, **setting).kinds for seed in seeds]


def wait(barrier: str, parity: int, label: str) -> str:
    return f"{label}: mbarrier.try_wait.parity.shared.b64 %p7, [{barrier}], {parity}, 10000000; @!%p7 bra {label};"


def only(body: str, lane: int = 0) -> str:
    """A body for one thread."""
    return f"setp.eq.u32 %p1, %r1, {lane}; @!%p1 bra SKIP{lane}_{id(body)};\n{body}\nSKIP{lane}_{id(body)}:"
