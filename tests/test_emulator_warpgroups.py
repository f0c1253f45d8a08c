"""The PTX emulator judges what the warps of a warpgroup do together, and the fences of several accumulators."""

from __future__ import annotations

import pytest
from emulated_programs import kinds_of, run

pytestmark = pytest.mark.emulator

_OPERANDS = """
  mov.u32 %r5, 0x3f803f80;
  shl.b32 %r6, %r1, 4; add.s32 %r6, %r2, %r6;
  st.shared.v4.b32 [%r6], {%r5, %r5, %r5, %r5};
  fence.proxy.async.shared::cta;
  bar.sync 0;
  shr.u32 %r7, %r2, 4; cvt.u64.u32 %rd6, %r7;
  mov.u64 %rd7, 0x0000000800010000; or.b64 %rd6, %rd6, %rd7;
  mov.b32 %r10, 0; mov.b32 %r11, 0; mov.b32 %r12, 0; mov.b32 %r13, 0;
  mov.b32 %r14, 0; mov.b32 %r15, 0; mov.b32 %r16, 0; mov.b32 %r17, 0;
  mov.pred %p3, 1;
"""
_FENCE, _COMMIT, _LEAVE = (
    f"wgmma.{what};" for what in ("fence.sync.aligned", "commit_group.sync.aligned", "wait_group.sync.aligned {}")
)
_FIRST, _SECOND = (
    f"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{{registers}}}, %rd6, %rd6, %p3, 1, 1, 0, 0;"
    for registers in ("%r10, %r11, %r12, %r13", "%r14, %r15, %r16, %r17")
)
_USE = "add.u32 %r20, {0}, {0};"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("right", "between", "last"),
    [
        (True, "", _SECOND),
        (False, _USE.format("%r14"), _SECOND),
        (False, "add.u32 %r14, %r14, %r14;", _SECOND),
        (True, _USE.format("%r14") + _FENCE, _SECOND),
        # What is done to one accumulator asks for no fence before a product of the other.
        (True, _USE.format("%r14"), _FIRST),
    ],
)
def test_a_fence_is_for_the_accumulators_of_a_product(right: bool, between: str, last: str, seed: int) -> None:
    wait_all = _LEAVE.format(0)
    in_flight = _OPERANDS + _FENCE + _FIRST + _COMMIT + between + last + _COMMIT + wait_all
    at_rest = _OPERANDS + _FENCE + _FIRST + _SECOND + _COMMIT + wait_all + between + last + _COMMIT + wait_all
    for body in (in_flight, at_rest):
        assert run(body, threads=128, shared=8192, seed=seed).kinds == (set() if right else {"protocol"})


def test_a_product_of_a_part_of_a_warpgroup_is_told() -> None:
    product = _FENCE + _FIRST + _COMMIT + _LEAVE.format(0)
    body = f"{_OPERANDS} setp.gt.u32 %p5, %r1, 95; @%p5 bra E; {product} E:"
    (fault,) = run(body, threads=128, shared=8192).faults
    assert fault.kind == "protocol"
    assert "3 of the 4 warps of warpgroup 0 issue this product" in fault.message


def test_a_warpgroup_asks_for_registers_together() -> None:
    body = "setp.lt.u32 %p5, %r1, {threads}; @!%p5 bra E; setmaxnreg.dec.sync.aligned.u32 40; E:"
    assert not any(kinds_of(body.format(threads=128), threads=256))
    assert kinds_of(body.format(threads=32), threads=256) == [{"protocol"}] * 8
    assert kinds_of(body.format(threads=160), threads=256) == [{"protocol"}] * 8
