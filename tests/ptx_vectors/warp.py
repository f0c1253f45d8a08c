"""Instructions in which the lanes of a warp take part together, and matrices that they store and load."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ptx_vectors.program import Buffer, Program, copy_from_shared, copy_to_shared, output, program


def _shuffles() -> Program:
    """Every mode with lane operands that are fixed, that differ by lane and that run past the warp, in segments too."""
    rng = np.random.RandomState(11)
    values = rng.randint(0, 2**32, 32, np.uint64).astype(np.uint32)
    lanes = np.stack([rng.randint(0, 64, 32), rng.permutation(32), np.arange(32)[::-1]]).astype(np.uint32)
    cases = [
        *(("idx", b, c) for b in ("0", "31", "5", "%r1", "%r2", "%r3") for c in (0x1F, 0x181F, 0x1C03, 0x0F)),
        *(("up", b, c) for b in ("1", "2", "4", "8", "16", "31", "32", "%r1") for c in (0, 0x1800, 0x1000, 5)),
        *(("down", b, c) for b in ("1", "16", "%r1") for c in (0x1F, 0x181F, 0x0F)),
        *(("bfly", b, c) for b in ("1", "2", "4", "16", "31", "%r1") for c in (0x1F, 0x181F, 0x0F)),
    ]
    body = [
        "	mul.wide.u32 	%d0, %lane, 4;",
        "	add.s64 	%d1, %a0, %d0;",
        "	ld.global.b32 	%r0, [%d1];",
    ]
    body += [
        "	add.s64 	%d2, %a1, %d0;",
        *(f"	ld.global.b32 	%r{j + 1}, [%d2+{128 * j}];" for j in range(3)),
    ]
    body += ["	mul.wide.u32 	%d3, %lane, 8;", "	add.s64 	%d4, %a2, %d3;"]
    for i, (mode, b, c) in enumerate(cases):
        body += [
            f"	shfl.sync.{mode}.b32 	%r10|%p1, %r0, {b}, {c}, -1;",
            "	selp.b32 	%r11, 1, 0, %p1;",
            f"	st.global.v2.b32 	[%d4+{256 * i}], {{%r10, %r11}};",
        ]
    return program("shuffles", (Buffer(values), Buffer(lanes), output(64 * len(cases))), "\n".join(body))


def _votes() -> Program:
    """Ballots and elections of the whole warp and, after a branch, of part of it."""
    predicates = np.random.RandomState(12).randint(0, 2, (6, 32)).astype(np.uint32)
    predicates[0], predicates[1] = 0, 1
    body = ["	mul.wide.u32 	%d0, %lane, 4;", "	add.s64 	%d1, %a0, %d0;", "	add.s64 	%d2, %a1, %d0;"]
    row = 0

    def store(register: str) -> None:
        nonlocal row
        body.append(f"	st.global.b32 	[%d2+{128 * row}], {register};")
        row += 1

    def vote(mask: int) -> None:
        for i in range(6):
            body.extend([f"	ld.global.b32 	%r0, [%d1+{128 * i}];", "	setp.ne.b32 	%p0, %r0, 0;"])
            body.append(f"	vote.sync.ballot.b32 	%r1, %p0, {mask};")
            store("%r1")
            body.append("	popc.b32 	%r1, %r1;")
            store("%r1")
            for mode in ("any", "all", "uni"):
                body.extend([f"	vote.sync.{mode}.pred 	%p1, %p0, {mask};", "	selp.b32 	%r1, 1, 0, %p1;"])
                store("%r1")
        body.extend([f"	elect.sync 	%r1|%p1, {mask};", "	selp.b32 	%r2, 1, 0, %p1;"])
        store("%r1")
        store("%r2")

    vote(-1)
    body += ["	setp.lt.u32 	%p9, %lane, 5;", "	@%p9 bra 	LOW;"]
    vote(-32)
    body += ["	bra.uni 	JOIN;", "LOW:"]
    row_of_low = row
    vote(31)
    body += ["JOIN:", "	bar.warp.sync 	-1;"]
    store("%lane")
    assert row - row_of_low == 33
    return program("votes", (Buffer(predicates), output(32 * row)), "\n".join(body))


def _special_registers() -> Program:
    """What a thread knows about itself."""
    names = (
        "tid.x",
        "tid.y",
        "tid.z",
        "ntid.x",
        "ntid.y",
        "laneid",
        "ctaid.x",
        "ctaid.y",
        "nctaid.x",
        "cluster_ctarank",
    )
    body = ["	mul.wide.u32 	%d0, %thread, 4;", "	add.s64 	%d1, %a0, %d0;"]
    for i, name in enumerate(names):
        body += [f"	mov.u32 	%r0, %{name};", f"	st.global.b32 	[%d1+{4 * 96 * i}], %r0;"]
    return program("special_registers", (output(96 * len(names)),), "\n".join(body), threads=96)


def _vectors() -> Program:
    """Vector loads and stores in global and shared memory, and the order of their registers."""
    data = np.random.RandomState(13).randint(0, 2**32, 32 * 16, np.uint64).astype(np.uint32)
    body = """
	mul.wide.u32 	%d0, %lane, 64;
	add.s64 	%d1, %a0, %d0;
	add.s64 	%d2, %a1, %d0;
	shl.b32 	%r0, %lane, 6;
	add.s32 	%r0, %base, %r0;
	ld.global.v4.b32 	{%r1, %r2, %r3, %r4}, [%d1];
	ld.global.v2.b32 	{%r5, %r6}, [%d1+16];
	ld.global.v2.b64 	{%d3, %d4}, [%d1+32];
	ld.global.b64 	%d5, [%d1+24];
	ld.global.b16 	%h0, [%d1+50];
	st.shared.v4.b32 	[%r0], {%r4, %r3, 7, %r1};
	st.shared.v2.b64 	[%r0+16], {%d4, %d3};
	st.shared.v2.b32 	[%r0+32], {%r6, %r5};
	st.shared.b64 	[%r0+40], %d5;
	st.shared.b16 	[%r0+48], %h0;
	st.shared.b16 	[%r0+50], 513;
	st.shared.b32 	[%r0+52], %r2;
	st.shared.v2.b32 	[%r0+56], {-1, %r2};
	bar.warp.sync 	-1;
	ld.shared.v4.b32 	{%r10, %r11, %r12, %r13}, [%r0];
	ld.shared.v2.b64 	{%d10, %d11}, [%r0+16];
	ld.shared.v2.b32 	{%r14, %r15}, [%r0+32];
	ld.shared.b32 	%r16, [%r0+40];
	ld.shared.b32 	%r17, [%r0+48];
	ld.shared.v2.b32 	{%r18, %r19}, [%r0+56];
	st.global.v4.b32 	[%d2], {%r10, %r11, %r12, %r13};
	st.global.v2.b64 	[%d2+16], {%d10, %d11};
	st.global.v2.b32 	[%d2+32], {%r14, %r15};
	st.global.b32 	[%d2+40], %r16;
	st.global.L1::no_allocate.b32 	[%d2+44], %r17;
	st.global.v4.b32 	[%d2+48], {%r18, %r19, 5, -5};
