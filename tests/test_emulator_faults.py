"""The PTX emulator finds each kind of fault: small programs, right and wrong."""

from __future__ import annotations

import numpy as np
import pytest
from emulated_programs import HEAD, Ran, only, run, wait
from ptx_emulator import Checks, EmulationError, Launch, Memory, emulate

pytestmark = pytest.mark.emulator


def test_a_right_program_has_no_fault() -> None:
    ran = run("ld.global.u32 %r5, [%rd4]; add.s32 %r5, %r5, 7; st.global.u32 [%rd5], %r5;", threads=64)
    assert not ran.faults
    assert ran.y.tolist() == list(range(7, 71))


def test_faults_raise() -> None:
    x = np.zeros(4, np.uint32)
    memory = Memory()
    memory.add("x", x)
    text = HEAD.format(target="sm_90a", body="st.global.u32 [%rd4], %r1;")
    with pytest.raises(EmulationError, match=r"read-only.*buffer x.*\n.*line 18: st.global.u32 \[%rd4\], %r1"):
        emulate(text, Launch(params=[x.ctypes.data, 0]), memory)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("out-of-bounds", "ld.global.u32 %r5, [%rd4+256];"),
        ("out-of-bounds", "ld.global.u32 %r5, [%rd4-4];"),
        ("out-of-bounds", "st.shared.u32 [%r4+4096], %r1;"),
        ("out-of-bounds", "st.shared.u32 [%r4-4], %r1;"),
        ("out-of-bounds", "mov.u32 %r5, 1; mapa.shared::cluster.u32 %r6, %r4, %r5; st.shared::cluster.u32 [%r6], %r1;"),
        ("misaligned", "ld.global.u32 %r5, [%rd4+2];"),
        ("misaligned", "st.shared.v2.u32 [%r4+4], {%r1, %r1};"),
        ("misaligned", "ld.global.v4.u32 {%r5, %r6, %r7, %r8}, [%rd4];"),
        ("read-only", "st.global.u32 [%rd4], %r1;"),
        ("uninitialised", "ld.shared.u32 %r5, [%r4];"),
        ("uninitialised", "ld.global.u32 %r5, [%rd5];"),
        ("uninitialised", "st.shared.u16 [%r4], %h1; ld.shared.u32 %r5, [%r4];"),
        ("protocol", "trap;"),
        ("protocol", "setmaxnreg.dec.sync.aligned.u32 20;"),
        ("limit", "L: bra L;"),
    ],
)
def test_faults_of_a_thread(kind: str, body: str) -> None:
    assert run(body).kinds == {kind}


def test_an_instruction_that_is_not_known_is_named() -> None:
    (fault,) = run("add.s32 %r5, %r1, 1;\n  sqrt.rn.f32 %r5, %r5;").faults
    assert fault.kind == "unsupported"
    assert fault.line == 19
    assert fault.instruction == "sqrt.rn.f32 %r5, %r5"


# ---- races between threads ----

