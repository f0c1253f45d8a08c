"""Faults in results that leave through shared memory: buffers and who may write them, boxes, which rows are whole."""

from __future__ import annotations

from ptx_mutations.blackwell_text import BlackwellText
from ptx_mutations.mutation import WRONG, Mutations

FORWARD, WEIGHTS = "sm_100a forward 256x256 staged", "sm_100a drhs 128x128 staged"
MUTATIONS: Mutations[BlackwellText] = Mutations(beds=(FORWARD, WEIGHTS))
_add = MUTATIONS.add
_STORE = r"cp\.async\.bulk\.tensor\.\dd\.global\.shared::cta"


def _store(t: BlackwellText) -> int:
    return t.find(_STORE, t.epilogue)


def _reuse(t: BlackwellText) -> int:
    """Where a warp waits until a buffer may be written again."""
    return t.find(r"cp\.async\.bulk\.wait_group\.read\s+1;", t.epilogue)


# Buffers


@_add("race")
def buffer_not_fenced(t: BlackwellText) -> None:
    """No proxy fence between writing a buffer and the TMA unit's store."""
    t.drop(t.find(r"fence\.proxy\.async", t.epilogue))


@_add("race")
def buffer_fenced_for_global_memory(t: BlackwellText) -> None:
    """The proxy fence between writing a buffer and the TMA unit's store is one for global memory."""
    t.substitute(t.find(r"fence\.proxy\.async", t.epilogue), r"shared::cta", "global")


@_add("race")
def buffer_fenced_after_the_store(t: BlackwellText) -> None:
    """The proxy fence comes behind the TMA unit's store."""
    t.move(t.find(r"fence\.proxy\.async", t.epilogue), _store(t) + 1)


@_add("race")
def buffer_not_written_by_all(t: BlackwellText) -> None:
    """A buffer is stored while lanes of its warp may still write it."""
    t.drop(t.find(r"bar\.warp\.sync", range(t.find(r"fence\.proxy\.async", t.epilogue), len(t.lines))))


@_add("race")
def buffer_not_waited_for(t: BlackwellText) -> None:
    """Buffers are written again without waiting for the stores that read them."""
    t.drop(_reuse(t))


@_add("race")
def buffer_reused_one_early(t: BlackwellText) -> None:
    """One store more may still be reading its buffer: wait_group.read 1 has become 2."""
    t.substitute(_reuse(t), r"1;", "2;")


@_add("race")
def store_not_committed(t: BlackwellText) -> None:
    """Stores are not committed to a group."""
    t.drop(t.find(r"cp\.async\.bulk\.commit_group", t.epilogue))


@_add("protocol")
def buffer_left_at_the_end(t: BlackwellText) -> None:
    """The block ends while the TMA unit may be reading its shared memory."""
    t.drop(t.find(r"cp\.async\.bulk\.wait_group\.read\s+0;", t.epilogue))


@_add("race")
def one_buffer(t: BlackwellText) -> None:
    """A warp writes all that it stores to the first of its two buffers."""
    line = t.find(r"shl\.b32\s+%\w+, %\w+, 12;", range(_reuse(t), _store(t)))
    t.substitute(line, r"shl\.b32\s+(%\w+), .*;", r"mov.b32 	\1, 0;")


@_add("race", WRONG)
def buffers_of_warps_overlap(t: BlackwellText) -> None:
    """The buffers of a warp lie 4 KiB behind those of the warp before it, instead of 8 KiB."""
    t.substitute(t.find(r"shl\.b32\s+%\w+, %\w+, 13;", t.epilogue), r"13;", "12;")


@_add("race", "uninitialised", WRONG)
def other_buffer_stored(t: BlackwellText) -> None:
    """The buffer behind the one that was written is stored."""
    line = _store(t)
    place = t.lines[line].split("[")[2].split("]")[0]
    register, _, offset = place.partition("+")
    t.substitute(line, rf"\[{register}\+{offset}\]", f"[{register}+{int(offset) + 4096}]")


@_add("uninitialised", "race", WRONG)
def pieces_at_one_place(t: BlackwellText) -> None:
    """The second piece of a row is written where the first one is."""
    first, second = t.all(r"st\.shared\.v4\.b32", range(_reuse(t), _store(t)))[:2]
    place = t.lines[first].split("[")[1].split("]")[0]
    t.substitute(second, r"\[%\w+\]", f"[{place}]")


@_add(WRONG)
def pieces_of_another_swizzle(t: BlackwellText) -> None:
    """Pieces are swizzled by two bits of the row, where the TMA unit takes three."""
    t.substitute(t.find(r"and\.b32\s+%\w+, %\w+, 112;", t.epilogue), r"112;", "48;")


@_add(WRONG)
def columns_of_a_piece_swapped(t: BlackwellText) -> None:
    """Two neighbouring columns of what is staged are swapped."""
    line = t.find(r"cvt\.rn\.bf16x2\.f32", range(_reuse(t)), -1)
    t.substitute(line, r"(%\w+), (%\w+);", r"\2, \1;")


# Boxes


@_add(WRONG, "race")
def box_of_the_next_row(t: BlackwellText) -> None:
    """Boxes are stored one row late."""
    line = _store(t)
    t.shift(line, t.coordinates(line)[1], 1)


@_add(WRONG, "race")
def box_of_other_columns(t: BlackwellText) -> None:
    """Boxes are stored eight columns late."""
    line = _store(t)
    t.shift(line, t.coordinates(line)[0], 8)


@_add(WRONG, "race", beds=(WEIGHTS,))
def box_of_the_next_group(t: BlackwellText) -> None:
    """Boxes are stored to the matrix of the next group."""
    line = _store(t)
    t.shift(line, t.coordinates(line)[2], 1)


@_add(WRONG, "race")
def box_not_stored(t: BlackwellText) -> None:
    """Rows that are staged are not stored."""
    t.drop(_store(t))


# Which rows


def _partial(t: BlackwellText) -> int:
    """Where a warp finds that it does not have all of its rows."""
    return t.find(r"setp\.gt\.s32\s+%\w+, %\w+, %\w+;", range(t.epilogue.start, _reuse(t)), -1)


# In dW, what a box reaches past the end of a matrix is not stored.
@_add(WRONG, "race", beds=(FORWARD,))
def tail_stored_as_a_whole_box(t: BlackwellText) -> None:
    """Whole boxes are stored for warps that do not have all of their rows."""
    t.substitute(_partial(t), r", (%\w+), %\w+;", r", \1, 2147483647;")


@_add(WRONG, "race", beds=(FORWARD,))
def tail_of_31_rows_stored_as_a_whole_box(t: BlackwellText) -> None:
    """Whole boxes are stored for warps that have all of their rows but one."""
    line = _partial(t)
    t.shift(line, t.lines[line].split(", ")[1], -1)


@_add(WRONG)
def tail_not_stored(t: BlackwellText) -> None:
    """Warps that do not have all of their rows store none."""
    t.substitute(t.find(r"@%\w+ bra", range(_partial(t), len(t.lines))), r"\$L\w+", _end_of_part(t))


def _end_of_part(t: BlackwellText) -> str:
    """Where the rows of a tail have been stored."""
    store = _store(t)
    return t.lines[t.find(r"@%\w+ bra", range(store, len(t.lines)))].split()[-1].rstrip(";")
