"""The PTX emulator judges what reaches the shared memory of a CTA that has ended, or not begun: wrong programs, right
twins."""

from __future__ import annotations

import pytest
from emulated_programs import kinds_of, only, run

pytestmark = pytest.mark.emulator

SYNC = "barrier.cluster.arrive; barrier.cluster.wait;"
_BARRIER = only("mbarrier.init.shared.b64 [%r2+1024], {count}; fence.mbarrier_init.release.cluster;")
_SPIN = "mov.u32 %r20, 0; S: add.u32 %r20, %r20, 1; setp.lt.u32 %p6, %r20, {times}; @%p6 bra S;"


def peer(action: str, times: int = 0, end: str = "", count: int = 100) -> str:
    """CTA 1 does something to CTA 0, which has nothing to do."""
    return f"""
  mov.u32 %r9, %cluster_ctarank; {_BARRIER.format(count=count)}
  st.shared.u32 [%r4], %r1;
  {SYNC}
  setp.eq.u32 %p3, %r9, 0; @%p3 bra E;
  {_SPIN.format(times=times)}
  add.u32 %r11, %r2, 1024; mapa.shared::cluster.u32 %r6, %r4, 0; mapa.shared::cluster.u32 %r7, %r11, 0;
  {action}
E:
  {end}
"""


_ACTIONS = {
    "store": "st.shared::cluster.u32 [%r6], %r1;",
    "load": "ld.shared::cluster.u32 %r8, [%r6];",
    "atomic": "atom.shared::cluster.add.u32 %r8, [%r6], 1;",
    "arrival": "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r7];",
    "relaxed arrival": "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%r7];",
}


@pytest.mark.parametrize("times", [0, 2000])
@pytest.mark.parametrize("action", _ACTIONS)
def test_a_peer_that_has_ended(action: str, times: int) -> None:
    assert kinds_of(peer(_ACTIONS[action], times), cluster=2) == [{"protocol"}] * 8
    assert not any(kinds_of(peer(_ACTIONS[action], times, SYNC), cluster=2))


@pytest.mark.parametrize("how", ["release", "relaxed"])
def test_an_arrival_that_its_cta_waits_for(how: str) -> None:
    arrive = f"mbarrier.arrive.{how}.cluster.shared::cluster.b64 _, [%r7];"
    waits = "W: mbarrier.try_wait.parity.shared.b64 %p7, [%r2+1024], 0; @!%p7 bra W;"
    body = peer(arrive + "bra END;", 100, f"{waits} END:", count=32)
    assert not any(kinds_of(body, cluster=2))
    assert {"protocol"} == set().union(
        *kinds_of(body.replace("try_wait", "test_wait").replace("@!%p7 bra W;", ""), cluster=2)
    )


def test_an_asynchronous_store_to_a_peer() -> None:
    store = "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r6], %r1, [%r7];"
    expect = only("mbarrier.arrive.expect_tx.shared.b64 _, [%r2+1024], 128;")
    waits = "W: mbarrier.try_wait.parity.shared.b64 %p7, [%r2+1024], 0; @!%p7 bra W;"
    body = f"""
  mov.u32 %r9, %cluster_ctarank; {_BARRIER.format(count=1)} {SYNC}
  setp.eq.u32 %p3, %r9, 0; @!%p3 bra OTHER;
  {expect} {{waits}} bra END;
OTHER:
  add.u32 %r11, %r2, 1024; mapa.shared::cluster.u32 %r6, %r4, 0; mapa.shared::cluster.u32 %r7, %r11, 0; {store}
END:
"""
    assert not any(kinds_of(body.format(waits=waits), cluster=2))
    assert kinds_of(body.format(waits=""), cluster=2) == [{"protocol"}] * 8


_LOAD = f"""
  {_BARRIER.format(count=1)} bar.warp.sync -1;
  {
    only(
        "mbarrier.arrive.expect_tx.shared.b64 _, [%r2+1024], 128;"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd1], 128, [%r2+1024];",
        1,
    )
}
  {{wait}}
"""


def test_a_load_that_nobody_waits_for() -> None:
    wait = "W: mbarrier.try_wait.parity.shared.b64 %p7, [%r2+1024], 0; @!%p7 bra W;"
    assert not any(kinds_of(_LOAD.format(wait=wait)))
    assert not any(kinds_of(_LOAD.format(wait=only(wait, 5))))
    assert kinds_of(_LOAD.format(wait="")) == [{"protocol"}] * 8
    assert kinds_of(_LOAD.format(wait=_SPIN.format(times=5000))) == [{"protocol"}] * 8


def test_the_fault_names_the_load_and_the_cta() -> None:
    (fault,) = run(_LOAD.format(wait=_SPIN.format(times=5000))).faults
    assert "cp.async.bulk" in fault.instruction
    assert "CTA (0, 0, 0)" in fault.message


def test_a_wait_at_the_mbarrier_of_a_peer() -> None:
    wait = "mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r7], 0;"
    assert kinds_of(peer(wait, 0, SYNC), cluster=2) == [{"protocol"}] * 8


def test_warps_that_have_ended_are_not_waited_for() -> None:
    # Warp 1 ends when warp 0 is at the cluster's barrier already, or before.
    body = f"setp.gt.u32 %p1, %r1, 31; @%p1 bra OTHER; {SYNC} ret; OTHER: {_SPIN.format(times=500)}"
    assert not any(kinds_of(body, cluster=2, threads=64))


