"""Faults in what all grouped kernels share: initialisation, the ring of work tiles, the stages."""

from __future__ import annotations

from ptx_mutations.kernel_text import KernelText
from ptx_mutations.mutation import Mutations

_HOPPER = ("sm_90a forward 128x128", "sm_90a drhs 128x128", "sm_90a forward 128x128 pair")
_BLACKWELL = ("sm_100a forward 128x256", "sm_100a forward 256x256", "sm_100a drhs 128x256")
_FEWER_STAGES_OF_WEIGHTS = "sm_100a forward 16x128"
"""Where waiting for weights is waiting for all: tokens have more stages than there can be weights for."""
_HALVES = "sm_100a forward 256x512"
_ALL = (*_HOPPER, *_BLACKWELL, _HALVES, "sm_100a dlhs 64x128", "sm_100a dlhs 32x128", _FEWER_STAGES_OF_WEIGHTS)
MUTATIONS: Mutations[KernelText] = Mutations(beds=_ALL)
_add = MUTATIONS.add


# Initialisation


@_add("race", "barrier", "uninitialised", "protocol")
def init_not_waited_for(t: KernelText) -> None:
    """Warps do not wait for the initialisation of the barriers."""
    t.drop(t.find(r"bar\.sync\s+0;|barrier\.cluster\.wait;", t.prologue))


@_add("race", "protocol", "barrier")
def init_fence(t: KernelText) -> None:
    """No fence.mbarrier_init: the asynchronous proxy may not see the barriers."""
    t.drop(t.find(r"fence\.mbarrier_init", t.prologue))


@_add("deadlock", "barrier", "uninitialised", "race")
def init_one_barrier_forgotten(t: KernelText) -> None:
    """The last stage's full barrier is not initialised."""
    lines = [i for i in t.all(r"mbarrier\.init", t.prologue) if t.barrier(i) == "stage_full"]
    t.drop(lines[-1])


@_add("deadlock")
def stage_empty_count_one_more(t: KernelText) -> None:
    """A stage waits for one consumer warp too many."""
    t.set_count("stage_empty", +1)


@_add("deadlock")
def stage_full_count_one_more(t: KernelText) -> None:
    """A full stage waits for two arrivals of the load warp, which arrives once."""
    t.set_count("stage_full", +1)


@_add("race", "barrier", "deadlock")
def ring_empty_count_one_less(t: KernelText) -> None:
    """A work tile's slot counts as read when all reading warps but one have read it."""
    t.set_count("ring_empty", -1)


@_add("deadlock")
def ring_empty_count_one_more(t: KernelText) -> None:
    """A work tile's slot waits for one reading warp too many."""
    t.set_count("ring_empty", +1)


@_add("deadlock")
def ring_full_count_one_more(t: KernelText) -> None:
    """A work tile waits for two arrivals of the scheduler."""
    t.set_count("ring_full", +1)


@_add("protocol")
def leader_of_half_a_warp(t: KernelText) -> None:
    """The load warp elects among 16 lanes, and all 32 are there."""
    t.substitute(t.find(r"elect\.sync", t.load), r"-1;", "65535;")


# The ring of work tiles


@_add("protocol")
def scan_of_half_a_warp(t: KernelText) -> None:
    """The scan over groups names 16 lanes, and all 32 are there."""
    t.substitute(t.find(r"shfl\.sync\.up", t.scheduler), r"-1;", "65535;")


@_add("race", "uninitialised")
def ring_full_wait_once(t: KernelText) -> None:
    """The load warp reads its first work tile after one try to wait for it."""
    t.wait_once(t.wait("ring_full", t.load))


@_add("race", "barrier")
def ring_empty_wait(t: KernelText) -> None:
    """The scheduler overwrites slots without waiting until they have been read."""
    t.drop_block(t.wait("ring_empty", t.scheduler))


@_add("race", "uninitialised", "deadlock")
def ring_full_wait_of_load(t: KernelText) -> None:
    """The load warp reads its first work tile without waiting for it."""
    t.drop_block(t.wait("ring_full", t.load))


@_add("race", "uninitialised", "deadlock", "barrier")
def ring_full_wait_of_products(t: KernelText) -> None:
    """The consumers read later work tiles without waiting for them."""
    t.drop_block(t.wait("ring_full", t.products, 1))


@_add("race")
def ring_read_not_joined(t: KernelText) -> None:
    """One lane releases a slot while others may still read it."""
    wait = t.wait("ring_full", t.products, 1)
    t.drop(t.find(r"bar\.warp\.sync", range(wait, len(t.lines))))


