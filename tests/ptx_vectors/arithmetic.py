"""Integer and floating-point instructions on the values where they might differ: one program per width."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from ptx_vectors.program import Buffer, Program, output, program

THREADS = 512

_EDGES_16 = [
    0,
    1,
    2,
    3,
    7,
    8,
    15,
    16,
    17,
    31,
    0x7F,
    0x80,
    0xFF,
    0x100,
    0x1234,
    0x7FFE,
    0x7FFF,
    0x8000,
    0x8001,
    0xFFFE,
    0xFFFF,
]
_EDGES_32 = [
    *(0, 1, 2, 3, 7, 31, 32, 33, 63, 64, 255, 256, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000),
    *(0x80000001, 0xFFFFFF80, 0xFFFFFFFE, 0xFFFFFFFF),
]
_EDGES_64 = [
    *(0, 1, 2, 31, 32, 33, 63, 64, 65, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 32, 1 << 33, 0x123456789ABCDEF0),
    *((1 << 63) - 1, 1 << 63, (1 << 63) + 1, (1 << 64) - 2, (1 << 64) - 1),
]
_FLOATS = [
    *(0x00000000, 0x80000000, 0x3F800000, 0xBF800000, 0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF),  # bf16 ties
    *(0x3F801000, 0x3F803000, 0x3F801001, 0x3F800FFF),  # f16 ties
    *(0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F0000, 0x7F7F7FFF, 0x7F7F8000, 0x7F800000, 0xFF800000),  # the largest
    *(0x7FC00000, 0x7F800001, 0xFFC12345, 0x7FFFFFFF),  # NaN
    *(0x00000001, 0x80000001, 0x00800000, 0x007FFFFF, 0x00010000, 0x00008000, 0x00008001),  # denormal
    *(0x33800000, 0x33000000, 0x33000001, 0x33C00000, 0x38800000, 0x387FFFFF, 0x387FE000),  # denormal as f16
    *(0x477FE000, 0x477FEFFF, 0x477FF000, 0x47800000),  # 65504, just below the tie, 65520, 65536
    *(0x43E00000, 0x43E80000, 0x43E80001, 0x43F00000, 0x47600000, 0x3B000000, 0x3A800000),  # fp8: 448, 464, ...
]


@dataclasses.dataclass(frozen=True)
class _Family:
    name: str
    operands: np.ndarray
    """(3, THREADS): a, b and c."""
    instructions: Sequence[str]
    """With {d}, {a}, {b}, {c} for 32-bit, {dl}, {al}, ... for 64-bit and {dh}, {ah}, ... for 16-bit registers."""


def _pairs(edges: Sequence[int], dtype: type[np.generic], seed: int) -> np.ndarray:
    """Pairs of edges as far as there is room, then random values; a third operand from both."""
    rng = np.random.RandomState(seed)
    pairs = np.array(list(itertools.product(edges, edges)), np.uint64)[:THREADS]
    bits = 8 * np.dtype(dtype).itemsize
    count = THREADS - len(pairs)
    rest = np.frombuffer(rng.bytes(16 * count), np.uint64).reshape(count, 2) & np.uint64(2**bits - 1)
    a, b = np.concatenate([pairs, rest]).T
    c = np.where(
        rng.random_sample(THREADS) < 0.5, rng.choice(np.array(edges, np.uint64), THREADS), rng.permutation(a ^ (b << 1))
    )
    return np.stack([a, b, c]).astype(dtype)


def _compare(test: str, suffix: str = "") -> str:
    return f"setp.{test} 	%p1, {{a{suffix}}}, {{b{suffix}}};\n\tselp.b32 	{{d}}, 1, 0, %p1;"


def _families() -> Iterator[_Family]:
    yield _Family(
        "integer_32",
        _pairs(_EDGES_32, np.uint32, 1),
        [
            *(
                f"{op} 	{{d}}, {{a}}, {{b}};"
                for op in (
                    "add.s32",
                    "sub.s32",
                    "mul.lo.s32",
                    "mul.hi.s32",
                    "mul.hi.u32",
                    "and.b32",
                    "or.b32",
                    "xor.b32",
                    "shl.b32",
                    "shr.u32",
                    "shr.s32",
                    "min.s32",
                    "max.s32",
                    "min.u32",
                    "max.u32",
                    "min.relu.s32",
                )
            ),
            *(f"{op} 	{{d}}, {{a}};" for op in ("not.b32", "neg.s32", "popc.b32", "clz.b32", "brev.b32", "abs.s32")),
            *(f"{op} 	{{d}}, {{a}}, {{b}}, {{c}};" for op in ("mad.lo.s32", "mad.hi.s32", "mad.hi.u32", "prmt.b32")),
            *(f"{op} 	{{dl}}, {{a}}, {{b}};" for op in ("mul.wide.s32", "mul.wide.u32")),
            *(
                f"cvt.s64.s32 	{{bl}}, {{c}};\n\t{op} 	{{dl}}, {{a}}, {{b}}, {{bl}};"
                for op in ("mad.wide.s32", "mad.wide.u32")
            ),
            *(_compare(f"{test}.s32") for test in ("lt", "le", "gt", "ge")),
            *(_compare(f"{test}.u32") for test in ("lt", "le", "gt", "ge")),
            *(_compare(f"{test}.b32") for test in ("eq", "ne")),
            "setp.lt.s32 	%p1, {a}, {b};\n\tselp.b32 	{d}, {b}, {c}, %p1;",
            "setp.lt.s32 	%p1, {a}, {b};\n\tsetp.lt.u32 	%p2, {b}, {c};\n\tand.pred 	%p3, %p1, %p2;\n"
            "\tor.pred 	%p4, %p1, %p2;\n\tnot.pred 	%p5, %p4;\n\tselp.b32 	{d}, 1, 0, %p3;\n"
            "\t@%p5 add.s32 	{d}, {d}, 2;\n\t@!%p4 add.s32 	{d}, {d}, 4;",
            "mov.b64 	{dl}, {{{a}, {b}}};",
            # Quotients by zero are unspecified.
            *(
                f"max.u32 	{{b}}, {{b}}, 1;\n\t{op} 	{{d}}, {{a}}, {{b}};"
                for op in ("div.s32", "div.u32", "rem.s32", "rem.u32")
            ),
        ],
    )
    yield _Family(
        "integer_64",
        _pairs(_EDGES_64, np.uint64, 2),
        [
            *(
                f"{op} 	{{dl}}, {{al}}, {{bl}};"
                for op in (
                    "add.s64",
                    "sub.s64",
                    "mul.lo.s64",
                    "and.b64",
                    "or.b64",
                    "xor.b64",
                    "min.s64",
                    "max.s64",
                )
            ),
            *(
                f"cvt.u32.u64 	{{b}}, {{bl}};\n\t{op} 	{{dl}}, {{al}}, {{b}};"
                for op in ("shl.b64", "shr.u64", "shr.s64")
            ),
            "not.b64 	{dl}, {al};",
            "neg.s64 	{dl}, {al};",
            "mad.lo.s64 	{dl}, {al}, {bl}, {cl};",
            *(_compare(f"{test}.u64", "l") for test in ("lt", "gt")),
            *(_compare(f"{test}.s64", "l") for test in ("lt", "ge")),
            _compare("eq.b64", "l"),
            "setp.gt.u64 	%p1, {al}, {bl};\n\tselp.b64 	{dl}, {bl}, {cl}, %p1;",
            "cvt.u32.u64 	{d}, {al};",
            "mov.b64 	{{{d}, {a}}}, {al};\n\txor.b32 	{d}, {d}, {a};",
            "mov.b64 	{{_, {d}}}, {al};",
        ],
    )
    yield _Family(
        "integer_16",
        _pairs(_EDGES_16, np.uint16, 3),
        [
            *(
                f"{op} 	{{dh}}, {{ah}}, {{bh}};\n\tcvt.u32.u16 	{{d}}, {{dh}};"
                for op in (
                    "add.s16",
                    "sub.s16",
                    "mul.lo.s16",
                    "and.b16",
                    "or.b16",
                    "xor.b16",
                )
            ),
            *(
                f"cvt.u32.u16 	{{b}}, {{bh}};\n\t{op} 	{{dh}}, {{ah}}, {{b}};\n\tcvt.u32.u16 	{{d}}, {{dh}};"
                for op in ("shl.b16", "shr.u16", "shr.s16")
            ),
            "not.b16 	{dh}, {ah};\n\tcvt.u32.u16 	{d}, {dh};",
            "mul.wide.s16 	{d}, {ah}, {bh};",
            "mul.wide.u16 	{d}, {ah}, {bh};",
            *(
                f"cvt.{to}.{of} 	{{d}}, {{ah}};"
                for to, of in (("u32", "u16"), ("s32", "s16"), ("s32", "s8"), ("u32", "u8"))
            ),
            "cvt.s16.s8 	{dh}, {ah};\n\tcvt.u32.u16 	{d}, {dh};",
            "cvt.s64.s16 	{dl}, {ah};",
            "cvt.u64.u16 	{dl}, {ah};",
            *(_compare(f"{test}", "h") for test in ("ne.b16", "eq.b16", "lt.s16", "lt.u16")),
            "mov.b32 	{d}, {{{ah}, {bh}}};",
        ],
    )
    yield _Family(
        "integer_conversions",
        _pairs(_EDGES_32, np.uint32, 4),
        [
            "cvt.s64.s32 	{dl}, {a};",
            "cvt.u64.u32 	{dl}, {a};",
            "cvt.u16.u32 	{dh}, {a};\n\tcvt.u32.u16 	{d}, {dh};",
            "cvt.s32.s8 	{d}, {a};",
            "cvt.rn.f32.s32 	{d}, {a};",
            "cvt.rn.f32.u32 	{d}, {a};",
        ],
    )
    rng = np.random.RandomState(5)
    pairs = list(itertools.product(_FLOATS, _FLOATS))
    chosen = np.array(pairs, np.uint32)[rng.permutation(len(pairs))[: THREADS - 192]]
    near = rng.randint(0x3F000000, 0x40800000, (64, 2), np.uint32)
    near[:, 0] = near[:, 0] & 0xFFFFF000 | 0x800  # near and at ties
    anything = rng.randint(0, 2**32, (128, 2), np.uint64).astype(np.uint32)
    a, b = np.concatenate([chosen, near, anything]).T
    floats = np.stack([a, b, np.roll(b, 7)])
    yield _Family(
        "conversions_of_floats",
        floats,
        [
            "cvt.rn.bf16x2.f32 	{d}, {a}, {b};",
            "cvt.rn.f16x2.f32 	{d}, {a}, {b};",
            *(
                f"cvt.rn.satfinite.{kind}x2.f32 	{{dh}}, {{a}}, {{b}};\n\tcvt.u32.u16 	{{d}}, {{dh}};"
                for kind in ("e4m3", "e5m2")
            ),
            *(f"cvt.rn.{kind}.f32 	{{dh}}, {{a}};\n\tcvt.u32.u16 	{{d}}, {{dh}};" for kind in ("bf16", "f16")),
            *(f"cvt.u16.u32 	{{dh}}, {{a}};\n\tcvt.f32.{kind} 	{{d}}, {{dh}};" for kind in ("bf16", "f16")),
            "cvt.rzi.s32.f32 	{d}, {a};",
        ],
    )
    yield _Family(
        "float_arithmetic",
        floats,
        [
            *(f"{op} 	{{d}}, {{a}}, {{b}};" for op in ("add.f32", "sub.f32", "mul.f32", "min.f32", "max.f32")),
            "fma.rn.f32 	{d}, {a}, {b}, {c};",
            "neg.f32 	{d}, {a};",
            "abs.f32 	{d}, {a};",
            *(_compare(f"{test}.f32") for test in ("lt", "ge", "eq", "neu")),
        ],
    )


_REGISTERS = {
    f"{name}{suffix}": f"%{letter}{i}"
    for i, name in enumerate("dabc")
    for suffix, letter in (("", "r"), ("l", "d"), ("h", "h"))
}


def _program(family: _Family) -> Program:
    """Each thread runs every instruction on its operands, loaded anew, and stores 64 bits of result."""
    bits = 8 * family.operands.itemsize
    suffix, load = {16: ("h", "ld.global.b16"), 32: ("", "ld.global.b32"), 64: ("l", "ld.global.b64")}[bits]
    body = [
        "	mul.wide.u32 	%d10, %thread, 8;",
        "	add.s64 	%d11, %a1, %d10;",
        f"	mul.wide.u32 	%d12, %thread, {bits // 8};",
        "	add.s64 	%d13, %a0, %d12;",
    ]
    for i, instruction in enumerate(family.instructions):
        for j, name in enumerate("abc"):
            body.append(f"	{load} 	{_REGISTERS[name + suffix]}, [%d13+{j * THREADS * bits // 8}];")
        body.append("	" + instruction.format(**_REGISTERS))
        if "{dl}" not in instruction:
            body.append("	cvt.u64.u32 	%d0, %r0;")
        body.append(f"	st.global.b64 	[%d11+{8 * THREADS * i}], %d0;")
    results = output(THREADS * len(family.instructions), np.uint64)
    return program(family.name, (Buffer(family.operands), results), "\n".join(body), threads=THREADS)


def programs() -> Iterator[Program]:
    """Every program of this module."""
    return map(_program, _families())
