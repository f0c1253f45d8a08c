"""The PTX emulator judges waits, fences, member masks and the order of memory: wrong programs and their right twins."""

from __future__ import annotations

import pytest
from emulated_programs import kinds_of, only, run, wait

pytestmark = pytest.mark.emulator

# ---- waits at mbarriers ----

_LOAD = f"""
  {
    only(
        "mbarrier.init.shared.b64 [%r2+1024], 1; fence.mbarrier_init.release.cluster;"
        "mbarrier.arrive.expect_tx.shared.b64 _, [%r2+1024], 128;"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd1], 128, [%r2+1024];"
    )
}
  bar.warp.sync -1;
"""
_READ = "ld.shared.u32 %r5, [%r4]; st.global.u32 [%rd5], %r5;"


@pytest.mark.parametrize("what", ["try_wait", "test_wait"])
@pytest.mark.parametrize("hint", ["", ", 10000000"])
def test_a_wait_may_give_up(what: str, hint: str) -> None:
    if what == "test_wait" and hint:
        return
    once = f"mbarrier.{what}.parity.shared.b64 %p2, [%r2+1024], 0{hint};"
    looped = f"L: {once} @!%p2 bra L;"
    assert not any(kinds_of(_LOAD + looped + _READ))
    for kinds in kinds_of(_LOAD + once + _READ, range(20)):
        assert kinds
        assert kinds <= {"race", "uninitialised", "protocol"}


def test_a_wait_that_was_answered_is_no_fault() -> None:
    # A first look, and a wait only where that failed: both ways are taken.
    look = "mbarrier.try_wait.parity.shared.b64 %p2, [%r2+1024], 0; @%p2 bra READ;"
    body = _LOAD + look + f"st.global.u32 [%rd5+128], %r1; {wait('%r2+1024', 0, 'W')} READ:" + _READ
    ran = [run(body, seed=seed) for seed in range(8)]
    assert not any(each.faults for each in ran)
    assert ran[0].y[:32].tolist() == list(range(32))


def test_a_phase_that_is_known_to_be_over_is_not_missed() -> None:
    once = "mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0; selp.u32 %r5, 1, 0, %p2; st.global.u32 [%rd5], %r5;"
    body = only("mbarrier.init.shared.b64 [%r2], 1; mbarrier.arrive.shared.b64 _, [%r2];" + once)
    for seed in range(8):
        ran = run(body, seed=seed)
        assert not ran.faults
        assert ran.y[0] == 1


def test_waits_that_spin_are_a_deadlock() -> None:
    init = "mbarrier.init.shared.b64 [%r2], 2; mbarrier.arrive.shared.b64 _, [%r2];"
    for what in ("try_wait", "test_wait"):
        body = only(f"{init} L: mbarrier.{what}.parity.shared.b64 %p2, [%r2], 0; @!%p2 bra L;")
        assert kinds_of(body) == [{"deadlock"}] * 8


def test_arrivals_that_drop_out_are_counted() -> None:
    drops = "mbarrier.init.shared.b64 [%r2], 3; mbarrier.arrive_drop.shared.b64 _, [%r2], 2;"
    arrive = "mbarrier.arrive.shared.b64 _, [%r2];"
    assert not any(kinds_of(only(drops + 2 * arrive + wait("%r2", 1, "W"))))
    assert kinds_of(only(drops + arrive + wait("%r2", 1, "W"))) == [{"deadlock"}] * 8


# ---- the spaces of a proxy fence ----


def _copied(fence: str) -> str:
    copy = "cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r2], 128; cp.async.bulk.commit_group;"
    return f"st.shared.u32 [%r4], %r1; {fence} bar.warp.sync -1; {only(copy + 'cp.async.bulk.wait_group 0;')}"


def _loaded_again(fence: str) -> str:
    """Writes global memory, and copies it to shared memory."""
    barrier = "mbarrier.init.shared.b64 [%r2+1024], 1; fence.mbarrier_init.release.cluster;"
    load = "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r2], [%rd2], 128, [%r2+1024];"
    expect = "mbarrier.arrive.expect_tx.shared.b64 _, [%r2+1024], 128;"
    return (
        f"st.global.u32 [%rd5], %r1; {fence} {only(barrier)} bar.warp.sync -1; {only(expect + load, 1)}"
        f"{wait('%r2+1024', 0, 'W')} ld.shared.u32 %r5, [%r4];"
    )


