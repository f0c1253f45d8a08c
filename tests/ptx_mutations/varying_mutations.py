"""Faults in the Blackwell kernels whose tiles vary: how much of them is loaded, multiplied and written."""

from __future__ import annotations

from ptx_mutations.blackwell_text import BlackwellText
from ptx_mutations.mutation import WRONG, Mutations

MUTATIONS: Mutations[BlackwellText] = Mutations(beds=("sm_100a forward 448x256",))
_add = MUTATIONS.add
_MMA = r"tcgen05\.mma"
_TOKENS = r"cp\.async\.bulk\.tensor\.2d"


# Loads


@_add("deadlock")
def granule_not_loaded(t: BlackwellText) -> None:
    """The last granule of a tile is not loaded, but waited for."""
    line = t.find(r"setp\.ne\.b32", range(t.find(_TOKENS, t.load), t.load.stop))
    count = t.last_operand(line)
    t.substitute(line, rf"{count};", "%mutant;")
    t.insert(line, f"add.s32 	%mutant, {count}, -1;", "max.s32 	%mutant, %mutant, 1;")
    t.declare_mutant()


@_add("deadlock", "barrier", "race", "uninitialised")
def granule_not_expected(t: BlackwellText) -> None:
    """A stage expects the bytes of one granule less than is loaded."""
    t.change_bytes(t.arrive("stage_full", t.load), -2 * t.config.granule_bytes)


@_add("deadlock", "barrier")
def whole_stage_expected(t: BlackwellText) -> None:
    """A stage expects as many tokens as it has room for, however many the tile has."""
    arrival = t.arrive("stage_full", t.load)
    whole = 2 * (t.config.stage_bytes + t.config.weight_stage_bytes)
    t.substitute(arrival, rf", {t.last_operand(arrival)};", ", %mutant;")
    t.insert(arrival, f"mov.b32 	%mutant, {whole};")
    t.declare_mutant()


def _row(t: BlackwellText) -> int:
    """Where the row of a granule is found."""
    load = t.find(_TOKENS, t.load)
    register = t.coordinates(load)[1]
    return t.find(rf"mad\.lo\.s32\s+{register}, ", t.load)


@_add(WRONG)
def second_block_loads_the_tokens_of_the_first(t: BlackwellText) -> None:
    """Both blocks of a pair load the first half of the tokens."""
    t.substitute(_row(t), r"mad\.lo\.s32\s+(%\w+), %\w+, %\w+, (%\w+);", r"mov.b32 	\1, \2;")


@_add(WRONG)
def second_half_from_the_middle_of_a_whole_part(t: BlackwellText) -> None:
    """The second block's tokens begin where they would if every part had 256."""
    line = _row(t)
    own = t.config.granule // 2
    t.substitute(line, r"(mad\.lo\.s32\s+%\w+), %\w+,", rf"\1, {128 - own},")


@_add(WRONG)
def second_part_behind_half_of_the_first(t: BlackwellText) -> None:
    """The second part of a tile begins behind the first block's half of the first part."""
    before = range(t.find(_TOKENS, t.load) - 20, t.find(_TOKENS, t.load))
    line = t.find(r"shl\.b32\s+%\w+, %\w+, 7;", before)
    t.substitute(line, r"shl\.b32\s+(%\w+), %\w+, 7;", r"mov.b32 	\1, 0;")


# Products


def _count(t: BlackwellText, nth: int) -> int:
    """Where a part's number of tokens goes into the descriptor."""
    return t.find(r"shl\.b32\s+%\w+, %\w+, 14;", t.products, nth)


@_add(WRONG, "protocol", "uninitialised")
def half_of_the_tokens_multiplied(t: BlackwellText) -> None:
    """Products of the first part have half of its tokens as columns."""
    t.substitute(_count(t, 0), r"14;", "13;")


@_add(WRONG, "protocol", "uninitialised", "race")
def second_part_as_high_as_the_first(t: BlackwellText) -> None:
    """Products of the second part have as many columns as those of the first."""
    first, second = (t.lines[_count(t, nth)].split(", ")[1] for nth in (0, 1))
    t.substitute(_count(t, 1), rf", {second},", f", {first},")


@_add(WRONG, "uninitialised")
def last_granule_not_multiplied(t: BlackwellText) -> None:
    """Of the tokens only whole granules are multiplied."""
    t.substitute(t.find(rf"add\.s32\s+%\w+, %\w+, {t.config.granule - 1};", t.products), r"\d+;", "0;")


@_add("race", WRONG)
def second_slot_not_waited_for(t: BlackwellText) -> None:
    """Products of the second part start while the epilogue may still read its slot."""
    t.drop_block(t.wait("slot_empty", t.products, 1))


@_add("deadlock")
def first_part_not_handed_over(t: BlackwellText) -> None:
    """Of a tile with two parts, the first is not handed to the epilogue."""
    lines = [i for i in t.all(r"tcgen05\.commit", t.products) if t.barrier(i) == "slot_full"]
    t.drop(lines[1])


# The epilogue


@_add(WRONG)
def last_granule_not_written(t: BlackwellText) -> None:
    """Of the rows of a tile only whole granules are written."""
    t.substitute(t.find(rf"add\.s32\s+%\w+, %\w+, {t.config.granule - 1};", t.epilogue), r"\d+;", "0;")


@_add("race", "uninitialised", "barrier", WRONG)
def second_part_read_with_the_first(t: BlackwellText) -> None:
    """The epilogue does not wait for the second part of a tile."""
    wait = t.block(t.wait("slot_full", t.epilogue)).start
    test = t.find(r"setp\.ne\.b32\s+%\w+, %\w+, 0;", range(wait), -1)
    chunk = t.lines[test].split(", ")[1]
    part = t.find(rf"setp\.ne\.b32\s+%\w+, {chunk}, 7;", t.epilogue)
    t.substitute(part, r", 7;", ", 15;")


@_add("race", "out-of-bounds", WRONG)
def row_past_the_tail(t: BlackwellText) -> None:
    """One row more than a tile has is written, where its group ends in the middle of a granule."""
    stores = t.all(r"st\.global\.", t.epilogue)
    tail = range(stores[t.config.granule - 1] + 1, len(t.lines))
    for line in t.all(r"setp\.lt\.s32\s+%\w+, %\w+, \d+;", tail):
        constant = int(t.last_operand(line))
        t.substitute(line, r"\d+;", f"{constant - 1};")
