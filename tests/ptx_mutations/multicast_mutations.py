"""Faults in the Blackwell kernels whose tiles share their rows of lhs: masks, counts and bytes of a cluster."""

from __future__ import annotations

from ptx_mutations.blackwell_text import BlackwellText
from ptx_mutations.mutation import WRONG, Mutations

ONES, PAIRS = "sm_100a forward 128x128 multicast", "sm_100a drhs 256x256 multicast"
MUTATIONS: Mutations[BlackwellText] = Mutations(beds=(ONES, PAIRS))
_add = MUTATIONS.add
_PART_BYTES = {1: 8192, 2: 4096}
"""From one part to the other in shared memory: half of 128 rows, or of the rows of 64 columns that are contracted."""
_MULTICAST = r"cp\.async\.bulk\.tensor.*multicast::cluster"


def _mask_operand(t: BlackwellText, line: int) -> str:
    """The mask of a multicast load: behind its barrier, before its policy in L2."""
    return t.lines[line].rstrip(";").split(", ")[-2]


def _change_mask(t: BlackwellText, register: str, was: int, now: int) -> None:
    """Changes the constant that a mask is, or is shifted from by the place of a block."""
    shifted = t.all(rf"shl\.b16\s+{register}, ")
    source = t.lines[shifted[0]].split(", ")[1] if shifted else register
    t.substitute(t.find(rf"mov\.b16\s+{source}, {was};"), rf"{was};", f"{now};")


# Tiles


@_add("race", WRONG)
def both_tiles_of_the_same_columns(t: BlackwellText) -> None:
    """The second tile has the columns of the first."""
    t.substitute(t.find(rf"and\.b32\s+%\w+, %\w+, {t.config.tile_n};", t.scheduler), r"\d+;", "0;")


# Loads


@_add("deadlock")
def part_for_the_first_tile_alone(t: BlackwellText) -> None:
    """The parts of lhs go to the blocks of the first tile alone."""
    mask = _mask_operand(t, t.find(_MULTICAST, t.load))
    _change_mask(t, mask, 2**t.config.blocks + 1, 1)


@_add("deadlock", "barrier", "race", "uninitialised", beds=(PAIRS,))
def part_for_the_next_block(t: BlackwellText) -> None:
    """The parts of lhs go to the next block, which holds other rows, and not to the one of the other tile."""
    mask = _mask_operand(t, t.find(_MULTICAST, t.load))
    _change_mask(t, mask, 0b101, 0b11)


@_add("deadlock")
def part_not_loaded(t: BlackwellText) -> None:
    """A block does not load its part of lhs."""
    t.drop(t.find(_MULTICAST, t.load))


@_add("race", "uninitialised", WRONG)
def part_put_where_the_first_is(t: BlackwellText) -> None:
    """Every block puts its part of lhs where that of the first tile is."""
    t.substitute(t.find(rf"and\.b32\s+%\w+, %\w+, {_PART_BYTES[t.config.blocks]};"), r"\d+;", "0;")


@_add("barrier", "race", "uninitialised")
def bytes_of_ones_own_part(t: BlackwellText) -> None:
    """A stage of lhs expects as many bytes as its block loads, not those of the other part."""
    t.change_bytes(t.arrive("stage_full", t.load), -t.config.stage_bytes * t.config.blocks // 2)


# Stages


@_add("race", "barrier", "deadlock")
def stage_empty_for_one_tile(t: BlackwellText) -> None:
    """A stage counts as empty when the products of one tile have read it."""
    t.set_count("stage_empty", -1)


@_add("deadlock")
def stage_returned_to_the_first_tile(t: BlackwellText) -> None:
    """Products tell the blocks of the first tile alone that a stage is empty."""
    mask = t.last_operand(t.commit("stage_empty"))
    _change_mask(t, mask, 2**t.config.cluster_blocks - 1, 2**t.config.blocks - 1)


@_add("deadlock", "barrier", "race", beds=(PAIRS,))
def slot_filled_for_the_first_tile(t: BlackwellText) -> None:
    """Products of both tiles tell the blocks of the first one that a tile is done."""
    mask = t.last_operand(t.commit("slot_full"))
    t.substitute(t.find(rf"shl\.b16\s+{mask}, "), r", %r\w+;", ", 0;")


@_add("deadlock", "barrier", "race", beds=(PAIRS,))
def slot_returned_to_the_first_tile(t: BlackwellText) -> None:
    """The epilogue gives slots of both tiles back to the block that multiplies the first one."""
    for line in t.all(r"mapa\.shared::cluster\.u32", t.epilogue):
        t.substitute(line, r", %\w+;", ", 0;")


# Start and end


@_add("protocol", "race", "barrier", "uninitialised")
def cluster_does_not_meet_at_the_start(t: BlackwellText) -> None:
    """Blocks meet only within themselves before they use each other's barriers."""
    t.meet_alone(0)


@_add("race", "barrier", "protocol", beds=(ONES,))
def leaves_before_the_last_signals_came(t: BlackwellText) -> None:
    """A block leaves when its own tiles are done: the other tile's products still arrive at its barriers."""
    t.leave_early()