_EXCHANGE = """
  st.shared.u32 [%r4], %r1;
  {sync}
  xor.b32 %r5, %r3, {partner};
  add.s32 %r5, %r2, %r5;
  ld.shared.u32 %r6, [%r5];
  st.global.u32 [%rd5], %r6;
"""


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("sync", "partner", "right"),
    [
        ("bar.sync 0;", 128, True),
        ("bar.sync 1, 64;", 128, True),
        ("bar.warp.sync -1;", 4, True),
        ("", 128, False),
        ("", 4, False),
        ("bar.warp.sync -1;", 128, False),
        ("membar.cta;", 128, False),
    ],
)
def test_a_value_goes_to_another_thread(sync: str, partner: int, right: bool, seed: int) -> None:
    ran = run(_EXCHANGE.format(sync=sync, partner=partner), threads=64, seed=seed)
    if right:
        assert not ran.faults
        assert ran.y.tolist() == [(4 * i ^ partner) // 4 for i in range(64)]
    else:
        assert ran.kinds <= {"race", "uninitialised"}
        assert ran.faults


def test_a_race_names_both_accesses() -> None:
    body = "and.b32 %r5, %r3, 63; add.s32 %r5, %r2, %r5;\n  st.shared.u32 [%r5], %r1;"
    (fault, *_) = run(body, threads=64).faults
    assert fault.kind == "race"
    assert "this write and an earlier write are not ordered" in fault.message
    assert "line 19, CTA (0, 0, 0) warp" in fault.message
    assert fault.line == 19


def test_two_bytes_of_a_word_do_not_race() -> None:
    body = "add.s32 %r5, %r2, %r1; cvt.u16.u32 %h1, %r1; st.shared.u8 [%r5], %h1;"
    assert not run(body, threads=64).faults


def test_lanes_that_write_the_same_value_to_one_place_do_not_race() -> None:
    assert not run("st.shared.u32 [%r2], 7;").faults
    assert run("st.shared.u32 [%r2], %r1;").kinds == {"race"}
    assert run("st.shared.u32 [%r2], 7; st.shared.u32 [%r2], 7;", threads=64).kinds == {"race"}
    assert not run("st.shared.u32 [%r2], 7; bar.sync 0; st.shared.u32 [%r2], 7;").faults


def test_writes_of_two_clusters_to_one_place_race() -> None:
    y = np.zeros(32, np.uint32)
    memory = Memory()
    memory.add("y", y, writable=True)
    text = HEAD.format(target="sm_90a", body="st.global.u32 [%rd5], %r1;")
    report = emulate(text, Launch(grid=(2, 1, 1), params=[0, y.ctypes.data]), memory, raises=False)
    assert {fault.kind for fault in report.faults} == {"race"}
    assert not emulate(text, Launch(grid=(1, 1, 1), params=[0, y.ctypes.data]), memory, raises=False).faults


# ---- mbarriers ----


def pipe(arrivals: int = 32, count: str = "1", sync: str = "bar.sync 0;", parity: int = 0) -> str:
    """Warp 0 writes, warp 1 waits for it and reads."""
    return f"""
  {only(f"mbarrier.init.shared.b64 [%r2+1024], {arrivals};")}
  {sync}
  setp.gt.u32 %p2, %r1, 31;
  @%p2 bra READER;
  st.shared.u32 [%r4], %r1;
  mbarrier.arrive.shared.b64 %rd6, [%r2+1024], {count};
  bra END;
READER:
  {wait("%r2+1024", parity, "W")}
  ld.shared.u32 %r6, [%r4-128];
  st.global.u32 [%rd5], %r6;
END:
"""


@pytest.mark.parametrize("seed", range(3))
def test_an_mbarrier_orders(seed: int) -> None:
    ran = run(pipe(), threads=64, seed=seed)
    assert not ran.faults
    assert ran.y[32:].tolist() == list(range(32))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("kinds", "changes"),
    [
        ({"deadlock"}, {"arrivals": 33}),
        ({"race"}, {"arrivals": 31}),
        ({"barrier"}, {"arrivals": 31, "count": "3"}),
        ({"barrier", "race"}, {"sync": ""}),
        ({"race", "uninitialised", "deadlock"}, {"parity": 1}),
    ],
)
def test_wrong_mbarriers(kinds: set[str], changes: dict[str, int], seed: int) -> None:
    ran = run(pipe(**changes), threads=64, seed=seed)
    assert ran.kinds
    assert ran.kinds <= kinds


def test_a_deadlock_says_who_waits_for_what() -> None:
    (fault,) = run(pipe(arrivals=33), threads=64).faults
    assert "CTA (0, 0, 0) warp 1 lanes 0xffffffff at line" in fault.message
    assert "waits for parity 0 of the mbarrier at byte 1024" in fault.message
    assert "phase 0 lacks 1 of 33 arrivals and 0 bytes" in fault.message
    assert "phase 0: init 33 by CTA (0, 0, 0) warp 0" in fault.message
    assert "phase 0: arrive 1 (32 times) by CTA (0, 0, 0) warp 0" in fault.message


