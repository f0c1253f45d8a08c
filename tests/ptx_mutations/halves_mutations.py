"""Faults in the Blackwell kernel of pairs of blocks whose accumulator is handed over, and given back, in two halves.

Products start the first half on a few stages, which they hold, and the second half catches up on these. So they are, in
the order of the text: those of the first half on held stages, the catch-up, both halves on each later stage.
"""

from __future__ import annotations

from ptx_mutations.blackwell_text import BlackwellText
from ptx_mutations.mutation import WRONG, Mutations

HALVES, HELD = "sm_100a forward 256x512", "sm_100a forward 256x512 held"
MUTATIONS: Mutations[BlackwellText] = Mutations(beds=(HALVES,))
_add = MUTATIONS.add
_MMA = r"tcgen05\.mma"
_STEPS = 4
"""Products for each stage and half."""
_RETURN = r"mbarrier\.arrive\.shared::cluster"
"""To the block that multiplies: for each half, by warps with rows, and by warps without."""


def _catch_up(t: BlackwellText, step: int) -> int:
    return t.find(_MMA, t.products, _STEPS + step)


def _accumulator(t: BlackwellText, product: int) -> str:
    return t.lines[product].split("[")[1].split("]")[0]


# Stages


@_add("race", "uninitialised")
def later_stage_wait(t: BlackwellText) -> None:
    """Products do not wait for the stages behind the held ones."""
    t.drop_block(t.wait("stage_full", t.products, 1))


@_add("race", "uninitialised", "deadlock", "barrier")
def later_stage_parity(t: BlackwellText) -> None:
    """The parity of stages behind the held ones never flips."""
    wait = t.wait("stage_full", t.products, 1)
    t.keep_parity(wait, range(wait, t.products.stop))


@_add("deadlock")
def later_stage_never_returned(t: BlackwellText) -> None:
    """Products do not say that they have read a stage behind the held ones."""
    t.drop(t.commit("stage_empty", 1))


@_add("deadlock")
def later_stage_returned_to_one_block(t: BlackwellText) -> None:
    """Products tell the first block alone that a stage behind the held ones is empty."""
    t.tell_one_block(t.commit("stage_empty", 1))


@_add("deadlock")
def weights_of_the_second_half(t: BlackwellText) -> None:
    """Weights of the second half are not loaded."""
    t.drop(t.find(r"cp\.async\.bulk\.tensor\.4d", t.load, 1))


@_add("deadlock")
def last_box_of_weights(t: BlackwellText) -> None:
    """Where wide boxes would reach past the end of a row, the last of four is not loaded."""
    t.drop(t.find(r"cp\.async\.bulk\.tensor\.3d", t.load, 3))


# Halves


@_add("race")
def second_half_wait(t: BlackwellText) -> None:
    """Products overwrite the second half without waiting until the epilogue has read it."""
    t.drop_block(t.wait("slot_empty", t.products, 1))


@_add("deadlock")
def second_half_parity(t: BlackwellText) -> None:
    """The warp that multiplies waits for the other parity of the second half."""
    t.flip_parity(t.wait("slot_empty", t.products, 1))


@_add("deadlock")
def first_half_never_filled(t: BlackwellText) -> None:
    """Products do not say that the first half is done."""
    t.drop(t.commit("slot_full", 1))


@_add("deadlock", beds=(HELD,))
def held_half_never_filled(t: BlackwellText) -> None:
    """Products do not say that the first half is done, where it is done with the held stages."""
    t.drop(t.commit("slot_full", 0))


@_add("deadlock")
def second_half_never_filled(t: BlackwellText) -> None:
    """Products do not say that the second half is done."""
    t.drop(t.commit("slot_full", 2))


@_add("deadlock")
def first_half_filled_for_one_block(t: BlackwellText) -> None:
    """Products tell the first block alone that the first half is done."""
    t.tell_one_block(t.commit("slot_full", 1))


@_add("deadlock")
def second_half_filled_for_one_block(t: BlackwellText) -> None:
    """Products tell the first block alone that the second half is done."""
    t.tell_one_block(t.commit("slot_full", 2))