"""
    return program("vectors", (Buffer(data), output(32 * 16)), body, shared_bytes=2048)


def _matrices() -> Iterator[Program]:
    """stmatrix and ldmatrix, with rows of matrices scattered over shared memory."""
    rng = np.random.RandomState(14)
    for count in (1, 2, 4):
        for transposed in ("", ".trans"):
            registers = rng.randint(0, 2**32, (count, 32), np.uint64).astype(np.uint32)
            rows = (16 * rng.permutation(64)[:32]).astype(np.uint32)
            names = ", ".join(f"%r{10 + j}" for j in range(count))
            loads = "\n".join(f"	ld.global.b32 	%r{10 + j}, [%d1+{128 * j}];" for j in range(count))
            body = f"""
	mul.wide.u32 	%d0, %lane, 4;
	add.s64 	%d1, %a0, %d0;
	add.s64 	%d2, %a1, %d0;
{loads}
	ld.global.b32 	%r1, [%d2];
	add.s32 	%r1, %base, %r1;
{copy_to_shared("%a2", 0, 1024, 32)}
	bar.warp.sync 	-1;
	stmatrix.sync.aligned.m8n8.x{count}{transposed}.shared.b16 	[%r1], {{{names}}};
	bar.warp.sync 	-1;
{copy_from_shared("%a3", 0, 1024, 32)}
"""
            background = Buffer(np.full(256, 0x11111111, np.uint32))
            arguments = (Buffer(registers), Buffer(rows), background, output(256))
            name = f"stmatrix_x{count}{transposed.replace('.', '_')}"
            yield program(name, arguments, body, shared_bytes=1024)

            stores = "\n".join(f"	st.global.b32 	[%d2+{128 * j}], %r{10 + j};" for j in range(count))
            body = f"""
	mul.wide.u32 	%d0, %lane, 4;
	add.s64 	%d1, %a1, %d0;
	add.s64 	%d2, %a2, %d0;
	ld.global.b32 	%r1, [%d1];
	add.s32 	%r1, %base, %r1;
{copy_to_shared("%a0", 0, 1024, 32)}
	bar.warp.sync 	-1;
	ldmatrix.sync.aligned.m8n8.x{count}{transposed}.shared.b16 	{{{names}}}, [%r1];
{stores}
"""
            memory = Buffer(rng.randint(0, 2**32, 256, np.uint64).astype(np.uint32))
            name = f"ldmatrix_x{count}{transposed.replace('.', '_')}"
            yield program(name, (memory, Buffer(rows), output(32 * count)), body, shared_bytes=1024)


def programs() -> Iterator[Program]:
    """Every program of this module."""
    yield _shuffles()
    yield _votes()
    yield _special_registers()
    yield _vectors()
    yield from _matrices()
