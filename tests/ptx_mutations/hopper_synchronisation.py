"""Hopper kernels with one synchronisation dropped or weakened."""

from __future__ import annotations

from ptx_mutations.hopper_text import HopperText
from ptx_mutations.mutation import WRONG, Mutations

MUTATIONS: Mutations[HopperText] = Mutations(beds=("forward 128x128", "drhs 128x128"))
_add = MUTATIONS.add


# Initialisation


@_add("race", "barrier", "uninitialised")
def init_bar_sync(t: HopperText) -> None:
    """No block-wide barrier between the initialisation of the barriers and their use."""
    t.drop(t.find(r"bar\.sync\s+0;", t.prologue))


@_add("race", "protocol", "barrier")
def init_fence(t: HopperText) -> None:
    """No fence.mbarrier_init: the asynchronous proxy may not see the barriers."""
    t.drop(t.find(r"fence\.mbarrier_init", t.prologue))


@_add("deadlock", "barrier", "uninitialised", "race")
def init_one_barrier_forgotten(t: HopperText) -> None:
    """The last stage's full barrier is not initialised."""
    lines = [i for i in t.all(r"mbarrier\.init", t.prologue) if t.barrier(i) == "stage_full"]
    t.drop(lines[-1])


@_add("race", "barrier", "deadlock")
def stage_empty_count_one_less(t: HopperText) -> None:
    """A stage counts as empty when all consumer warps but one are done with it."""
    t.set_count("stage_empty", -1)


@_add("deadlock")
def stage_empty_count_one_more(t: HopperText) -> None:
    """A stage waits for one consumer warp too many."""
    t.set_count("stage_empty", +1)


@_add("deadlock")
def stage_full_count_one_more(t: HopperText) -> None:
    """A full stage waits for two arrivals of the load warp, which arrives once."""
    t.set_count("stage_full", +1)


@_add("race", "barrier", "deadlock")
def ring_empty_count_one_less(t: HopperText) -> None:
    """A work tile's slot counts as read when all reading warps but one have read it."""
    t.set_count("ring_empty", -1)


@_add("deadlock")
def ring_empty_count_one_more(t: HopperText) -> None:
    """A work tile's slot waits for one reading warp too many."""
    t.set_count("ring_empty", +1)


@_add("deadlock")
def ring_full_count_one_more(t: HopperText) -> None:
    """A work tile waits for two arrivals of the scheduler."""
    t.set_count("ring_full", +1)


@_add("deadlock", "protocol")
def registers_not_given_back(t: HopperText) -> None:
    """The first warpgroup keeps its registers, so that there are none for the others to take."""
    t.drop(t.find(r"setmaxnreg\.dec"))


@_add("deadlock", "protocol")
def too_many_registers_asked_for(t: HopperText) -> None:
    """The consumers ask for more registers than the block has."""
    t.substitute(t.find(r"setmaxnreg\.inc"), r"\d+;", "240;")


# The ring of work tiles


@_add("race", "barrier")
def ring_empty_wait(t: HopperText) -> None:
    """The scheduler overwrites slots without waiting until they have been read."""
    t.drop_block(t.wait("ring_empty", t.scheduler))


@_add("race", "uninitialised", "deadlock")
def ring_full_wait_of_load(t: HopperText) -> None:
    """The load warp reads its first work tile without waiting for it."""
    t.drop_block(t.wait("ring_full", t.load))


@_add("race", "uninitialised", "deadlock", "barrier")
def ring_full_wait_of_products(t: HopperText) -> None:
    """The consumers read later work tiles without waiting for them."""
    t.drop_block(t.wait("ring_full", t.products, 1))


@_add("race")
def ring_read_not_joined(t: HopperText) -> None:
    """One lane releases a slot while others may still read it."""
    wait = t.wait("ring_full", t.products, 1)
    t.drop(t.find(r"bar\.warp\.sync", range(wait, len(t.lines))))


@_add("deadlock")
def ring_release_of_load(t: HopperText) -> None:
    """The load warp does not say that it has read its later work tiles."""
    t.drop(t.arrive("ring_empty", t.load, 1))


@_add("barrier", "race")
def ring_release_twice(t: HopperText) -> None:
    """A consumer warp says twice that it has read a work tile."""
    line = t.arrive("ring_empty", t.products, 1)
    t.insert(line, t.lines[line].strip())