@_add("race", "uninitialised", "deadlock", "barrier")
def second_half_full_wait(t: BlackwellText) -> None:
    """The epilogue reads the second half without waiting for it."""
    t.drop_block(t.wait("slot_full", t.epilogue, 1))


@_add("race", "uninitialised", "deadlock", "barrier")
def halves_parity(t: BlackwellText) -> None:
    """The epilogue's parity of the halves never flips."""
    wait = t.wait("slot_full", t.epilogue, 1)
    t.keep_parity(wait, range(wait, len(t.lines)))


@_add("race", "deadlock", "barrier")
def halves_of_one_block_are_enough(t: BlackwellText) -> None:
    """A half counts as read when as many warps have read it as one block has."""
    t.set_count("slot_empty", -4)


@_add("deadlock")
def second_half_never_returned(t: BlackwellText) -> None:
    """The epilogue does not say that it has read the second half."""
    t.drop(t.find(_RETURN, t.epilogue, 2))


@_add("deadlock")
def half_without_rows_never_returned(t: BlackwellText) -> None:
    """Warps whose rows lie past the end of the group do not give the first half back."""
    t.drop(t.find(_RETURN, t.epilogue, 1))


@_add("deadlock", "barrier", "race")
def half_returned_to_the_other_block(t: BlackwellText) -> None:
    """The epilogue gives the first half back to the block that does not multiply."""
    t.substitute(t.find(r"mapa\.shared::cluster\.u32\s+%\w+, %\w+, 0;", t.epilogue), r"0;", "1;")


def _one_piece_early(t: BlackwellText, half: int) -> None:
    read = t.find(r"tcgen05\.wait::ld", t.epilogue, half)
    t.substitute(t.find(r"setp\.ne\.b32\s+%\w+, %\w+, 3;", range(read), -1), r"3;", "2;")


@_add("race", "barrier")
def first_half_returned_one_piece_early(t: BlackwellText) -> None:
    """The first half is given back before its last 64 columns are read."""
    _one_piece_early(t, 0)


@_add("race", "barrier")
def second_half_returned_one_piece_early(t: BlackwellText) -> None:
    """The second half is given back before its last 64 columns are read."""
    _one_piece_early(t, 1)


# The catch-up


@_add(WRONG, "race")
def catch_up_into_the_first_half(t: BlackwellText) -> None:
    """The second half's first step on held stages is added to the first half."""
    line = _catch_up(t, 0)
    first = _accumulator(t, t.find(_MMA, t.products))
    t.substitute(line, r"\[%\w+\]", f"[{first}]")


@_add(WRONG)
def catch_up_step_dropped(t: BlackwellText) -> None:
    """The second half leaves one step on held stages out."""
    t.drop(_catch_up(t, 1))


@_add(WRONG, "uninitialised")
def catch_up_adds_to_what_was_there(t: BlackwellText) -> None:
    """The second half adds to whatever was in tensor memory."""
    predicate = t.last_operand(_catch_up(t, 0))
    t.substitute(t.find(rf"setp\.ne\.b32\s+{predicate}, ", t.products), r"setp\.ne\.b32", "setp.ge.s32")


@_add(WRONG)
def second_half_of_the_weights_of_the_first(t: BlackwellText) -> None:
    """The second half's first step on a later stage takes the weights of the first half."""
    weights = t.lines[t.find(_MMA, t.products, 3 * _STEPS)].split(", ")[2]
    low = t.lines[t.find(rf"mov\.b64\s+{weights}, ", t.products)].split("{")[1].split(",")[0]
    t.substitute(t.find(rf"add\.s32\s+{low}, ", t.products), r"\d+;", "0;")


@_add(WRONG, "race", "uninitialised")
def halves_that_overlap(t: BlackwellText) -> None:
    """Products put the second half 128 columns behind the first, and the epilogue reads it 256 behind."""
    second = _accumulator(t, _catch_up(t, 0))
    t.substitute(t.find(rf"add\.s32\s+{second}, %\w+, 256;"), r"256;", "128;")


@_add(WRONG, "race")
def second_half_written_to_other_columns(t: BlackwellText) -> None:
    """The epilogue writes the second half 128 columns behind the first instead of 256."""
    t.substitute(t.find(r"add\.s32\s+%\w+, %\w+, 256;", t.epilogue), r"256;", "128;")
