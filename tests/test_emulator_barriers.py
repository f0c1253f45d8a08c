"""The PTX emulator judges the end of mbarriers, and runs lanes of a warp apart: wrong programs, right twins."""

from __future__ import annotations

import pytest
from emulated_programs import kinds_of, only, run, wait

pytestmark = pytest.mark.emulator

# ---- mbarrier.inval ----

_END = only("mbarrier.inval.shared.b64 [%r2+1024];")
_AGAIN = only("mbarrier.inval.shared.b64 [%r2+1024]; mbarrier.init.shared.b64 [%r2+1024], 1;")
_OTHER = "setp.eq.u32 %p1, %r1, 32; @%p1 "


def _init(count: int) -> str:
    return only(f"mbarrier.init.shared.b64 [%r2+1024], {count}; fence.mbarrier_init.release.cluster;") + "bar.sync 0;"


@pytest.mark.parametrize("end", [_END, _AGAIN])
@pytest.mark.parametrize(
    ("count", "use"),
    [
        (2, _OTHER + "mbarrier.arrive.shared.b64 _, [%r2+1024];"),
        (2, _OTHER + "mbarrier.arrive.relaxed.cta.shared::cta.b64 _, [%r2+1024];"),
        (2, _OTHER + "mbarrier.expect_tx.relaxed.cta.shared.b64 [%r2+1024], 0;"),
        (1, only("mbarrier.arrive.shared.b64 _, [%r2+1024];") + wait("%r2+1024", 0, "W")),
    ],
)
def test_the_end_of_a_barrier_is_behind_its_uses(count: int, use: str, end: str) -> None:
    assert not any(kinds_of(_init(count) + use + "bar.sync 0;" + end, threads=64))
    for kinds in kinds_of(_init(count) + use + end, range(20), threads=64):
        assert kinds
        assert kinds <= {"race", "barrier", "protocol"}


def test_who_waited_for_an_arrival_ends_the_barrier() -> None:
    for how in ("release", "relaxed"):
        arrive = f"mbarrier.arrive.{how}.cta.shared::cta.b64 _, [%r2+1024];"
        end = only(wait("%r2+1024", 0, "W") + "mbarrier.inval.shared.b64 [%r2+1024];")
        assert not any(kinds_of(_init(1) + _OTHER + arrive + end, threads=64))


def test_who_waited_for_a_load_ends_the_barrier() -> None:
    load = (
        "mbarrier.arrive.expect_tx.shared.b64 _, [%r2+1024], 128;"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd1], 128, [%r2+1024];"
    )
    end = "mbarrier.inval.shared.b64 [%r2+1024];"
    assert not any(kinds_of(_init(1) + only(load + wait("%r2+1024", 0, "W") + end)))
    assert all(kinds_of(_init(1) + only(load + end)))


def test_data_where_a_barrier_was() -> None:
    store = _OTHER + "st.shared.u32 [%r2+1024], %r1;"
    assert not any(kinds_of(_init(1) + _END + "bar.sync 0;" + store, threads=64))
    assert all(kinds_of(_init(1) + _END + store, range(20), threads=64))


# ---- lanes that go their own ways ----


_SPIN = "W: ld.acquire.cta.shared.u32 %r5, [%r2]; setp.eq.u32 %p3, %r5, 0; @%p3 bra W;"
_TELL = "mov.u32 %r6, 7; st.release.cta.shared.u32 [%r2], %r6;"


@pytest.mark.parametrize("writer", [0, 1, 31])
@pytest.mark.parametrize(("branch", "near", "far"), [("@%p2", _SPIN, _TELL), ("@!%p2", _TELL, _SPIN)])
def test_lanes_wait_for_another_lane_of_their_warp(branch: str, near: str, far: str, writer: int) -> None:
    body = f"""
  mov.u32 %r6, 0; st.shared.u32 [%r2], %r6; bar.warp.sync -1;
  setp.eq.u32 %p2, %r1, {writer}; {branch} bra FAR; {near} bra END; FAR: {far}
END:
  bar.warp.sync -1; st.global.u32 [%rd5], %r1;
"""
    for seed in range(4):
        ran = run(body, seed=seed)
        assert not ran.faults
        assert ran.y[:32].tolist() == list(range(32))


def test_a_lock_that_each_lane_takes() -> None:
    body = """
  mov.u32 %r6, 0; st.shared.u32 [%r2], %r6; st.shared.u32 [%r2+4], %r6; bar.warp.sync -1;
L: atom.acquire.cta.shared.cas.b32 %r5, [%r2], 0, 1; setp.ne.u32 %p2, %r5, 0; @%p2 bra L;
  ld.shared.u32 %r7, [%r2+4]; add.u32 %r7, %r7, 1; st.shared.u32 [%r2+4], %r7;
  mov.u32 %r6, 0; atom.release.cta.shared.exch.b32 %r5, [%r2], %r6;
  bar.warp.sync -1; ld.shared.u32 %r7, [%r2+4]; st.global.u32 [%rd5], %r7;
"""
    for seed in range(2):
        ran = run(body, seed=seed)
        assert not ran.faults
        assert ran.y[0] == 32


_PLACES = {
    "two places": "setp.lt.u32 %p2, %r1, 16; @%p2 bra A; barrier.sync 1, {n}; bra E; A: barrier.sync 1, {n}; E:",
    "two guards": "setp.lt.u32 %p2, %r1, 16; @%p2 barrier.sync 1, {n}; @!%p2 barrier.sync 1, {n};",
    "an end": "setp.lt.u32 %p2, %r1, 16; @%p2 bra A; ret; A: barrier.sync 1, {n};",
    "arrivals": "setp.lt.u32 %p2, %r1, 16; @%p2 bra A; barrier.arrive 1, {n}; bra E; A: barrier.sync 1, {n}; E:",
}


@pytest.mark.parametrize("how", _PLACES)
@pytest.mark.parametrize("threads", [32, 64])
def test_lanes_meet_at_a_barrier_at_several_places(how: str, threads: int) -> None:
    place = _PLACES[how].format(n=threads)
    other = f"setp.gt.u32 %p3, %r1, 31; @%p3 bra B; {place} bra END; B: barrier.sync 1, {threads}; END:"
    assert not any(kinds_of(other, threads=threads))
    aligned = other.replace("barrier.sync", "barrier.sync.aligned").replace("barrier.arrive", "barrier.arrive.aligned")
    if how != "an end":
        assert all(kinds_of(aligned, threads=threads))


def test_a_barrier_at_several_places_orders() -> None:
    body = """
  setp.lt.u32 %p2, %r1, 16; @%p2 bra A;
  st.shared.u32 [%r4], %r1; {sync} xor.b32 %r5, %r3, 64; add.u32 %r5, %r5, %r2; ld.shared.u32 %r6, [%r5]; bra E;
A: st.shared.u32 [%r4], %r1; {sync} xor.b32 %r5, %r3, 64; add.u32 %r5, %r5, %r2; ld.shared.u32 %r6, [%r5];
E: st.global.u32 [%rd5], %r6;
"""
    assert not any(kinds_of(body.format(sync="barrier.sync 1, 32;")))
    for kinds in kinds_of(body.format(sync="")):
        assert kinds
        assert kinds <= {"race", "uninitialised"}


def test_lanes_that_never_come() -> None:
    body = "setp.lt.u32 %p2, %r1, 16; @%p2 bra A; W: bar.warp.sync 0xffff0000; bra W; A: barrier.sync 1, 32;"
    assert {"limit", "deadlock"} >= set().union(*kinds_of(body, range(2)))
    assert all(kinds_of(body, range(2)))
