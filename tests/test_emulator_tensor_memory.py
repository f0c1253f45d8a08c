"""The PTX emulator judges the order of tensor memory's loads and stores: wrong programs, right twins.

PTX ISA 9.7.16.6.2: of tcgen05.ld and st, nothing is in the order of the program but by tcgen05.wait (9.7.16.6.4.2).
Registers of a load may be read before it is waited for, which orders nothing else; not written (9.7.16.6.4.5).
"""

from __future__ import annotations

import pytest
from emulated_programs import kinds_of, run

pytestmark = pytest.mark.emulator

_STORE = "tcgen05.st.sync.aligned.32x32b.x2.b32 [%r5{at}], {{%r1, %r3}};"
_LOAD = "tcgen05.ld.sync.aligned.32x32b.x2.b32 {{%r8, %r9}}, [%r5{at}];"
STORE, LOAD = _STORE.format(at=""), _LOAD.format(at="")
OTHER_STORE, OTHER_LOAD = _STORE.format(at="+8"), _LOAD.format(at="+8").replace("%r8, %r9", "%r18, %r19")
STORED, LOADED = "tcgen05.wait::st.sync.aligned;", "tcgen05.wait::ld.sync.aligned;"
USE = "st.global.u32 [%rd5], %r9;"


def program(body: str) -> str:
    return f"""
  tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 32; bar.warp.sync -1; ld.shared.u32 %r5, [%r2];
  {body}
  tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r5, 32;
"""


def kinds(body: str) -> list[set[str]]:
    return kinds_of(program(body), target="sm_100a")


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (STORE + STORED + LOAD + LOADED + USE, STORE + LOAD + LOADED + USE),
        (STORE + STORED + LOAD + LOADED + STORE + STORED, STORE + STORED + LOAD + STORE + STORED),
        (STORE + STORED + STORE + STORED, STORE + STORE + STORED),
        (STORE + STORED + LOAD + LOADED, STORE + STORED + LOAD),
        (STORE + STORED, STORE),
        # A wait for loads is none for stores.
        (
            STORE + STORED + OTHER_STORE + STORED + OTHER_LOAD + LOADED + LOAD + LOADED,
            OTHER_STORE + STORED + STORE + OTHER_LOAD + LOADED + LOAD + LOADED,
        ),
        # And the other way round.
        (
            STORE + STORED + LOAD + OTHER_STORE + STORED + LOADED + STORE + STORED,
            STORE + STORED + LOAD + OTHER_STORE + STORED + STORE + STORED,
        ),
    ],
)
def test_waits_order_accesses(right: str, wrong: str) -> None:
    assert not any(kinds(right))
    assert kinds(wrong) == [{"race"}] * 8


def test_accesses_that_need_no_wait_between_them() -> None:
    assert not any(
        kinds(STORE + OTHER_STORE + STORED + LOAD + OTHER_LOAD + LOAD.replace("%r8, %r9", "%r28, %r29") + LOADED)
    )


def between(what: str) -> str:
    """A load, something, and a use of the loaded registers."""
    return STORE + STORED + LOAD + what + USE


@pytest.mark.parametrize("use", [USE, "mov.u32 %r20, %r9; st.global.u32 [%rd5], %r20;"])
def test_registers_are_read_before_the_wait(use: str) -> None:
    early = STORE + STORED + LOAD + use
    for seed in range(8):
        ran = run(program(early + LOADED + STORE + STORED), seed=seed, target="sm_100a")
        assert not ran.faults
        assert not ran.warnings
        assert ran.y[:32].tolist() == list(range(0, 128, 4))
        for next_access in (STORE + STORED, ""):  # or the end of the allocation
            ran = run(program(early + next_access), seed=seed, target="sm_100a")
            assert not ran.faults
            assert {warning.kind for warning in ran.warnings} == {"unwaited"}
            assert ("tcgen05.st" if next_access else "tcgen05.dealloc") in ran.warnings[0].instruction


@pytest.mark.parametrize(
    "write",
    [
        "mov.u32 %r9, 5;",
        "add.u32 %r9, %r1, 1;",
        "ld.shared.u32 %r9, [%r2];",
        LOAD,
        "setp.eq.u32 %p1, %r1, 0; @%p1 mov.u32 %r8, 1;",
    ],
)
def test_registers_are_written_before_the_wait(write: str) -> None:
    assert kinds(between(write) + LOADED) == [{"protocol"}] * 8
    assert not any(kinds(between(LOADED + write) + LOADED))


@pytest.mark.parametrize("read", ["mov.u32 %r20, %r9;", "add.u32 %r20, %r9, 1;", "add.u32 %r9, %r9, 1;"])
def test_registers_are_written_behind_a_read(read: str) -> None:
    assert not any(kinds(between(read + "mov.u32 %r9, 5;") + LOADED))