@_add("deadlock")
def ring_tile_not_announced(t: HopperText) -> None:
    """The scheduler does not arrive for its tiles."""
    t.drop(t.arrive("ring_full", t.scheduler))


@_add("race", "uninitialised")
def ring_announced_before_written(t: HopperText) -> None:
    """The scheduler arrives before it has written the tile."""
    arrival = t.arrive("ring_full", t.scheduler)
    stores = t.all(r"st\.shared", t.scheduler)
    t.move(arrival, stores[0])
    # The count of the arrival is set up behind the stores.
    count = t.last_operand(stores[0])
    t.insert(stores[0], f"mov.b32 	{count}, 1;")


@_add("deadlock")
def ring_end_not_announced(t: HopperText) -> None:
    """The scheduler does not arrive for the mark behind the last tile."""
    arrivals = [i for i in t.all(r"mbarrier\.arrive\.", t.producers) if t.barrier(i) == "ring_full"]
    t.drop(arrivals[-1])


@_add("deadlock", "race", "barrier")
def ring_parity_of_products(t: HopperText) -> None:
    """The consumers' parity of the ring never flips."""
    register = t.lines[t.wait("ring_full", t.products, 1)].split("],")[1].split(",")[0].strip()
    t.drop(t.find(rf"xor\.b32\s+{register}, {register}", t.products))


# Stages


@_add("race", "barrier")
def stage_empty_wait(t: HopperText) -> None:
    """The load warp fills stages without waiting until they have been multiplied."""
    t.drop_block(t.wait("stage_empty", t.load))


@_add("deadlock")
def stage_empty_parity(t: HopperText) -> None:
    """The load warp waits for the other parity of empty stages."""
    line = t.wait("stage_empty", t.load)
    register = t.lines[line].split("],")[1].split(",")[0].strip()
    t.substitute(line, rf"\], {register},", "], %mutant,")
    t.insert(t._block(line).start, f"xor.b32 	%mutant, {register}, 1;")
    t.declare_mutant()


@_add("race", "uninitialised")
def stage_full_wait(t: HopperText) -> None:
    """The consumers multiply stages without waiting for them."""
    t.drop_block(t.wait("stage_full", t.products))


@_add("race", "uninitialised", "deadlock", "barrier")
def stage_full_parity(t: HopperText) -> None:
    """The consumers' parity of full stages never flips."""
    register = t.lines[t.wait("stage_full", t.products)].split("],")[1].split(",")[0].strip()
    t.drop(t.find(rf"xor\.b32\s+{register}, {register}", t.products))


@_add("race", "uninitialised", "deadlock", "barrier")
def stage_full_wait_on_its_neighbour(t: HopperText) -> None:
    """The consumers wait for the full barrier of the next stage."""
    t.substitute(t.wait("stage_full", t.products), r"\[(%\w+)\]", r"[\1+8]")


@_add("deadlock")
def stage_never_announced(t: HopperText) -> None:
    """The load warp does not arrive at a stage's full barrier."""
    t.drop(t.arrive("stage_full", t.load))


@_add("race", "barrier", "uninitialised")
def stage_bytes_not_expected(t: HopperText) -> None:
    """The load warp arrives without saying how many bytes are to come."""
    line = t.arrive("stage_full", t.load)
    t.substitute(line, r"arrive\.expect_tx", "arrive")
    t.substitute(line, r", %\w+;", ", 1;")


@_add("barrier", "race", "deadlock")
def stage_bytes_too_few(t: HopperText) -> None:
    """16 bytes fewer are expected than come."""
    _change_bytes(t, -16)


@_add("deadlock")
def stage_bytes_too_many(t: HopperText) -> None:
    """16 bytes more are expected than come."""
    _change_bytes(t, +16)


def _change_bytes(t: HopperText, change: int) -> None:
    line = t.arrive("stage_full", t.load)
    register = t.last_operand(line)
    place = t.find(rf"mov\.b32\s+{register}, \d+;", t.load)
    t.substitute(place, r"\d+;", f"{int(t.last_operand(place)) + change};")


