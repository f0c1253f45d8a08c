"""Faults in the stages of weights of Blackwell kernels, where a stage holds two tiles of the contraction."""

from __future__ import annotations

from ptx_mutations.blackwell_text import BlackwellText
from ptx_mutations.mutation import WRONG, Mutations

FEW_TOKENS = "sm_100a forward 16x128"
MUTATIONS: Mutations[BlackwellText] = Mutations(beds=(FEW_TOKENS, "sm_100a dlhs 32x128", "sm_100a dlhs 64x128"))
_add = MUTATIONS.add
_NARROW_BOX = r"cp\.async\.bulk\.tensor\.3d"
_WIDE_BOX = r"cp\.async\.bulk\.tensor\.4d"


# Elsewhere, waiting for a stage of the other operand is waiting for both.
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


@_add(WRONG, "out-of-bounds", "uninitialised")
def wide_box_past_the_end(t: BlackwellText) -> None:
    """Wide boxes are loaded where they reach past the end of a row, too."""
    t.substitute(t.find(r"setp\.gt\.s32\s+%\w+, %\w+, %\w+;", t.load), r"%\w+;", "2147483647;")
