"""Faults in the Blackwell kernels with swapped operands: tiles of few tokens, transposed results."""

from __future__ import annotations

from ptx_mutations.blackwell_text import BlackwellText
from ptx_mutations.mutation import WRONG, Mutations

MUTATIONS: Mutations[BlackwellText] = Mutations(beds=("sm_100a forward 16x128", "sm_100a dlhs 32x128"))
_add = MUTATIONS.add
_MMA = r"tcgen05\.mma"


# Products


@_add(WRONG)
def step_of_weights_too_far(t: BlackwellText) -> None:
    """The second step of a tile of the contraction takes the weights of the third."""
    weights = t.lines[t.find(_MMA, t.products, 1)].split(", ")[1]
    low = t.lines[t.find(rf"mov\.b64\s+{weights}, ", t.products)].split("{")[1].split(",")[0]
    line = t.find(rf"add\.s32\s+{low}, ", t.products)
    t.substitute(line, r"\d+;", f"{2 * int(t.last_operand(line))};")


def _change_descriptor(t: BlackwellText, change: int) -> None:
    line = t.find(r"selp\.b32\s+%\w+, \d{9}, \d{9}, ", t.products)
    first, second = (int(field) + change for field in t.lines[line].split(", ")[1:3])
    t.substitute(line, r"\d{9}, \d{9}", f"{first}, {second}")


@_add(WRONG, "protocol", "uninitialised")
def product_of_half_the_tokens(t: BlackwellText) -> None:
    """Products have half of a tile's tokens as columns."""
    _change_descriptor(t, -(t.config.tile_m // 16 << 17))


@_add(WRONG, "protocol", "uninitialised")
def product_of_half_the_weights(t: BlackwellText) -> None:
    """Products have 64 rows of weights instead of 128."""
    _change_descriptor(t, -(4 << 24))


# The epilogue


@_add("race")
def slot_returned_before_it_is_read(t: BlackwellText) -> None:
    """Warps give a slot back before they read the accumulators."""
    arrival = t.arrive("slot_empty", t.epilogue)
    elect = t.find(r"elect\.sync", range(arrival), -1)
    predicate = t.lines[elect].split("|")[1].split(",")[0]
    count, read = t.last_operand(arrival), t.find(r"tcgen05\.ld", t.epilogue)
    text = t.lines[arrival].strip()
    t.drop(arrival)
    t.insert(read, t.lines[elect].strip(), f"mov.b32 	{count}, 1;", f"@{predicate} {text}")


@_add("protocol")
def lanes_of_other_warps(t: BlackwellText) -> None:
    """Every other warp of the epilogue reads the lanes of the one before it."""
    t.substitute(t.find(r"and\.b32\s+%\w+, %\w+, 14680064;", t.epilogue), r"14680064;", "4194304;")


def _neighbours(t: BlackwellText, opcode: str) -> int:
    """Where neighbouring lanes trade the values of two rows."""
    return t.find(opcode, t.epilogue)


@_add(WRONG)
def trade_with_the_lane_after_the_next(t: BlackwellText) -> None:
    """Lanes trade values with the lane two further on."""
    t.substitute(_neighbours(t, r"shfl\.sync\.bfly"), r", 1, 31,", ", 2, 31,")


@_add(WRONG)
def own_row_sent(t: BlackwellText) -> None:
    """Lanes send the row that they are to keep."""
    t.substitute(_neighbours(t, r"selp\.f32"), r", (%\w+), (%\w+), (%\w+);", r", \2, \1, \3;")


@_add("race", "out-of-bounds", WRONG)
def row_past_the_tail(t: BlackwellText) -> None:
    """One row more than a tile has is written, where its group ends in the middle of one."""
    rows = t.lines[t.find(rf"min\.s32\s+%\w+, %\w+, {t.config.tile_m};", t.epilogue)].split(", ")[1]
    for line in t.all(rf"setp\.lt\.s32\s+%\w+, %\w+, {rows};", t.epilogue):
        t.substitute(line, r"setp\.lt", "setp.le")


@_add("race", "out-of-bounds", WRONG)
def columns_past_the_end(t: BlackwellText) -> None:
    """Columns past the last one are written."""
    row = t.find(r"setp\.lt\.s32\s+%\w+, %\w+, %\w+;", t.epilogue)
    column = t.find(r"setp\.lt\.s32\s+%\w+, %\w+, %\w+;", range(row + 1, len(t.lines)))
    t.substitute(column, r", %\w+;", ", 2147483647;")


# The scheduler


@_add(WRONG)
def tail_not_dealt(t: BlackwellText) -> None:
    """The tile with which a group ends is not dealt out, unless it is whole."""
    t.substitute(t.find(rf"add\.s32\s+%\w+, %\w+, {t.config.tile_m - 1};", t.scheduler), r"\d+;", "0;")


@_add(WRONG, "race", "out-of-bounds")
def group_starts_one_group_early(t: BlackwellText) -> None:
    """A group starts where the group before it does."""
    t.substitute(t.find(r"shfl\.sync\.up", t.scheduler, 5), r", 1, 0,", ", 2, 0,")


@_add("race", WRONG)
def tiles_dealt_twice(t: BlackwellText) -> None:
    """Every block gets the tiles of all blocks that come before its own."""
    stride = t.first_operand(t.find(r"mov\.u32\s+%\w+, %nctaid\.x;", t.scheduler))
    t.substitute(t.find(rf"add\.s32\s+%\w+, %\w+, {stride};", t.scheduler), r"%\w+;", "1;")
