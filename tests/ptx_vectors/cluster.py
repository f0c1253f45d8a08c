"""Blocks of a cluster: addresses in each other's shared memory, remote arrivals and stores, boxes for both."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ptx_vectors.program import Program, copy_from_shared, output, program, wait
from ptx_vectors.tma import tensor

THREADS = 64
_SYNC = "	barrier.cluster.arrive.relaxed;\n	barrier.cluster.wait;"


def _addresses(blocks: int) -> Program:
    """The address of a block's own shared memory, and what mapa makes of it and of others'."""
    maps = "\n".join(
        f"""\
	mapa.shared::cluster.u32 	%r{10 + rank}, %base, {rank};
	add.s32 	%r{20 + rank}, %r{10 + rank}, 40;
	mapa.shared::cluster.u32 	%r{20 + rank}, %r{20 + rank}, %r1;"""
        for rank in range(blocks)
    )
    values = ["%r1", "%r2", "%base", *(f"%r{10 + r}" for r in range(blocks)), *(f"%r{20 + r}" for r in range(blocks))]
    stores = "\n".join(f"	st.global.b32 	[%d1+{4 * i}], {value};" for i, value in enumerate(values))
    body = f"""
	mov.u32 	%r1, %cluster_ctarank;
	mov.u32 	%r2, %ctaid.x;
{maps}
	setp.ne.b32 	%p0, %thread, 0;
	@%p0 bra 	END;
	mul.wide.u32 	%d0, %r2, {4 * len(values)};
	add.s64 	%d1, %a0, %d0;
{stores}
END:
"""
    arguments = (output(blocks * len(values)),)
    return program(f"cluster_addresses_{blocks}", arguments, body, threads=THREADS, cluster=blocks, shared_bytes=64)


def _begin(count: int) -> str:
    """Initialises a barrier in every block, and makes it known to the cluster."""
    return f"""\
	mov.u32 	%r1, %cluster_ctarank;
	setp.ne.b32 	%p0, %thread, 0;
	@%p0 bra 	READY;
	mov.b32 	%r0, {count};
	mbarrier.init.shared.b64 	[%base], %r0;
	fence.mbarrier_init.release.cluster;
READY:
{_SYNC}
"""


def _end(size: int) -> str:
    """Copies shared memory out, to a place for each block, when the whole cluster is done."""
    return f"""\
{_SYNC}
	mul.wide.u32 	%d20, %r1, {size};
	add.s64 	%a0, %a0, %d20;
{copy_from_shared("%a0", 1024, size, THREADS)}
"""


def _remote(with_count: bool) -> Program:
    """Threads write to the other block's shared memory and arrive at its barrier; each block waits for its own."""
    arrival = "mbarrier.arrive.release.cluster.shared::cluster.b64 	_, [%r3]"
    many = f"	setp.ne.b32 	%p1, %thread, 5;\n	@%p1 bra 	ARRIVED;\n	{arrival}, {THREADS};"
    body = f"""
{_begin(THREADS)}
	xor.b32 	%r2, %r1, 1;
	mapa.shared::cluster.u32 	%r3, %base, %r2;
	shl.b32 	%r4, %thread, 2;
	add.s32 	%r5, %r3, %r4;
	mad.lo.s32 	%r6, %r1, 1000, %thread;
	st.shared::cluster.b32 	[%r5+1024], %r6;
	{"barrier.cluster.arrive;" if with_count else ""}
	{"barrier.cluster.wait;" if with_count else ""}
{many if with_count else f"	{arrival}, 1;"}
ARRIVED:
	{{
	.reg .pred 	waited;
	AGAIN:
	mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 waited, [%base], 0, 10000000;
	@waited bra.uni 	DONE;
	bra.uni 	AGAIN;
	DONE:
	}}
{_end(4 * THREADS)}
"""
    name = "cluster_remote_arrival_with_count" if with_count else "cluster_remote_arrivals"
    expected = np.concatenate([1000 + np.arange(THREADS), np.arange(THREADS)]).astype(np.uint32)
    arguments = (output(2 * THREADS),)
    return program(name, arguments, body, threads=THREADS, cluster=2, shared_bytes=2048, expected={0: expected})


def _multicast(by_both: bool) -> Program:
    """A box that goes to both blocks: from one of them, or half from each."""
    rows = 8 if by_both else 16
    view = tensor("bf16", (104, 40), (64, rows), swizzle=128)
    size = 64 * 2 * 16
    row = "%r8" if by_both else "20"
    load = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
    others = "" if by_both else "	setp.ne.b32 	%p2, %r1, 0;\n	@%p2 bra 	ISSUED;"
    body = f"""
{_begin(1)}
	@%p0 bra 	ISSUED;
	mov.b32 	%r0, {size};
	mbarrier.arrive.expect_tx.shared.b64 	%d0, [%base], %r0;
	mul.lo.s32 	%r7, %r1, {size // 2 if by_both else 0};
	add.s32 	%r7, %r7, %base;
	mad.lo.s32 	%r8, %r1, 8, 30;
	mov.b16 	%h0, 3;
{others}
	{load} [%r7+1024], [%a1, {{48, {row}}}], [%base], %h0;
ISSUED:
{wait("%base")}
{_end(size)}
"""
    name = "cluster_multicast_halves" if by_both else "cluster_multicast"
    arguments = (output(2 * size // 4), view, view.buffer)
    return program(name, arguments, body, threads=THREADS, cluster=2, shared_bytes=1024 + size)


def programs() -> Iterator[Program]:
    """Every program of this module."""
    yield _addresses(2)
    yield _addresses(4)
    yield _remote(with_count=False)
    yield _remote(with_count=True)
    yield _multicast(by_both=False)
    yield _multicast(by_both=True)