@pytest.mark.parametrize(
    "body",
    [
        "mbarrier.arrive.shared.b64 %rd6, [%r2+1024];",
        "mbarrier.init.shared.b64 [%r2+1024], 1; mbarrier.init.shared.b64 [%r2+1024], 1;",
        "mbarrier.init.shared.b64 [%r2+1024], 0;",
        "mbarrier.init.shared.b64 [%r2+1024], 1; mbarrier.arrive.noComplete.shared.b64 %rd6, [%r2+1024], 1;",
        "mbarrier.init.shared.b64 [%r2+1024], 1; mbarrier.inval.shared.b64 [%r2+1024]; "
        "mbarrier.arrive.shared.b64 %rd6, [%r2+1024];",
    ],
)
def test_mbarriers_against_their_rules(body: str) -> None:
    assert run(only(body)).kinds == {"barrier"}


def test_an_mbarrier_is_no_data() -> None:
    init = "mbarrier.init.shared.b64 [%r2+1024], 1;"
    assert run(only(init + "ld.shared.u32 %r5, [%r2+1024];")).kinds == {"protocol"}
    assert run(only(init + "st.shared.u32 [%r2+1028], %r1;")).kinds == {"protocol"}


def test_a_wait_that_sees_a_phase_too_late() -> None:
    # Thread 32 waits for phase 0 when phases 0, 1 and 2 may be over: it cannot tell 0 from 2.
    body = f"""
  {only("mbarrier.init.shared.b64 [%r2+1024], 1;")}
  bar.sync 0;
  setp.eq.u32 %p2, %r1, 32;
  @%p2 bra LATE;
  setp.ne.u32 %p2, %r1, 0;
  @%p2 bra END;
  mbarrier.arrive.shared.b64 %rd6, [%r2+1024];
  mbarrier.arrive.shared.b64 %rd6, [%r2+1024];
  mbarrier.arrive.shared.b64 %rd6, [%r2+1024];
  bra END;
LATE:
  {wait("%r2+1024", 0, "W")}
END:
"""
    kinds = [run(body, threads=64, seed=seed).kinds for seed in range(8)]
    assert {"barrier"} in kinds
    assert all(kind in ({"barrier"}, set()) for kind in kinds)


# ---- bulk copies and the asynchronous proxy ----


def loaded(expected: int = 128, waits: bool = True, fence: str = "fence.mbarrier_init.release.cluster;") -> str:
    """Thread 0 copies 128 bytes of x to shared memory; all read them."""
    return f"""
  {only("mbarrier.init.shared.b64 [%r2+1024], 1;" + fence)}
  bar.sync 0;
  {
        only(
            f"mbarrier.arrive.expect_tx.shared.b64 %rd6, [%r2+1024], {expected};"
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd1], 128, [%r2+1024];"
        )
    }
  {wait("%r2+1024", 0, "W") if waits else ""}
  ld.shared.u32 %r6, [%r4];
  st.global.u32 [%rd5], %r6;
"""


@pytest.mark.parametrize("seed", range(3))
def test_a_bulk_load(seed: int) -> None:
    ran = run(loaded(), seed=seed)
    assert not ran.faults
    assert ran.y[:32].tolist() == list(range(32))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("kinds", "changes"),
    [
        ({"deadlock"}, {"expected": 144}),
        ({"barrier"}, {"expected": 112}),
        ({"race", "uninitialised"}, {"waits": False}),
        ({"race"}, {"fence": ""}),
    ],
)
def test_wrong_bulk_loads(kinds: set[str], changes: dict[str, int], seed: int) -> None:
    ran = run(loaded(**changes), seed=seed)
    assert ran.kinds
    assert ran.kinds <= kinds


def stored(fence: str = "fence.proxy.async.shared::cta;", waits: str = "0", again: str = "") -> str:
    """All write shared memory, thread 0 copies 128 bytes of it to y."""
    wait_text = f"cp.async.bulk.wait_group.read {waits};" if waits else ""
    return f"""
  st.shared.u32 [%r4], %r1;
  {fence}
  bar.sync 0;
  {only("cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r2], 128; cp.async.bulk.commit_group;" + wait_text)}
  {again}
"""