@pytest.mark.parametrize(
    ("fence", "shared", "global_"),
    [
        ("fence.proxy.async;", True, True),
        ("fence.proxy.async.shared::cta;", True, False),
        ("fence.proxy.async.shared::cluster;", True, False),
        ("fence.proxy.async.global;", False, True),
        ("fence.proxy.async.shared::cta; fence.proxy.async.global;", True, True),
        ("fence.acq_rel.gpu;", False, False),
        ("", False, False),
    ],
)
def test_a_proxy_fence_is_for_its_space(fence: str, shared: bool, global_: bool) -> None:
    assert kinds_of(_copied(fence)) == [set() if shared else {"race"}] * 8
    assert kinds_of(_loaded_again(fence)) == [set() if global_ else {"race"}] * 8


def _loaded_over(fence: str) -> str:
    """Loads shared memory, reads it, and loads over it."""
    load = "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r2], [%rd1], 128, [%r2+1024];"
    again = only("mbarrier.arrive.expect_tx.shared.b64 _, [%r2+1024], 128;" + load, 1)
    first = _LOAD + wait("%r2+1024", 0, "V") + _READ
    return first + f"{fence} bar.warp.sync -1; {again}" + wait("%r2+1024", 1, "W")


@pytest.mark.parametrize(
    ("fence", "right"),
    [("async", True), ("async.shared::cta", True), ("async.global", False), ("", False)],
)
def test_a_read_is_before_an_asynchronous_write_where_a_fence_is_between(fence: str, right: bool) -> None:
    text = f"fence.proxy.{fence};" if fence else ""
    assert kinds_of(_loaded_over(text)) == [set() if right else {"race"}] * 8


@pytest.mark.parametrize(
    ("fence", "right"), [("shared::cluster", True), ("shared::cta", False), ("global", False), ("", True)]
)
def test_a_proxy_fence_for_shared_memory_of_others(fence: str, right: bool) -> None:
    # CTA 0 writes shared memory of CTA 1, which copies it out.
    text = f"fence.proxy.async.{fence};".replace(".;", ";")
    body = f"""
  mov.u32 %r9, %cluster_ctarank; setp.eq.u32 %p3, %r9, 0;
  barrier.cluster.arrive; barrier.cluster.wait;
  @!%p3 bra A;
  mapa.shared::cluster.u32 %r6, %r4, 1; st.shared::cluster.u32 [%r6], %r1; {text}
A: barrier.cluster.arrive; barrier.cluster.wait;
  @%p3 bra E;
  {
        only(
            "cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r2], 128;"
            "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
        )
    }
E:
"""
    assert kinds_of(body, cluster=2) == [set() if right else {"race"}] * 8


# ---- member masks ----

_HALVES = "setp.lt.u32 %p1, %r1, 16; mov.u32 %r7, 0xffff; @!%p1 mov.u32 %r7, 0xffff0000;"


@pytest.mark.parametrize(
    "text",
    [
        "shfl.sync.bfly.b32 %r5, %r1, 1, 31, {mask};",
        "elect.sync %r5|%p2, {mask};",
        "vote.sync.ballot.b32 %r5, %p1, {mask};",
        "bar.warp.sync {mask};",
    ],
)
def test_lanes_are_in_their_member_mask(text: str) -> None:
    assert not any(kinds_of(_HALVES + text.format(mask="-1")))
    assert not any(kinds_of(_HALVES + text.format(mask="%r7")))
    assert not any(kinds_of(f"{_HALVES} @!%p1 bra E; {text.format(mask='0xffff')} E:"))
    assert kinds_of(_HALVES + text.format(mask="0xffff")) == [{"protocol"}] * 8
    assert kinds_of(_HALVES + "@!%p1 mov.u32 %r7, -1;" + text.format(mask="%r7")) == [{"protocol"}] * 8


def test_halves_of_a_warp_that_act_at_once() -> None:
    ran = run(
        _HALVES + "elect.sync %r6|%p2, %r7; vote.sync.ballot.b32 %r8, %p2, %r7; add.u32 %r5, %r6, %r8;"
        "st.global.u32 [%rd5], %r5;"
    )
    assert not ran.faults
    assert ran.y[:32].tolist() == [1] * 16 + [16 + (1 << 16)] * 16


