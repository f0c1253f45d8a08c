"""Faults in the Blackwell kernels with swapped operands: stages of weights, tiles of few tokens, transposed results."""

from __future__ import annotations

from ptx_mutations.blackwell_text import BlackwellText
from ptx_mutations.mutation import WRONG, Mutations

FEW_TOKENS, MORE_TOKENS = "sm_100a forward 16x128", "sm_100a dlhs 32x128"
MUTATIONS: Mutations[BlackwellText] = Mutations(beds=(FEW_TOKENS, MORE_TOKENS))
_add = MUTATIONS.add
_MMA = r"tcgen05\.mma"
_NARROW_BOX = r"cp\.async\.bulk\.tensor\.3d"
_WIDE_BOX = r"cp\.async\.bulk\.tensor\.4d"


# Stages of weights, which hold two tiles of the contraction


# Not MORE_TOKENS, where waiting for a stage of tokens is waiting for all.
@_add("race", "barrier", beds=(FEW_TOKENS,))
def weights_wait(t: BlackwellText) -> None:
    """The load warp fills stages of weights without waiting until they have been multiplied."""
    t.drop_block(t.wait("weights_empty", t.load))


@_add("deadlock")
def weights_parity(t: BlackwellText) -> None:
    """The load warp waits for the other parity of empty stages of weights."""
    t.flip_parity(t.wait("weights_empty", t.load))


@_add("deadlock")
def weights_count_one_more(t: BlackwellText) -> None:
    """A stage of weights waits for two commits, of which there is one."""
    t.set_count("weights_empty", +1)


@_add("deadlock")
def weights_never_returned(t: BlackwellText) -> None:
    """Products do not say that they have read a stage of weights."""
    t.drop(t.on_barrier(r"tcgen05\.commit", "weights_empty", t.products))


@_add("race", "barrier", "deadlock")
def weights_returned_twice(t: BlackwellText) -> None:
    """Products say twice that they have read a stage of weights."""
    line = t.on_barrier(r"tcgen05\.commit", "weights_empty", t.products)
    t.insert(line, t.lines[line].strip())


@_add("race", "barrier", "deadlock", "uninitialised", WRONG)
def weights_returned_with_their_first_tile(t: BlackwellText) -> None:
    """A stage of weights is returned, and left, after the first of its two tiles of the contraction."""
    t.substitute(t.find(r"or\.pred", t.products), r"or\.pred\s+(%\w+), .*;", r"mov.pred 	\1, -1;")


@_add("deadlock", "race", "uninitialised", WRONG)
def weights_kept_at_an_odd_end(t: BlackwellText) -> None:
    """A stage of weights is kept where a contraction ends with the first of its two tiles."""
    t.substitute(t.find(r"or\.pred", t.products), r"or\.pred\s+(%\w+), (%\w+), .*;", r"mov.pred 	\1, \2;")


def _expected_bytes(t: BlackwellText) -> int:
    return t.find(r"selp\.b32\s+%\w+, \d{4,}, \d{4,}, ", t.load)


@_add("barrier", "race", "uninitialised", "deadlock")
def weights_not_counted(t: BlackwellText) -> None:
    """A stage expects the bytes of its tokens alone, although weights come with it."""
    t.substitute(_expected_bytes(t), r"\d{4,}, (\d{4,})", r"\1, \1")


@_add("deadlock")
def weights_counted_with_every_tile(t: BlackwellText) -> None:
    """A stage expects weights also with the second of their tiles, with which none come."""
    t.substitute(_expected_bytes(t), r"(\d{4,}), \d{4,}", r"\1, \1")


@_add("deadlock")
def half_of_the_weights(t: BlackwellText) -> None:
    """Where a wide box would reach past the end of a row, the second of two boxes is not loaded."""
    t.drop(t.find(_NARROW_BOX, t.load, 1))


@_add(WRONG, "race", "uninitialised", "barrier")
def halves_of_the_weights_at_one_place(t: BlackwellText) -> None:
    """The second of two boxes goes where the first one goes."""
    first, second = t.all(_NARROW_BOX, t.load)[:2]
    place = t.lines[first].split("[")[1].split("]")[0]
    t.substitute(second, r"\[%\w+\+\d+\]", f"[{place}]")


@_add(WRONG)
def weights_of_the_next_group(t: BlackwellText) -> None:
    """Wide boxes come from the weights behind those of the group."""
    line = t.find(_WIDE_BOX, t.load)
    t.shift(line, t.coordinates(line)[-1], 1)


@_add(WRONG)
def second_tile_of_weights_not_reached(t: BlackwellText) -> None:
    """Products take the first tile of a stage of weights for the second one as well."""
    t.substitute(t.find(r"and\.b32\s+%\w+, %\w+, (?:512|1024);", t.products), r"\d+;", "0;")


@_add(WRONG, "race", "uninitialised")
def weights_of_half_the_pitch(t: BlackwellText) -> None:
    """Products take stages of weights to lie half as far apart as they do."""
    t.substitute(t.find(r"shl\.b32\s+%\w+, %\w+, 11;", t.products), r"11;", "10;")


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
    stride = t.lines[t.find(r"mov\.u32\s+%\w+, %nctaid\.x;", t.scheduler)].split()[1].rstrip(",")
    t.substitute(t.find(rf"add\.s32\s+%\w+, %\w+, {stride};", t.scheduler), r"%\w+;", "1;")