@_add("deadlock")
def ring_release_of_load(t: KernelText) -> None:
    """The load warp does not say that it has read its later work tiles."""
    t.drop(t.arrive("ring_empty", t.load, 1))


@_add("barrier", "race", "deadlock")
def ring_release_twice(t: KernelText) -> None:
    """A consumer warp says twice that it has read a work tile."""
    line = t.arrive("ring_empty", t.products, 1)
    t.insert(line, t.lines[line].strip())


@_add("deadlock")
def ring_tile_not_announced(t: KernelText) -> None:
    """The scheduler does not arrive for its tiles."""
    t.drop(t.arrive("ring_full", t.scheduler))


@_add("race", "uninitialised")
def ring_announced_before_written(t: KernelText) -> None:
    """The scheduler arrives before it has written the tile."""
    arrival = t.arrive("ring_full", t.scheduler)
    stores = t.all(r"st\.shared", t.scheduler)
    t.move(arrival, stores[0])
    # The count of the arrival is set up behind the stores.
    count = t.last_operand(stores[0])
    t.insert(stores[0], f"mov.b32 	{count}, 1;")


@_add("deadlock")
def ring_end_not_announced(t: KernelText) -> None:
    """The scheduler does not arrive for the mark behind the last tile."""
    t.drop(t.arrive("ring_full", range(len(t.lines)), -1))


@_add("deadlock", "race", "barrier")
def ring_parity_of_products(t: KernelText) -> None:
    """The consumers' parity of the ring never flips."""
    t.keep_parity(t.wait("ring_full", t.products, 1), t.products)


# Stages


@_add("race", "barrier", beds=tuple(bed for bed in _ALL if bed != _FEWER_STAGES_OF_WEIGHTS))
def stage_empty_wait(t: KernelText) -> None:
    """The load warp fills stages without waiting until they have been multiplied."""
    t.drop_block(t.wait("stage_empty", t.load))


@_add("deadlock")
def stage_empty_parity(t: KernelText) -> None:
    """The load warp waits for the other parity of empty stages."""
    t.flip_parity(t.wait("stage_empty", t.load))


@_add("race", "uninitialised")
def stage_full_wait(t: KernelText) -> None:
    """The consumers multiply stages without waiting for them."""
    t.drop_block(t.wait("stage_full", t.products))


# Not that of held stages, at whose end the ring never is.
@_add("race", "uninitialised", "deadlock", "barrier", beds=tuple(bed for bed in _ALL if bed != _HALVES))
def stage_full_parity(t: KernelText) -> None:
    """The consumers' parity of full stages never flips."""
    t.keep_parity(t.wait("stage_full", t.products), t.products)


@_add("race", "uninitialised")
def stage_full_wait_once(t: KernelText) -> None:
    """The consumers multiply stages after one try to wait for them."""
    t.wait_once(t.wait("stage_full", t.products))


@_add("race", "barrier", beds=tuple(bed for bed in _ALL if bed != _FEWER_STAGES_OF_WEIGHTS))
def stage_empty_wait_once(t: KernelText) -> None:
    """The load warp fills stages after one try to wait until they have been multiplied."""
    t.wait_once(t.wait("stage_empty", t.load))


@_add("uninitialised")
def stage_full_parity_not_set(t: KernelText) -> None:
    """The consumers start with whatever is in the register of the parity of full stages."""
    register = t.parity(t.wait("stage_full", t.products))
    for line in t.all(rf"mov\.b32\s+{register}, ", t.products):
        t.drop(line)


@_add("race", "uninitialised", "deadlock", "barrier")
def stage_full_wait_on_its_neighbour(t: KernelText) -> None:
    """The consumers wait for the full barrier of the next stage."""
    t.substitute(t.wait("stage_full", t.products), r"\[(%\w+)\]", r"[\1+8]")


@_add("deadlock")
def stage_never_announced(t: KernelText) -> None:
    """The load warp does not arrive at a stage's full barrier."""
    t.drop(t.arrive("stage_full", t.load))


@_add("race", "barrier", "uninitialised")
def stage_bytes_not_expected(t: KernelText) -> None:
    """The load warp arrives without saying how many bytes are to come."""
    line = t.arrive("stage_full", t.load)
    t.substitute(line, r"arrive\.expect_tx", "arrive")
    t.substitute(line, r", %\w+;", ", 1;")


@_add("barrier", "race", "deadlock")
def stage_bytes_too_few(t: KernelText) -> None:
    """16 bytes fewer are expected than come."""
    t.change_bytes(t.arrive("stage_full", t.load), -16)


@_add("deadlock")
def stage_bytes_too_many(t: KernelText) -> None:
    """16 bytes more are expected than come."""
    t.change_bytes(t.arrive("stage_full", t.load), +16)