@pytest.mark.parametrize("seed", range(3))
def test_a_bulk_store(seed: int) -> None:
    ran = run(stored(again="bar.sync 0; st.shared.u32 [%r4], %r2;"), seed=seed)
    assert not ran.faults
    assert ran.y[:32].tolist() == list(range(32))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("kinds", "changes"),
    [
        ({"race"}, {"fence": ""}),
        ({"race"}, {"again": "st.shared.u32 [%r4], %r2;"}),
        ({"race", "protocol"}, {"waits": "", "again": "bar.sync 0; st.shared.u32 [%r4], %r2;"}),
        ({"race", "protocol"}, {"waits": "1", "again": "bar.sync 0; st.shared.u32 [%r4], %r2;"}),
        ({"protocol"}, {"waits": ""}),
    ],
)
def test_wrong_bulk_stores(kinds: set[str], changes: dict[str, str], seed: int) -> None:
    ran = run(stored(**changes), seed=seed)
    assert ran.kinds
    assert ran.kinds <= kinds


@pytest.mark.parametrize("size", [-16, -1024, 4096])
def test_bulk_copies_of_too_many_bytes(size: int) -> None:
    # Shared memory is written to its end: a size that wraps around must not lead behind it.
    body = f"st.shared.u32 [%r4], %r1; fence.proxy.async; bar.warp.sync -1; mov.u32 %r8, {size};"
    store = "cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r2], %r8; cp.async.bulk.commit_group;"
    load = (
        "mbarrier.init.shared.b64 [%r2+128], 1; fence.mbarrier_init.release.cluster;"
        "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r2], [%rd1], %r8, [%r2+128];"
    )
    assert run(body + only(store + "cp.async.bulk.wait_group 0;"), shared=128).kinds == {"out-of-bounds"}
    assert run(body + only(load), shared=136).kinds == {"out-of-bounds"}


# ---- lanes and named barriers ----


@pytest.mark.parametrize(
    ("kinds", "body"),
    [
        ({"protocol"}, "setp.lt.u32 %p1, %r1, 16; @%p1 bar.sync 0;"),
        ({"deadlock"}, only("bar.sync 0;") + "bar.warp.sync -1;"),
        ({"deadlock"}, only("shfl.sync.idx.b32 %r5, %r1, 0, 31, -1;") + "bar.warp.sync -1;"),
        ({"protocol"}, "bar.sync 1, 48;"),
        ({"deadlock"}, "bar.sync 1, 64;"),
        ({"protocol"}, "setp.lt.u32 %p1, %r1, 16; @%p1 elect.sync %r5|%p2, -1;"),
        ({"protocol"}, "barrier.cluster.wait.aligned;"),
    ],
)
def test_lanes_that_are_not_there(kinds: set[str], body: str) -> None:
    assert run(body).kinds == kinds


def test_a_named_barrier_for_two_counts() -> None:
    body = "setp.lt.u32 %p1, %r1, 32; @%p1 bra A; bar.sync 1, 64; bra B; A: bar.sync 1, 96; B:"
    assert run(body, threads=64).kinds == {"protocol"}


def test_lanes_meet_again_after_a_branch() -> None:
    body = """
  and.b32 %r5, %r1, 1; setp.eq.u32 %p1, %r5, 0;
  @%p1 bra EVEN;
  add.s32 %r6, %r1, 100; bra BOTH;
EVEN: add.s32 %r6, %r1, 200;
BOTH: shfl.sync.bfly.b32 %r7, %r6, 1, 31, -1;
  st.global.u32 [%rd5], %r7;
"""
    ran = run(body)
    assert not ran.faults
    assert ran.y[:32].tolist() == [(i ^ 1) + (100 if i % 2 == 0 else 200) for i in range(32)]


# ---- warpgroup products ----