def test_a_shuffle_does_not_cross_its_mask() -> None:
    assert not run(_HALVES + "shfl.sync.bfly.b32 %r5, %r1, 8, 31, %r7;").faults
    assert run(_HALVES + "shfl.sync.bfly.b32 %r5, %r1, 16, 31, %r7;").kinds == {"protocol"}


# ---- registers ----

_SPLIT = "setp.lt.u32 %p1, %r1, 16; @%p1 bra A;"


@pytest.mark.parametrize(
    ("right", "body"),
    [
        (False, "st.global.u32 [%rd5], %r40;"),
        (False, "add.u32 %r40, %r40, 1;"),
        (False, "@%p5 mov.u32 %r5, 1;"),
        (False, "@%p5 bra E; mov.u32 %r5, 1; E:"),
        (False, "ld.shared.u32 %r5, [%r40];"),
        (False, "setp.lt.u32 %p1, %r1, 16; @%p1 mov.u32 %r40, 1; add.u32 %r5, %r40, 1;"),
        (True, "setp.lt.u32 %p1, %r1, 16; @%p1 mov.u32 %r40, 1; @%p1 add.u32 %r5, %r40, 1;"),
        (True, "setp.lt.u32 %p1, %r1, 16; @%p1 mov.u32 %r40, 1; @!%p1 mov.u32 %r40, 2; add.u32 %r5, %r40, 1;"),
        (True, f"{_SPLIT} mov.u32 %r40, 1; bra B; A: mov.u32 %r40, 2; B: not.b32 %r5, %r40;"),
        (False, f"{_SPLIT} mov.u32 %r40, 1; bra B; A: mov.u32 %r41, 2; B: not.b32 %r5, %r40;"),
        (False, "mov.u32 %r6, 0; L: setp.eq.u32 %p1, %r6, 1; @%p1 bra A; mov.u32 %r6, 1; bra L; A: not.b32 %r5, %r40;"),
        (True, "mov.u32 %r6, 0; L: setp.eq.u32 %p1, %r6, 1; mov.u32 %r40, 1; @!%p1 bra A; not.b32 %r5, %r40; A:"),
    ],
)
def test_registers_that_nothing_wrote(right: bool, body: str) -> None:
    assert kinds_of(body) == [set() if right else {"uninitialised"}] * 8


def test_a_register_that_nothing_wrote_is_named() -> None:
    (fault,) = run("setp.lt.u32 %p1, %r1, 16; @%p1 mov.u32 %r40, 1;\n  add.u32 %r5, %r40, 1;").faults
    assert "%r40 was never written" in fault.message
    assert fault.lanes == 0xFFFF0000
    assert fault.line == 19


# ---- what a CTA leaves behind ----


def test_a_named_barrier_where_some_have_arrived() -> None:
    assert kinds_of("bar.arrive 1, 64;") == [{"protocol"}] * 8
    body = "setp.lt.u32 %p1, %r1, 32; @%p1 bra A; bar.arrive 1, 64; bra E; A: bar.sync 1, 64; E:"
    assert not any(kinds_of(body, threads=64))


# ---- the order that memory makes ----


def _passed(store: str, load: str, place: str = "%r2", space: str = "shared") -> str:
    """Warp 0 writes, and says so by a flag, which warp 1 polls."""
    init = f"mov.u32 %r6, 0; st.{space}.u32 [{place}], %r6;"
    return f"""
  {only(init)} bar.sync 0;
  setp.lt.u32 %p2, %r1, 32; @!%p2 bra READER;
  st.shared.u32 [%r4+128], %r1; bar.warp.sync -1;
  setp.ne.u32 %p3, %r1, 0; @%p3 bra END;
  mov.u32 %r6, 1; {store.format(at=f"[{place}]", space=space)} bra END;
READER:
  {load.format(at=f"[{place}]", space=space)} setp.ne.u32 %p4, %r7, 1; @%p4 bra READER;
  {"fence.acq_rel.cta;" if "fence" in load else ""}
  ld.shared.u32 %r5, [%r4];
END:
"""


