"""The sum of a pair of blocks' accumulators, through the shared memory of the one that receives.

One block of a cluster of two sends its accumulators to the other, thread to thread, in pieces. The receiving block
grants a buffer, the other block's threads fill it with asynchronous stores that count their bytes on a barrier, and
the receiver's threads add what came. Roles never change: block 0 of a pair receives. A sum always has the same two
terms in the same order, so that results do not depend on timing.
"""

from __future__ import annotations

import dataclasses

import cutlass
from cutlass import Float32, Int32, cute, pipeline
from cutlass._mlir.dialects.nvvm import MemScopeKind
from cutlass.cute.arch import mbarrier_arrive, mbarrier_arrive_and_expect_tx, mbarrier_init, mbarrier_wait

from jax_ggemm.kernel.config import EXCHANGE_BUFFERS as BUFFERS
from jax_ggemm.kernel.config import EXCHANGE_PIECE as _PIECE

BARRIERS = 2 * BUFFERS
_VECTOR = 4
"""32-bit words of one store."""

_RECEIVER, _SENDER = 0, 1


def exchange_bytes(threads: int) -> int:
    """Shared memory of the buffers, for so many threads of a block."""
    return 4 * _PIECE * BUFFERS * threads


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The buffers and barriers of one block of a pair. Both blocks hold both; each uses its own role's."""

    buffers: cute.Tensor
    """(4 words, threads, vectors of a piece, BUFFERS) float32 in shared memory."""
    full: cute.Pointer
    """BUFFERS barriers of the receiver: the bytes of a piece have come."""
    granted: cute.Pointer
    """BUFFERS barriers of the sender: the receiver's warps have read the piece before."""
    threads: int

    @staticmethod
    def create(buffers: cute.Pointer, barriers: cute.Pointer, threads: int) -> Exchange:
        """Sets the barriers up; every thread of the block calls it."""
        exchange = Exchange(
            cute.make_tensor(buffers, cute.make_layout((_VECTOR, threads, _PIECE // _VECTOR, BUFFERS))),
            barriers,
            barriers + BUFFERS,
            threads,
        )
        exchange._initialise()
        return exchange

    @cute.jit
    def _initialise(self):
        thread, _, _ = cute.arch.thread_idx()
        if thread == 0:
            for i in cutlass.range_constexpr(BUFFERS):
                mbarrier_init(self.full + i, 1)
                mbarrier_init(self.granted + i, self.threads // 32)

    @cute.jit
    def send(self, acc: cute.Tensor, thread: Int32):
        """Sends the accumulators; called by all threads that hold them."""
        values = cute.recast_tensor(acc, Int32)
        for piece in cutlass.range_constexpr(_pieces(acc)):
            buffer, phase = piece % BUFFERS, piece // BUFFERS % 2
            mbarrier_wait(self.granted + buffer, phase)
            for i in cutlass.range_constexpr(_PIECE // _VECTOR):
                at = piece * _PIECE + i * _VECTOR
                slot = cute.domain_offset((0, thread, i, buffer), self.buffers).iterator
                cute.arch.store_async_dsmem(
                    slot.align(4 * _VECTOR),
                    tuple(values[at + word] for word in range(_VECTOR)),
                    self.full + buffer,
                    _RECEIVER,
                )

    @cute.jit
    def receive(self, acc: cute.Tensor, thread: Int32):
        """Adds what the other block sends to the accumulators; called by all threads that hold them.

        The buffers must be free: nothing reads or writes them. They are again when this returns.
        """
        pieces = _pieces(acc)
        barrier = pipeline.NamedBarrier(barrier_id=1, num_threads=self.threads)
        barrier.arrive_and_wait()
        for piece in cutlass.range_constexpr(BUFFERS):
            self._grant(piece, thread)
        for piece in cutlass.range_constexpr(pieces):
            buffer, phase = piece % BUFFERS, piece // BUFFERS % 2
            mbarrier_wait(self.full + buffer, phase)
            for i in cutlass.range_constexpr(_PIECE // _VECTOR):
                came = cute.make_rmem_tensor(_VECTOR, Float32)
                cute.autovec_copy(self.buffers[None, thread, i, buffer], came)
                for word in cutlass.range_constexpr(_VECTOR):
                    acc[piece * _PIECE + i * _VECTOR + word] += came[word]
            if cutlass.const_expr(piece + BUFFERS < pieces):
                cute.arch.sync_warp()
                self._grant(buffer, thread)
        barrier.arrive_and_wait()

    @cute.jit
    def _grant(self, buffer: int, thread: Int32):
        """Lets the sender fill a buffer; called by all warps that have read it."""
        if cute.arch.make_warp_uniform(thread // 32) == 0:
            with cute.arch.elect_one():
                mbarrier_arrive_and_expect_tx(self.full + buffer, 4 * _PIECE * self.threads)
        with cute.arch.elect_one():
            mbarrier_arrive(self.granted + buffer, _SENDER, scope=MemScopeKind.CLUSTER)


def _pieces(acc: cute.Tensor) -> int:
    """Pieces of a tile: each buffer takes an even number, so that every tile starts with the same phases."""
    pieces, rest = divmod(cute.size(acc), _PIECE)
    assert rest == 0
    assert pieces % (2 * BUFFERS) == 0
    return pieces