_AGAIN = """
  wgmma.fence.sync.aligned;
  setp.lt.u32 %p4, %r1, 32; @%p4 add.s64 %rd6, %rd6, 1;
  wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r10, %r11, %r12, %r13}, %rd6, %rd6, %p3, 1, 1, 0, 0;
  wgmma.commit_group.sync.aligned;
  wgmma.wait_group.sync.aligned 0;
"""


def wgmma(
    fence: str = "wgmma.fence.sync.aligned;",
    commit: str = "wgmma.commit_group.sync.aligned;",
    early: str = "",
    wait_text: str = "wgmma.wait_group.sync.aligned 0;",
    proxy: str = "fence.proxy.async.shared::cta;",
    late: str = "",
) -> Ran:
    """Ones (64, 16) by ones (8, 16), without a swizzle: 16 in every place."""
    body = f"""
  mov.u32 %r5, 0x3f803f80;
  shl.b32 %r6, %r1, 4; add.s32 %r6, %r2, %r6;
  st.shared.v4.b32 [%r6], {{%r5, %r5, %r5, %r5}};
  st.shared.v4.b32 [%r6+2048], {{%r5, %r5, %r5, %r5}};
  {proxy}
  bar.sync 0;
  shr.u32 %r7, %r2, 4; cvt.u64.u32 %rd6, %r7;
  mov.u64 %rd7, 0x0000000800010000; or.b64 %rd6, %rd6, %rd7;
  mov.b32 %r10, 0f00000000; mov.b32 %r11, %r10; mov.b32 %r12, %r10; mov.b32 %r13, %r10;
  mov.pred %p3, 1;
  {fence}
  wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%r10, %r11, %r12, %r13}}, %rd6, %rd6, %p3, 1, 1, 0, 0;
  {commit}
  {early}
  {wait_text}
  {late}
  setp.gt.u32 %p4, %r1, 63; @%p4 bra END;
  st.global.b32 [%rd5], %r13;
END:
"""
    return run(body, threads=128, shared=8192)


def test_a_warpgroup_product() -> None:
    ran = wgmma()
    assert not ran.faults
    assert not ran.warnings
    assert (ran.y.view(np.float32) == 16).all()


@pytest.mark.parametrize(
    ("kinds", "changes"),
    [
        ({"protocol"}, {"fence": ""}),
        ({"protocol"}, {"wait_text": ""}),
        ({"protocol"}, {"commit": ""}),
        ({"race"}, {"proxy": ""}),
        ({"race"}, {"early": "st.shared.b32 [%r6], %r1;"}),
        ({"protocol"}, {"late": _AGAIN}),
    ],
)
def test_wrong_warpgroup_products(kinds: set[str], changes: dict[str, str]) -> None:
    ran = wgmma(**changes)
    assert ran.kinds
    assert ran.kinds <= kinds


def test_an_accumulator_that_is_used_early_is_a_warning() -> None:
    ran = wgmma(early="add.f32 %r20, %r13, %r13;")
    assert not ran.faults
    (warning,) = ran.warnings
    assert warning.kind == "serialised"
    assert warning.instruction == "add.f32 %r20, %r13, %r13"


# ---- clusters ----


_DECODE = "clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r5, %q;"


