"""Arithmetic of the PTX emulator with modifiers, conversions at their limits, atomics: by the PTX ISA."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from emulated_programs import HEAD, run
from ptx_emulator import Launch, Memory, emulate

pytestmark = pytest.mark.emulator


def f32(value: float) -> str:
    """An immediate."""
    return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08X}"


def f64(value: float) -> str:
    """An immediate."""
    return f"0d{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"


INF, NAN, DENORMAL = float("inf"), float("nan"), 1e-45


def bits32(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


_CASES = [
    # .sat and .ftz
    (f"mov.f32 %f1, {f32(0.75)}; add.sat.f32 %f2, %f1, %f1; mov.b32 %r5, %f2;", bits32(1.0)),
    (f"mov.f32 %f1, {f32(-0.75)}; add.sat.f32 %f2, %f1, %f1; mov.b32 %r5, %f2;", 0),
    (f"mov.f32 %f1, {f32(NAN)}; mul.sat.f32 %f2, %f1, %f1; mov.b32 %r5, %f2;", 0),
    (f"mov.f32 %f1, {f32(2)}; fma.rn.sat.f32 %f2, %f1, %f1, %f1; mov.b32 %r5, %f2;", bits32(1.0)),
    ("mov.u32 %r6, 0x7fffffff; add.sat.s32 %r5, %r6, %r6;", 0x7FFFFFFF),
    ("mov.u32 %r6, 0x80000000; mov.u32 %r7, 1; sub.sat.s32 %r5, %r6, %r7;", 0x80000000),
    (f"mov.f32 %f1, {f32(DENORMAL)}; add.ftz.f32 %f2, %f1, %f1; mov.b32 %r5, %f2;", 0),
    (f"mov.f32 %f1, {f32(-DENORMAL)}; mul.ftz.f32 %f2, %f1, {f32(1e38)}; mov.b32 %r5, %f2;", bits32(-0.0)),
    (f"mov.f32 %f1, {f32(1e-38)}; mul.ftz.f32 %f2, %f1, {f32(0.5)}; mov.b32 %r5, %f2;", 0),
    (f"mov.f32 %f1, {f32(DENORMAL)}; add.f32 %f2, %f1, %f1; mov.b32 %r5, %f2;", 2),
    (f"mov.f32 %f1, {f32(DENORMAL)}; setp.gt.ftz.f32 %p1, %f1, {f32(0)}; selp.u32 %r5, 1, 0, %p1;", 0),
    (f"mov.f32 %f1, {f32(DENORMAL)}; setp.gt.f32 %p1, %f1, {f32(0)}; selp.u32 %r5, 1, 0, %p1;", 1),
    # Comparisons
    ("mov.b16 %h1, 0xBC00; mov.b16 %h2, 0x3C00; setp.lt.f16 %p1, %h1, %h2; selp.u32 %r5, 1, 0, %p1;", 1),
    ("mov.b16 %h1, 0x7E00; setp.eq.f16 %p1, %h1, %h1; selp.u32 %r5, 1, 0, %p1;", 0),
    ("setp.lt.u32 %p1, %r1, 32; setp.lt.and.u32 %p1|%p2, %r1, 0, %p1; selp.u32 %r5, 1, 0, %p2;", 1),
    # Floating point to integers
    *(
        (f"mov.f32 %f1, {f32(value)}; cvt.{how}.{kind}.f32 %r5, %f1;", want)
        for how, kind, value, want in (
            ("rzi", "s32", 3e9, 0x7FFFFFFF),
            ("rzi", "s32", -3e9, 0x80000000),
            ("rzi", "u32", 5e9, 0xFFFFFFFF),
            ("rzi", "u32", -1.5, 0),
            ("rzi", "s32", NAN, 0),
            ("rzi", "u32", NAN, 0),
            ("rni", "s32", 2.5, 2),
            ("rni", "s32", -2.5, 0xFFFFFFFE),
            ("rmi", "s32", -2.5, 0xFFFFFFFD),
            ("rpi", "s32", -2.5, 0xFFFFFFFE),
            ("rpi", "u32", 2.25, 3),
            ("rzi", "s8", 300.0, 127),
            ("rzi", "s8", -300.0, 0xFFFFFF80),
            ("rzi", "u8", 300.0, 255),
            ("rzi", "s16", -3e9, 0xFFFF8000),
        )
    ),
    (f"mov.f32 %f1, {f32(NAN)}; cvt.rzi.s64.f32 %rd6, %f1; shr.u64 %rd6, %rd6, 32; cvt.u32.u64 %r5, %rd6;", 1 << 31),
    (f"mov.f32 %f1, {f32(NAN)}; cvt.rzi.u64.f32 %rd6, %f1; shr.u64 %rd6, %rd6, 32; cvt.u32.u64 %r5, %rd6;", 1 << 31),
    (f"mov.f64 %d1, {f64(NAN)}; cvt.rzi.s32.f64 %r5, %d1;", 1 << 31),
    (f"mov.f32 %f1, {f32(INF)}; cvt.rzi.s64.f32 %rd6, %f1; shr.u64 %rd6, %rd6, 32; cvt.u32.u64 %r5, %rd6;", 0x7FFFFFFF),
    # Whole numbers as floating point
    *(
        (f"mov.f32 %f1, {f32(value)}; cvt.{how}.f32.f32 %f2, %f1; mov.b32 %r5, %f2;", bits32(want))
        for how, value, want in (
            ("rni", 2.5, 2),
            ("rzi", -2.5, -2),
            ("rmi", -2.5, -3),
            ("rpi", 2.5, 3),
            ("rpi", -0.5, -0.0),
        )
    ),
    # Integers to floating point, rounded once
    (
        f"mov.u64 %rd6, {(2**24 + 1) * 2**30 + 1}; cvt.rn.f32.s64 %f2, %rd6; mov.b32 %r5, %f2;",
        bits32((2**24 + 2) * 2.0**30),
    ),
    (f"mov.u64 %rd6, {2**64 - 1}; cvt.rn.f32.u64 %f2, %rd6; mov.b32 %r5, %f2;", bits32(2.0**64)),
    ("mov.u32 %r6, -5; cvt.rn.f32.s32 %f2, %r6; mov.b32 %r5, %f2;", bits32(-5)),
    ("mov.u32 %r6, -5; cvt.rn.f64.s32 %d1, %r6; cvt.rn.f32.f64 %f2, %d1; mov.b32 %r5, %f2;", bits32(-5)),
    (f"mov.f32 %f1, {f32(1.5)}; cvt.sat.f32.f32 %f2, %f1; mov.b32 %r5, %f2;", bits32(1.0)),
    (f"mov.f32 %f1, {f32(NAN)}; cvt.sat.f32.f32 %f2, %f1; mov.b32 %r5, %f2;", 0),
    (f"mov.f32 %f1, {f32(DENORMAL)}; cvt.ftz.f64.f32 %d1, %f1; cvt.rn.f32.f64 %f2, %d1; mov.b32 %r5, %f2;", 0),
    # Integers to integers
    ("mov.u32 %r6, 300; cvt.sat.u8.s32 %r5, %r6;", 255),
    ("mov.u32 %r6, -300; cvt.sat.u8.s32 %r5, %r6;", 0),
    ("mov.u32 %r6, -300; cvt.sat.s8.s32 %r5, %r6;", 0xFFFFFF80),
    ("mov.u32 %r6, 0xffffffff; cvt.sat.s32.u32 %r5, %r6;", 0x7FFFFFFF),
    ("mov.u64 %rd6, -1; cvt.sat.u32.s64 %r5, %rd6;", 0),
    ("mov.u64 %rd6, -1; cvt.sat.u32.u64 %r5, %rd6;", 0xFFFFFFFF),
    ("mov.u32 %r6, 300; cvt.s32.s8 %r5, %r6;", 44),
    # Pairs
    (f"mov.f32 %f1, {f32(NAN)}; mov.f32 %f2, {f32(-1)}; cvt.rn.relu.bf16x2.f32 %r5, %f1, %f2;", 0x7FFF0000),
]


@pytest.mark.parametrize(("body", "want"), _CASES)
def test_values(body: str, want: int) -> None:
    ran = run(body + "st.global.u32 [%rd5], %r5;")
    assert not ran.faults
    assert [hex(value) for value in set(ran.y[:32].tolist())] == [hex(want)]


@pytest.mark.parametrize(
    ("kind", "register", "start", "add"),
    [
        ("f32", "%f1", struct.pack("<f", 0.5), f32(1.5)),
        ("f64", "%d1", struct.pack("<d", 0.5), f64(1.5)),
        ("u32", "%r5", struct.pack("<I", 5), "7"),
        ("u64", "%rd6", struct.pack("<Q", 1 << 40), "7"),
    ],
)
def test_atomic_sums(kind: str, register: str, start: bytes, add: str) -> None:
    # 32 lanes add to one place, in some order.
    y = np.zeros(8, np.uint8)
    y[: len(start)] = np.frombuffer(start, np.uint8)
    memory = Memory()
    memory.add("y", y, writable=True)
    body = f"mov.{kind.replace('u', 'b')} {register}, {add}; red.global.add.{kind} [%rd2], {register};"
    emulate(HEAD.format(target="sm_90a", body=body), Launch(params=[0, y.ctypes.data]), memory)
    dtype = np.dtype(kind.replace("u", "<u").replace("f", "<f").replace("32", "4").replace("64", "8"))
    (value,) = y[: len(start)].view(dtype)
    (before,) = np.frombuffer(start, dtype)
    assert value == before + 32 * (1.5 if "f" in kind else 7)


def test_a_matrix_that_is_loaded_over_its_addresses() -> None:
    body = """
  mul.lo.u32 %r7, %r1, 0x10001; st.shared.u32 [%r4], %r7; st.shared.u32 [%r4+128], %r7; bar.warp.sync -1;
  and.b32 %r8, %r1, 15; shl.b32 %r8, %r8, 4; add.s32 %r8, %r2, %r8;
  ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r8, %r5}, [%r8];
  st.global.u32 [%rd5], %r5;
"""
    ran = run(body)
    assert not ran.faults
    assert ran.y[:32].tolist() == [0x10001 * i for i in range(32)]


def test_memory_that_is_said_to_be_constant() -> None:
    read, write = "ld.global.nc.u32 %r5, [%rd2];", "st.global.u32 [%rd5], %r1;"
    assert run(f"{write} bar.warp.sync -1; {read}").kinds == {"protocol"}
    assert not run(f"{write} bar.warp.sync -1; {read.replace('.nc', '')}").faults
    assert not run("ld.global.nc.u32 %r5, [%rd4]; st.global.u32 [%rd5], %r5;").faults
    early = "ld.global.nc.u32 %r5, [%rd4]; bar.warp.sync -1; st.global.u32 [%rd4], %r5;"
    assert run(early, x_writable=True).kinds == {"protocol"}
