"""Barriers in shared memory and named barriers: what completes a phase, and what a wait then sees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ptx_vectors.program import Program, copy_from_shared, output, program, wait

_SCRIPTS: dict[str, Sequence[tuple[str, int]]] = {
    "one_arrival": [("init", 1), ("arrive", 1), ("arrive", 1), ("arrive", 1)],
    "three_arrivals": [("init", 3), *[("arrive", 1)] * 7],
    "arrivals_with_counts": [("init", 5), ("arrive", 2), ("arrive", 3), ("arrive", 5), ("arrive", 4), ("arrive", 1)],
    "bytes_after_the_arrival": [("init", 1), ("arrive_expect", 48), ("complete", 16), ("complete", 32), ("arrive", 1)],
    "bytes_before_they_are_expected": [("init", 1), ("complete", 64), ("arrive_expect", 64), ("arrive", 1)],
    "bytes_expected_twice": [
        ("init", 2),
        ("arrive_expect", 32),
        ("arrive_expect", 32),
        ("complete", 48),
        ("complete", 16),
    ],
    "expected_without_arrival": [
        ("init", 1),
        ("expect", 16),
        ("arrive", 1),
        ("complete", 16),
        ("expect", 8),
        ("complete", 8),
    ],
    "no_bytes": [("init", 1), ("arrive_expect", 0), ("arrive_expect", 0)],
    "largest_count": [("init", 2**20 - 1), ("arrive", 2**20 - 2), ("arrive", 1), ("arrive", 2**20 - 1)],
}


def _script(name: str, steps: Sequence[tuple[str, int]], poll: str = "test_wait", limit: str = "") -> Program:
    """One thread acts on one barrier; after each step it polls for both parities."""
    body = ["	setp.ne.b32 	%p0, %thread, 0;", "	@%p0 bra 	END;"]
    for i, (action, value) in enumerate(steps):
        body.append(f"	mov.b32 	%r0, {value};")
        body.append(
            {
                "init": "	mbarrier.init.shared.b64 	[%base+8], %r0;",
                "arrive": "	mbarrier.arrive.shared.b64 	%d0, [%base+8], %r0;",
                "expect": "	mbarrier.expect_tx.relaxed.cta.shared::cta.b64 	[%base+8], %r0;",
                "arrive_expect": "	mbarrier.arrive.expect_tx.shared.b64 	%d0, [%base+8], %r0;",
                "complete": "	mbarrier.complete_tx.relaxed.cta.shared::cta.b64 	[%base+8], %r0;",
            }[action]
        )
        for parity in (0, 1):
            body += [
                f"	mbarrier.{poll}.parity.shared.b64 	%p1, [%base+8], {parity}{limit};",
                "	selp.b32 	%r1, 1, 0, %p1;",
                f"	st.global.b32 	[%a0+{8 * i + 4 * parity}], %r1;",
            ]
    body.append("END:")
    return program(f"mbarrier_{name}", (output(2 * len(steps)),), "\n".join(body), shared_bytes=64)


def _ring() -> Program:
    """A producer warp and two consumer warps pass 12 numbers through a ring of two places."""
    body = f"""
	shr.u32 	%r0, %thread, 5;
	setp.ne.b32 	%p0, %thread, 0;
	@%p0 bra 	READY;
	mov.b32 	%r1, 1;
	mbarrier.init.shared.b64 	[%base], %r1;
	mbarrier.init.shared.b64 	[%base+8], %r1;
	mov.b32 	%r1, 2;
	mbarrier.init.shared.b64 	[%base+16], %r1;
	mbarrier.init.shared.b64 	[%base+24], %r1;
	fence.mbarrier_init.release.cluster;
READY:
	bar.sync 	0;
	mov.b32 	%r2, 0;
	mov.b32 	%r3, 0;
	mov.b32 	%r4, 0;
	setp.ne.b32 	%p1, %r0, 0;
	mov.b32 	%r12, 1;
	@%p1 bra 	CONSUME;
PRODUCE:
	shl.b32 	%r5, %r3, 3;
	add.s32 	%r6, %base, %r5;
	add.s32 	%r7, %r6, 16;
	xor.b32 	%r8, %r4, 1;
{wait("%r7", "%r8")}
	elect.sync 	%r9|%p2, -1;
	not.pred 	%p3, %p2;
	@%p3 bra 	PRODUCED;
	mul.lo.s32 	%r10, %r2, %r2;
	st.shared.b32 	[%r6+32], %r10;
	mbarrier.arrive.shared.b64 	%d0, [%r6], %r12;
PRODUCED:
	add.s32 	%r2, %r2, 1;
	xor.b32 	%r3, %r3, 1;
	setp.eq.b32 	%p4, %r3, 0;
	selp.b32 	%r11, 1, 0, %p4;
	xor.b32 	%r4, %r4, %r11;
	setp.lt.s32 	%p5, %r2, 12;
	@%p5 bra 	PRODUCE;
	bra.uni 	END;
