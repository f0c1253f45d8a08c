"""Every modifier, operand and width of an instruction is understood by the PTX emulator, or refused with its line."""

from __future__ import annotations

import pytest
from emulated_programs import HEAD, run
from ptx_emulator import Launch, Memory, emulate

pytestmark = pytest.mark.emulator

_TMA = "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
_STORE = "cp.async.bulk.global.shared::cta.bulk_group"

REFUSED = [
    # Modifiers that do not exist, or that the emulator does not honour.
    "fence.prxy.async;",
    "fence.proxy.async.shared;",
    "fence.acq_rel;",
    "membar.all;",
    "bar.snyc 0;",
    "bar.red.popc.u32 %r5, 0, %p1;",
    "barrier.cluster.arrive.relaxd;",
    "bar.warp.snyc -1;",
    "wgmma.fence.sync.alignd;",
    "wgmma.commit_group.sync;",
    "mbarrier.arrive.expct_tx.shared.b64 _, [%r2], 2;",
    "mbarrier.arrive.acquire.shared.b64 _, [%r2];",
    "mbarrier.init.shared.b32 [%r2], 2;",
    "mbarrier.try_wait.party.shared.b64 %p1, [%r2], 0;",
    "prefetch.globl.L2 [%rd1];",
    "prefetch.global.L3 [%rd1];",
    "atom.global.add.sometimes.u32 %r5, [%rd2], %r1;",
    "atom.global.add.noftz.f16 %h1, [%rd2], %h1;",
    "atom.global.min.f32 %f1, [%rd2], %f1;",
    "red.global.exch.b32 [%rd2], %r1;",
    f"{_STORE}.cp_mask [%rd2], [%r2], 128, %h1;",
    "cp.async.bulk.commit;",
    "cp.async.wait_group 0;",
    "cp.async.ca.shared.global [%r2], [%rd1], 16;",
    f"{_TMA}.im2col [%r2], [%rd1, {{%r1, %r1}}], [%r2];",
    "ld.global.acquire.relaxed.u32 %r5, [%rd4];",
    "ld.global.L1::sometimes.u32 %r5, [%rd4];",
    "ld.shared.nc.u32 %r5, [%r4];",
    "st.global.nc.u32 [%rd5], %r1;",
    "st.acquire.global.u32 [%rd5], %r1;",
    "shfl.sync.bfly.b64 %rd6, %rd7, 1, 31, -1;",
    "elect.snyc %r5|%p1, -1;",
    "add.u32.sat %r5, %r1, %r1;",
    "add.sat.u32 %r5, %r1, %r1;",
    "add.rz.f32 %f1, %f1, %f1;",
    "mul.s32 %r5, %r1, %r1;",
    "div.approx.f32 %f1, %f1, %f1;",
    "min.NaN.f32 %f1, %f1, %f1;",
    "setp.lt.ltu.u32 %p1, %r1, 5;",
    "setp.ltu.u32 %p1, %r1, 5;",
    "cvt.rz.f32.f64 %f1, %d1;",
    "cvt.rn.f16.f64 %h1, %d1;",
    "cvt.rn.f16.s32 %h1, %r1;",
    "cvt.f32.s32 %f1, %r1;",
    "cvt.s32.f32 %r5, %f1;",
    "cvt.rn.satfinite.f16.f32 %h1, %f1;",
    "cvt.rn.tf32.f32 %r5, %f1;",
    "cvt.rn.e4m3x2.f32 %h1, %f1, %f2;",
    "ret.later;",
    "setmaxnreg.dec.sync.u32 40;",
    "tcgen05.wait::ld;",
    "tcgen05.alloc.cta_group::3.sync.aligned.shared::cta.b32 [%r2], 32;",
    # Operands: too few, too many, of the wrong width, where none can be.
    "add.u32 %r5, %r1;",
    "add.u32 %r5, %r1, %r1, %r1;",
    "fma.rn.f32 %f1, %f1, %f1;",
    "mad.lo.u32 %r5, %r1, %r1;",
    "add.u32 %p1, %r1, %r1;",
    "add.u64 %r5, %rd1, %rd1;",
    "add.u32 5, %r1, %r1;",
    "add.u32 %tid.x, %r1, %r1;",
    "add.u32 %r5, _, %r1;",
    "add.u16 %r5, %r1, %r1;",
    "mov.u64 %r5, %rd1;",
    "mov.u32 %rd1, %r5;",
    "mov.b64 {%r5, %r6, %r7}, %rd1;",
    "mov.b64 {%h1, %h2}, %rd1;",
    "selp.u32 %r5, 1, 0, %r1;",
    "setp.lt.u32 %r5, %r1, 5;",
    "setp.lt.and.u32 %p1, %r1, 5;",
    "cvt.u32.u16 %r5, %p1;",
    "cvt.rn.f32.s32 %rd1, %r1;",
    "popc.b64 %rd1, %rd1;",
    "shl.b64 %rd1, %rd1, %rd2;",
    "ld.global.u32 %h1, [%rd4];",
    "ld.global.v2.u32 %r5, [%rd4];",
    "ld.global.v4.u32 {%r5, %r6}, [%rd4];",
    "ld.global.u32 %r5, [%h1];",
    "ld.global.v8.b64 {%rd1, %rd1, %rd1, %rd1, %rd1, %rd1, %rd1, %rd1}, [%rd4];",
    "st.shared.v2.u32 [%r4], {%r1, _};",
    "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r2], {%r1, %r1};",
    "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r5}, [%r2];",
    "shfl.sync.bfly.b32 %r5, %r1, 1, 31;",
    "bar.sync;",
    "bar.arrive 1;",
    "bar.sync 1, 32, 32;",
    "mbarrier.init.shared.b64 [%r2];",
    "mbarrier.arrive.expect_tx.shared.b64 _, [%r2];",
    "mbarrier.test_wait.parity.shared.b64 %p1, [%r2], 0, 100;",
    "mbarrier.try_wait.parity.shared.b64 %r5, [%r2], 0;",
    "atom.global.cas.b32 %r5, [%rd2], %r1;",
    f"{_TMA} [%r2], [%rd1, {{%r1, %r1, %r1}}], [%r2];",
    f"{_TMA} [%r2], [%rd1, {{%r1, %r1}}], [%r2], %h1;",
    f"{_STORE} [%rd2], [%r2];",
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r5, %r6, %r7}, %rd1, %rd1, 1, 1, 1, 0, 0;",
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r5, %r6, %r7, %r8}, %rd1, %rd1, 1, 1, 1;",
    "wgmma.mma_async.sync.aligned.m64n8k8.f32.bf16.bf16 {%r5, %r6, %r7, %r8}, %rd1, %rd1, 1, 1, 1, 0, 0;",
    "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r5}, [%r2];",
    "@%r1 bra E; E:",
    "add.u32 %r64, %r1, 1;",
    "add.u32 %r5, %r100, 1;",
    "add.u32 %q5, %r1, 1;",
]


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_not_understood_is_refused(text: str) -> None:
    (fault,) = run(f"add.s32 %r5, %r1, 1;\n{text}", target="sm_100a").faults
    assert fault.kind == "unsupported"
    assert fault.line == 19
    assert fault.instruction == text.split(";", maxsplit=1)[0]