_OWN = {
    "store": "st.shared.u32 [%r6], %r1;",
    "load": "ld.shared::cta.u32 %r8, [%r6];",
    "atomic": "atom.shared.add.u32 %r8, [%r6], 1;",
    "arrival": "mbarrier.arrive.shared::cta.b64 _, [%r7];",
    "copy to it": only(
        "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r6], [%rd1], 128, [%r7];",
    ),
    "copy from it": only("cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r6], 128;"),
}


@pytest.mark.parametrize("action", _OWN)
def test_the_window_of_a_cta_is_its_own(action: str) -> None:
    assert kinds_of(peer(_OWN[action], 0, SYNC), cluster=2) == [{"out-of-bounds"}] * 8


def test_an_address_of_its_own_that_was_mapped() -> None:
    own = "mapa.shared::cluster.u32 %r6, %r4, %r9; st.shared.u32 [%r6], %r1; ld.shared.u32 %r8, [%r4];"
    assert not any(kinds_of(peer(own, 0, SYNC), cluster=2))


def test_a_copy_signals_where_it_goes() -> None:
    copy = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd1], 128, [%r7];"
    assert kinds_of(peer(only(copy), 0, SYNC), cluster=2) == [{"protocol"}] * 8


_PEER = """
  mov.u32 %r9, %cluster_ctarank; xor.b32 %r9, %r9, 1; add.u32 %r8, %r2, 1024;
  mapa.shared::cluster.u32 %r6, %r4, %r9; mapa.shared::cluster.u32 %r7, %r8, %r9;
"""
_TO_PEER = (
    only("mbarrier.init.shared.b64 [%r2+1024], 1; fence.mbarrier_init.release.cluster;")
    + "{sync}"
    + only(
        "mov.u32 %r9, %cluster_ctarank; xor.b32 %r9, %r9, 1; add.u32 %r8, %r2, 1024;"
        "mapa.shared::cluster.u32 %r6, %r2, %r9; mapa.shared::cluster.u32 %r7, %r8, %r9;"
        "mbarrier.arrive.expect_tx.shared.b64 _, [%r2+1024], 128;"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r6], [%rd1], 128, [%r7];",
        1,
    )
)


@pytest.mark.parametrize(
    ("before", "access"),
    [
        ("", "st.shared::cluster.u32 [%r6], %r1;"),
        ("st.shared.u32 [%r4+256], %r1;", "ld.shared::cluster.u32 %r8, [%r6+256];"),
        ("st.shared.u32 [%r4+256], %r1;", "atom.shared::cluster.exch.b32 %r8, [%r6+256], 1;"),
    ],
)
def test_a_peer_that_may_not_have_begun(before: str, access: str) -> None:
    body = before + _PEER + "{sync}" + access + "{end}"
    assert not any(kinds_of(body.format(sync=SYNC, end=SYNC), cluster=2))
    halves = SYNC.split(";")
    for wrong in (body.format(sync="", end=SYNC), body.format(sync=halves[0] + ";", end=halves[1] + ";")):
        for kinds in kinds_of(wrong, cluster=2):
            assert kinds
            assert kinds <= {"protocol", "uninitialised"}


def test_who_passed_a_barrier_that_releases_nothing_knows_that_its_peers_have_begun() -> None:
    sync = "barrier.cluster.arrive.relaxed; barrier.cluster.wait;"
    assert not any(kinds_of(_PEER + sync + "st.shared::cluster.u32 [%r6], %r1;" + SYNC, cluster=2))


@pytest.mark.parametrize("how", ["release", "relaxed"])
def test_an_arrival_at_a_peer_that_may_not_have_begun(how: str) -> None:
    init = only("mbarrier.init.shared.b64 [%r2+1024], 32; fence.mbarrier_init.release.cluster;")
    body = f"{init} {_PEER} {{sync}} mbarrier.arrive.{how}.cluster.shared::cluster.b64 _, [%r7]; {SYNC}"
    assert not any(kinds_of(body.format(sync=SYNC), cluster=2))
    for kinds in kinds_of(body.format(sync=""), cluster=2):
        assert kinds
        assert kinds <= {"protocol", "barrier", "race"}


def test_a_copy_to_a_peer_that_may_not_have_begun() -> None:
    waits = "W: mbarrier.try_wait.parity.shared.b64 %p7, [%r2+1024], 0; @!%p7 bra W;" + SYNC
    assert not any(kinds_of(_TO_PEER.format(sync=SYNC) + waits, cluster=2))
    for kinds in kinds_of(_TO_PEER.format(sync="bar.warp.sync -1;") + waits, cluster=2):
        assert kinds
        assert kinds <= {"protocol", "barrier", "race"}


@pytest.mark.parametrize("how", ["release", "relaxed"])
def test_who_was_told_by_a_peer_knows_that_it_has_begun(how: str) -> None:
    """CTA 1 tells CTA 0 through global memory; CTA 0 then stores to CTA 1."""
    tell = f"st.{how}.gpu.global.u32 [%rd1], %r20;"
    look = f"ld.{how.replace('release', 'acquire')}.gpu.global.u32 %r20, [%rd1];"
    body = f"""
  {_PEER} mov.u32 %r20, 7; setp.eq.u32 %p2, %r9, 1; @%p2 bra FIRST;
  {only(tell)} bra END;
FIRST: {{look}} st.shared::cluster.u32 [%r6], %r1;
END: {SYNC}
"""
    spin = f"L: {look} setp.ne.u32 %p3, %r20, 7; @%p3 bra L;"
    assert not any(kinds_of(body.format(look=spin), cluster=2, x_writable=True))
    assert kinds_of(body.format(look=""), cluster=2, x_writable=True) == [{"protocol"}] * 8