CONSUME:
	shl.b32 	%r5, %r3, 3;
	add.s32 	%r6, %base, %r5;
{wait("%r6", "%r4")}
	ld.shared.b32 	%r10, [%r6+32];
	bar.warp.sync 	-1;
	elect.sync 	%r9|%p2, -1;
	not.pred 	%p3, %p2;
	@%p3 bra 	CONSUMED;
	mbarrier.arrive.shared.b64 	%d0, [%r6+16], %r12;
CONSUMED:
	mad.lo.s32 	%r13, %r2, 64, %thread;
	add.s32 	%r13, %r13, -32;
	mul.wide.u32 	%d1, %r13, 4;
	add.s64 	%d2, %a0, %d1;
	st.global.b32 	[%d2], %r10;
	add.s32 	%r2, %r2, 1;
	xor.b32 	%r3, %r3, 1;
	setp.eq.b32 	%p4, %r3, 0;
	selp.b32 	%r11, 1, 0, %p4;
	xor.b32 	%r4, %r4, %r11;
	setp.lt.s32 	%p5, %r2, 12;
	@%p5 bra 	CONSUME;
END:
"""
    expected = np.repeat(np.arange(12, dtype=np.uint32) ** 2, 64)
    return program("mbarrier_ring", (output(12 * 64),), body, threads=96, shared_bytes=64, expected={0: expected})


def _named() -> Program:
    """Two pairs of warps exchange values behind barriers of 64 threads, then all four behind a third, twice over."""
    exchange = """
	st.shared.b32 	[%r1], %r3;
	bar.sync 	%r2, 64;
	ld.shared.b32 	%r4, [%r5];
	bar.sync 	%r2, 64;
	mad.lo.s32 	%r3, %r4, 3, %thread;
	st.shared.b32 	[%r1], %r3;
	bar.sync 	3, 128;
	ld.shared.b32 	%r4, [%r6];
	bar.sync 	0;
	mad.lo.s32 	%r3, %r4, 5, %r3;
"""
    body = f"""
	shl.b32 	%r0, %thread, 2;
	add.s32 	%r1, %base, %r0;
	shr.u32 	%r2, %thread, 6;
	add.s32 	%r2, %r2, 1;
	xor.b32 	%r5, %r0, 128;
	add.s32 	%r5, %base, %r5;
	xor.b32 	%r6, %r0, 256;
	add.s32 	%r6, %base, %r6;
	mov.b32 	%r3, %thread;
{exchange}
{exchange}
	mul.wide.u32 	%d0, %thread, 4;
	add.s64 	%d1, %a0, %d0;
	st.global.b32 	[%d1], %r3;
"""
    return program("named_barriers", (output(128),), body, threads=128, shared_bytes=512)


def _arrive() -> Program:
    """One warp arrives at a named barrier without waiting; two wait for it and read what it wrote."""
    body = """
	shl.b32 	%r0, %lane, 2;
	add.s32 	%r1, %base, %r0;
	setp.gt.u32 	%p0, %thread, 31;
	@%p0 bra 	READ;
	mad.lo.s32 	%r2, %lane, 7, 3;
	st.shared.b32 	[%r1], %r2;
	bar.arrive 	5, 96;
	bra.uni 	END;
READ:
	bar.sync 	5, 96;
	ld.shared.b32 	%r3, [%r1];
	mul.wide.u32 	%d0, %thread, 4;
	add.s64 	%d1, %a0, %d0;
	st.global.b32 	[%d1], %r3;
END:
"""
    return program("named_barrier_arrive", (output(96),), body, threads=96, shared_bytes=128)


def _registers() -> Program:
    """Three warpgroups trade registers, as the kernels do, and go on computing."""
    body = f"""
	shr.u32 	%r0, %thread, 7;
	mul.lo.s32 	%r1, %thread, 17;
	setp.ne.b32 	%p0, %r0, 0;
	@%p0 bra 	MORE;
	setmaxnreg.dec.sync.aligned.u32 	40;
	add.s32 	%r1, %r1, 1;
	bra.uni 	JOIN;
MORE:
	setmaxnreg.inc.sync.aligned.u32 	232;
	add.s32 	%r1, %r1, 2;
JOIN:
	shl.b32 	%r2, %thread, 2;
	add.s32 	%r3, %base, %r2;
	st.shared.b32 	[%r3], %r1;
	bar.sync 	0;
{copy_from_shared("%a0", 0, 1536, 384)}
"""
    thread = np.arange(384, dtype=np.uint32)
    expected = 17 * thread + np.where(thread < 128, 1, 2).astype(np.uint32)
    return program("setmaxnreg", (output(384),), body, threads=384, shared_bytes=1536, expected={0: expected})


def programs() -> Iterator[Program]:
    """Every program of this module."""
    for name, steps in _SCRIPTS.items():
        yield _script(name, steps)
    # A wait with a time limit that nobody repeats says that the phase is not over.
    yield _script("timed_waits", _SCRIPTS["bytes_after_the_arrival"], "try_wait", ", 1000")
    yield _ring()
    yield _named()
    yield _arrive()
    yield _registers()