@pytest.mark.parametrize(
    "text",
    [
        "mov.u32 %r5, 1; st.global.u32 [%rd5+-4], %r5;",
        "mov.u32 %r5, 1; st.global.u32 [%rd5 + -4], %r5;",
        "mov.u32 %r5, 1; st.global.u32 [%rd5+-0x4], %r5;",
        "mov.u32 %r5, 1; st.global.u32 [%rd5-4], %r5;",
    ],
)
def test_offsets(text: str) -> None:
    ran = run("add.s64 %rd5, %rd5, 4;" + text)
    assert not ran.faults
    assert ran.y[:32].tolist() == [1] * 32


def test_a_special_register_of_two_widths() -> None:
    ran = run("mov.u64 %rd6, smem; cvt.u32.u64 %r6, %rd6; sub.u32 %r5, %r6, %r2; st.global.u32 [%rd5], %r5;")
    assert not ran.faults
    assert not ran.y[:32].any()


def test_an_undefined_cache_policy() -> None:
    assert run("ld.global.L2::cache_hint.u32 %r5, [%rd4], %rd9;").kinds == {"uninitialised"}
    assert not run("mov.u64 %rd9, 0; ld.global.L2::cache_hint.u32 %r5, [%rd4], %rd9;").faults


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("kernel k has no closing brace", ("}\n", "")),
        ("a statement of kernel k has no semicolon", ("ret;\n}", "ret")),
        ("there is a label L already", ("ret;", "L: ret; L: ret;")),
    ],
)
def test_text_that_is_broken(message: str, change: tuple[str, str]) -> None:
    text = HEAD.format(target="sm_90a", body="")
    assert change[0] in text
    with pytest.raises(ValueError, match=rf"^line \d+: .*{message}"):
        emulate(text.replace(*change), Launch(params=[0, 0]), Memory())


def test_registers_up_to_the_last_one_and_labels_of_blocks() -> None:
    assert not run("add.u32 %r0, %r1, 1; add.u32 %r63, %r0, 1; { L: } { L: }").faults