def taking(
    resident: int = 1,
    decode: str = f"@!%p2 bra DONE; {_DECODE}",
    fence: str = "fence.proxy.async.shared::cta;",
    done: str = "",
) -> tuple[set[str], list[int]]:
    """The clusters that run take the others one by one, and write each one's number plus one.

    Args:
      resident: clusters that run at a time.
      decode: an answer, when %p2 says whether it names a cluster.
      fence: behind that.
      done: what comes after the last answer.

    Returns:
      The faults' kinds, and what was written.
    """
    ask = """
  mbarrier.arrive.expect_tx.shared.b64 %rd7, [%r2+1024], 16;
  clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r2], [%r2+1024];
"""
    text = HEAD.format(
        target="sm_100a",
        body=f"""
  mbarrier.init.shared.b64 [%r2+1024], 1;
  fence.mbarrier_init.release.cluster;
  mov.u32 %r5, %ctaid.x;
  mov.u32 %r6, 0;
NEXT:
  mul.wide.u32 %rd6, %r5, 4; add.s64 %rd6, %rd2, %rd6;
  add.u32 %r7, %r5, 1;
  st.global.u32 [%rd6], %r7;
  {ask}
  {wait("%r2+1024", 0, "W").replace(", 0,", ", %r6,")}
  xor.b32 %r6, %r6, 1;
  ld.shared.v2.b64 {{%rd8, %rd9}}, [%r2];
  mov.b128 %q, {{%rd8, %rd9}};
  clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p2, %q;
  {decode}
  {fence}
  bra NEXT;
DONE:
  {done.format(ask=ask)}
""",
    ).replace(".reg .pred", ".reg .b128 %q; .reg .pred")
    y = np.zeros(9, np.uint32)
    memory = Memory()
    memory.add("y", y, writable=True)
    launch = Launch(grid=(9, 1, 1), block=(1, 1, 1), shared_bytes=4096, params=[0, y.ctypes.data])
    report = emulate(text, launch, memory, checks=Checks(resident_clusters=resident), raises=False)
    return {fault.kind for fault in report.faults}, y.tolist()


@pytest.mark.parametrize("resident", [1, 3])
def test_a_cluster_that_has_not_started_is_taken(resident: int) -> None:
    assert taking(resident) == (set(), list(range(1, 10)))


def test_an_answer_is_read_before_the_next_one_is_written() -> None:
    assert taking(fence="")[0] == {"race"}


def test_an_answer_that_names_no_cluster_has_no_number() -> None:
    # What it is decoded to may only not be used.
    assert taking(decode=_DECODE + "@!%p2 bra DONE;") == (set(), list(range(1, 10)))
    assert taking(decode=_DECODE)[0] == {"out-of-bounds"}


def test_nobody_asks_again_after_an_answer_that_names_no_cluster() -> None:
    assert taking(done="fence.proxy.async.shared::cta; {ask}")[0] == {"protocol"}


# ---- tensor memory ----

_TMEM = """
  tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 32;
  {use}
  bar.warp.sync -1;
  ld.shared.u32 %r5, [%r2];
  {touch}
  {free}
"""
_FREE = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r5, 32;"
_STORE = "tcgen05.st.sync.aligned.32x32b.x2.b32 [%r5], {%r1, %r3}; tcgen05.wait::st.sync.aligned;"
_LOAD = "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r8, %r9}, [%r5]; tcgen05.wait::ld.sync.aligned;"


def tmem(touch: str = "", free: str = _FREE, use: str = "", threads: int = 32) -> Ran:
    return run(_TMEM.format(touch=touch, free=free, use=use), target="sm_100a", threads=threads)


def test_tensor_memory_holds_values() -> None:
    ran = tmem(f"{_STORE} {_LOAD} st.global.u32 [%rd5], %r9;")
    assert not ran.faults
    assert ran.y[:32].tolist() == [4 * i for i in range(32)]


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("protocol", {"free": ""}),
        ("protocol", {"free": _FREE + _FREE}),
        ("protocol", {"free": "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r5, 64;"}),
        ("uninitialised", {"touch": _LOAD}),
        ("protocol", {"touch": "add.s32 %r5, %r5, 32;" + _STORE}),
        ("out-of-bounds", {"touch": "add.s32 %r5, %r5, 512;" + _STORE}),
        ("protocol", {"touch": "add.s32 %r5, %r5, 0x200000;" + _STORE}),
        (
            "protocol",
            {
                "use": "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"
                "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2+4], 32;"
            },
        ),
        ("protocol", {"use": "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r2+4], 32;"}),
        ("deadlock", {"use": "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2+4], 512;"}),
    ],
)
def test_tensor_memory_against_its_rules(kind: str, changes: dict[str, str]) -> None:
    assert tmem(**changes).kinds == {kind}


def test_tensor_memory_is_of_blackwell() -> None:
    assert run(_TMEM.format(touch="", free=_FREE, use="")).kinds == {"unsupported"}