@_add("deadlock")
def stage_not_released(t: HopperText) -> None:
    """The consumers keep all stages but the last of a tile."""
    t.drop(t.arrive("stage_empty", t.products))


@_add("deadlock")
def last_stage_not_released(t: HopperText) -> None:
    """The consumers keep the last stage of a tile."""
    t.drop(t.arrive("stage_empty", t.products, 1))


@_add("barrier", "race")
def stage_released_twice(t: HopperText) -> None:
    """The consumers release a stage twice."""
    line = t.arrive("stage_empty", t.products)
    t.insert(line, t.lines[line].strip())


@_add("race", "barrier", "deadlock")
def next_stage_released(t: HopperText) -> None:
    """The consumers release the stage behind the one that they are done with."""
    line = t.arrive("stage_empty", t.products)
    t.substitute(line, r"\+(\d+)\]", f"+{t._barriers['stage_empty'].start + 8}]")


@_add("race")
def stage_released_before_the_product(t: HopperText) -> None:
    """The consumers release a stage before they wait for the product that reads it."""
    wait = t.find(r"wgmma\.wait_group\.sync\.aligned\s+1;", t.products)
    t.move(wait, t.arrive("stage_empty", t.products) + 1)


# Products


@_add("race")
def two_products_in_flight(t: HopperText) -> None:
    """The stage of a product that may still be in flight is released: wait_group 1 has become 2."""
    t.substitute(t.find(r"wgmma\.wait_group\.sync\.aligned\s+1;", t.products), r"1;", "2;")


@_add("race", "protocol")
def product_in_flight_at_the_end(t: HopperText) -> None:
    """The accumulators are read while a product may be in flight: wait_group 0 has become 1."""
    t.substitute(t.find(r"wgmma\.wait_group\.sync\.aligned\s+0;", t.products), r"0;", "1;")


@_add("race", "protocol")
def product_not_committed(t: HopperText) -> None:
    """Products are not committed to a group, so that no wait is for them."""
    t.drop(t.find(r"wgmma\.commit_group", t.products))


@_add("race", "protocol")
def accumulators_not_fenced(t: HopperText) -> None:
    """No wgmma.fence between the zeros in the accumulators and the first product."""
    t.drop(t.find(r"wgmma\.fence", t.products))


# Results on their way through shared memory


@_add("race")
def staging_not_fenced(t: HopperText) -> None:
    """No proxy fence between stmatrix and the TMA unit's store."""
    t.drop(t.find(r"fence\.proxy\.async", t.staged))


@_add("race")
def staging_not_joined(t: HopperText) -> None:
    """The store does not wait until all warps have written the buffer."""
    t.drop(t.find(r"bar\.sync\s+1, 256;", t.staged))


@_add("race")
def staging_reused_without_barrier(t: HopperText) -> None:
    """Warps write the next buffer without waiting until the store of its last content was seen to have read it."""
    for line in t.all(r"bar\.sync\s+1, 256;", range(t.staged.start, t.staged.stop + 4))[1::2]:
        t.drop(line)


@_add("race")
def staging_reused_one_early(t: HopperText) -> None:
    """One store more may still be reading its buffer: wait_group.read 3 has become 4."""
    for line in t.all(r"wait_group\.read\s+3;", t.staged):
        t.substitute(line, r"3;", "4;")


@_add("race")
def staging_reads_not_waited_for(t: HopperText) -> None:
    """Buffers are written again without waiting for the stores that read them."""
    for line in t.all(r"wait_group\.read\s+3;", t.staged):
        t.drop(line)


@_add("race", "protocol")
def staging_not_committed(t: HopperText) -> None:
    """Stores are not committed to a group."""
    for line in t.all(r"cp\.async\.bulk\.commit_group", t.staged):
        t.drop(line)


@_add("race", "protocol")
def staging_left_at_the_end(t: HopperText) -> None:
    """The block ends while the TMA unit may be reading its shared memory."""
    t.drop(t.find(r"wait_group\.read\s+0;", t.products))


@_add("race", "protocol", "deadlock", WRONG)
def staging_barrier_of_one_warpgroup(t: HopperText) -> None:
    """The epilogue's barrier expects 128 threads, and 256 come."""
    for line in t.all(r"bar\.sync\s+1, 256;", t.products):
        t.substitute(line, r"256;", "128;")
