"""Hopper kernels with a synchronisation of their own dropped or weakened: registers, products, results."""

from __future__ import annotations

from ptx_mutations.hopper_text import HopperText
from ptx_mutations.mutation import WRONG, Mutations

MUTATIONS: Mutations[HopperText] = Mutations(beds=("sm_90a forward 128x128", "sm_90a drhs 128x128"))
_add = MUTATIONS.add
_TILES = ("sm_90a forward 128x128", "sm_90a drhs 128x128", "sm_90a forward 128x128 pair")
"""Of what is done for a tile: also for a low one, of a pair of blocks."""


# Initialisation


@_add("race", "barrier", "deadlock", beds=_TILES)
def stage_empty_count_one_less(t: HopperText) -> None:
    """A stage counts as empty when all consumer warps but one are done with it."""
    t.set_count("stage_empty", -1)


@_add("deadlock", "protocol")
def registers_not_given_back(t: HopperText) -> None:
    """The first warpgroup keeps its registers, so that there are none for the others to take."""
    t.drop(t.find(r"setmaxnreg\.dec"))


@_add("deadlock", "protocol")
def too_many_registers_asked_for(t: HopperText) -> None:
    """The consumers ask for more registers than the block has."""
    t.substitute(t.find(r"setmaxnreg\.inc"), r"\d+;", "240;")


# Stages


@_add("deadlock", beds=_TILES)
def stage_not_released(t: HopperText) -> None:
    """The consumers keep all stages but the last of a tile."""
    t.drop(t.arrive("stage_empty", t.tile))


@_add("deadlock", beds=_TILES)
def last_stage_not_released(t: HopperText) -> None:
    """The consumers keep the last stage of a tile."""
    t.drop(t.arrive("stage_empty", t.tile, 1))


@_add("race", "barrier", "deadlock", beds=_TILES)
def stage_released_twice(t: HopperText) -> None:
    """The consumers release a stage twice."""
    line = t.arrive("stage_empty", t.tile)
    t.insert(line, t.lines[line].strip())


@_add("race", "barrier", "deadlock", beds=_TILES)
def next_stage_released(t: HopperText) -> None:
    """The consumers release the stage behind the one that they are done with."""
    line = t.arrive("stage_empty", t.tile)
    t.shift(line, t.lines[line].split("[")[1].split("]")[0].partition("+")[0], 8)


@_add("race", beds=_TILES)
def stage_released_before_the_product(t: HopperText) -> None:
    """The consumers release a stage before they wait for the product that reads it."""
    wait = t.find(r"wgmma\.wait_group\.sync\.aligned\s+1;", t.tile)
    t.move(wait, t.arrive("stage_empty", t.tile) + 1)


# Products


@_add("race", beds=_TILES)
def two_products_in_flight(t: HopperText) -> None:
    """The stage of a product that may still be in flight is released: wait_group 1 has become 2."""
    t.substitute(t.find(r"wgmma\.wait_group\.sync\.aligned\s+1;", t.tile), r"1;", "2;")


@_add("race", "protocol", beds=_TILES)
def product_in_flight_at_the_end(t: HopperText) -> None:
    """The accumulators are read while a product may be in flight: wait_group 0 has become 1."""
    t.substitute(t.find(r"wgmma\.wait_group\.sync\.aligned\s+0;", t.tile), r"0;", "1;")


@_add("race", "protocol", beds=_TILES)
def product_not_committed(t: HopperText) -> None:
    """Products are not committed to a group, so that no wait is for them."""
    t.drop(t.find(r"wgmma\.commit_group", t.tile))


@_add("race", "protocol", beds=_TILES)
def accumulators_not_fenced(t: HopperText) -> None:
    """No wgmma.fence between the zeros in the accumulators and the first product."""
    t.drop(t.find(r"wgmma\.fence", t.tile))


# Results on their way through shared memory


@_add("race")
def staging_not_fenced(t: HopperText) -> None:
    """No proxy fence between stmatrix and the TMA unit's store."""
    t.drop(t.find(r"fence\.proxy\.async", t.staged))


@_add("race")
def staging_fenced_for_global_memory(t: HopperText) -> None:
    """The proxy fence between stmatrix and the TMA unit's store is one for global memory."""
    t.substitute(t.find(r"fence\.proxy\.async", t.staged), r"shared::cta;", "global;")


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