_STORES = {
    "release": "st.release.cta.{space}.u32 {at}, %r6;",
    "atom.release": "atom.release.cta.{space}.exch.b32 %r8, {at}, %r6;",
    "atom.acq_rel": "atom.acq_rel.cta.{space}.add.u32 %r8, {at}, %r6;",
    "fence": "fence.acq_rel.cta; st.relaxed.cta.{space}.u32 {at}, %r6;",
    "membar": "membar.cta; st.volatile.{space}.u32 {at}, %r6;",
    "fence red": "fence.sc.cta; red.relaxed.cta.{space}.add.u32 {at}, %r6;",
}
_LOADS = {
    "acquire": "ld.acquire.cta.{space}.u32 %r7, {at};",
    "atom.acquire": "atom.acquire.cta.{space}.add.u32 %r7, {at}, 0;",
    "fence": "ld.relaxed.cta.{space}.u32 %r7, {at}; // fence\n",
}


@pytest.mark.parametrize("load", _LOADS)
@pytest.mark.parametrize("store", _STORES)
def test_releases_and_acquires_order(store: str, load: str) -> None:
    loads = _LOADS[load].replace("// fence\n", "fence.acq_rel.cta;")
    assert not any(kinds_of(_passed(_STORES[store], loads), threads=64))
    assert not any(kinds_of(_passed(_STORES[store], loads, "%rd2", "global"), threads=64))


@pytest.mark.parametrize(
    ("store", "load"),
    [
        ("st.relaxed.cta.{space}.u32 {at}, %r6;", _LOADS["acquire"]),
        (_STORES["release"], "ld.relaxed.cta.{space}.u32 %r7, {at};"),
        ("st.relaxed.cta.{space}.u32 {at}, %r6; fence.acq_rel.cta;", _LOADS["acquire"]),
        ("atom.relaxed.cta.{space}.exch.b32 %r8, {at}, %r6;", _LOADS["acquire"]),
        ("st.{space}.u32 {at}, %r6;", _LOADS["acquire"]),
        ("st.release.cta.{space}.u32 {at}, %r6; st.relaxed.cta.{space}.u32 {at}, %r6;", _LOADS["acquire"]),
    ],
)
def test_what_orders_nothing(store: str, load: str) -> None:
    for kinds in kinds_of(_passed(store, load), threads=64):
        # Of the last: the reader may come between the two stores.
        assert kinds == {"race"} or (store.count("st.") == 2 and kinds <= {"race"})


def test_a_read_and_write_passes_a_release_on() -> None:
    store = _STORES["release"] + "mov.u32 %r8, 0; red.relaxed.cta.{space}.add.u32 {at}, %r8;"
    assert not any(kinds_of(_passed(store, _LOADS["acquire"]), threads=64))


# ---- warps that have ended ----

_LATER = "mov.u32 %r20, 0; S: add.u32 %r20, %r20, 1; setp.lt.u32 %p6, %r20, 3000; @%p6 bra S;"
_TRADE = "st.shared.u32 [%r4], %r1; {sync} xor.b32 %r5, %r3, 128; add.u32 %r5, %r5, %r2; ld.shared.u32 %r6, [%r5];"


@pytest.mark.parametrize("later", ["", _LATER])
def test_a_barrier_of_all_threads_is_of_those_that_have_not_ended(later: str) -> None:
    # The third warp ends before the others come to the barrier, or while they are there.
    body = f"setp.gt.u32 %p1, %r1, 63; @!%p1 bra A; {later} bra E; A: {_TRADE.format(sync='bar.sync 0;')} E:"
    assert not any(kinds_of(body, threads=96))
    assert kinds_of(body.replace("bar.sync 0;", "bar.sync 0, 96;"), threads=96) == [{"deadlock"}] * 8


def test_a_warp_arrives_at_the_barrier_of_the_cluster_and_ends() -> None:
    # It counts as arrived: the second warp still waits for the third.
    cluster = "barrier.cluster.arrive; barrier.cluster.wait;"
    body = f"""
  setp.gt.u32 %p1, %r1, 63; @!%p1 bra A; barrier.cluster.arrive; bra E;
A: setp.lt.u32 %p1, %r1, 32; @!%p1 bra B; {_LATER}
B: {_TRADE.format(sync=cluster)}
E:
"""
    assert not any(kinds_of(body, threads=96))
    assert not any(kinds_of(body, threads=96, cluster=2))
