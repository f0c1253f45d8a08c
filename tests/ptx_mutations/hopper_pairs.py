"""Hopper kernels whose blocks share a contraction in pairs, with the exchange of their sums disturbed."""

from __future__ import annotations

from ptx_mutations.hopper_text import HopperText
from ptx_mutations.mutation import WRONG, Mutations

MUTATIONS: Mutations[HopperText] = Mutations(beds=("sm_90a drhs 128x128 pair",))
_add = MUTATIONS.add
_SEND = r"st\.async"
_GRANT = r"mbarrier\.arrive\.release\.cluster"


def _wait_before(t: HopperText, line: int) -> int:
    """The last wait before an instruction."""
    return t.find(r"mbarrier\.try_wait", range(line), -1)


def _sends(t: HopperText) -> range:
    lines = t.all(_SEND)
    return range(lines[0], lines[-1] + 1)


def _receives(t: HopperText) -> range:
    """From the first grant to the last piece."""
    grants = t.all(_GRANT)
    return range(grants[0], t.find(r"bar\.sync\s+1, 256;", range(grants[-1], len(t.lines))))


@_add("race", "barrier")
def piece_sent_before_it_is_granted(t: HopperText) -> None:
    """The sender does not wait for the first buffer to be free."""
    t.drop_block(_wait_before(t, _sends(t).start))


@_add("race", "barrier", "deadlock", WRONG)
def piece_sent_over_another(t: HopperText) -> None:
    """The sender does not wait until the piece before has been read from a buffer."""
    t.drop_block(_wait_before(t, t.all(_SEND)[4]))


@_add("race", "uninitialised", "barrier")
def piece_read_before_it_came(t: HopperText) -> None:
    """The receiver adds a piece without waiting for it."""
    t.drop_block(t.find(r"mbarrier\.try_wait", _receives(t)))


@_add("race")
def buffers_granted_while_results_leave(t: HopperText) -> None:
    """The buffers are granted while the TMA unit may still read the last tile of the result from them."""
    t.drop(t.find(r"wait_group\.read\s+0;", range(t.products.start, t.find(_GRANT))))


@_add("race")
def piece_granted_while_lanes_read(t: HopperText) -> None:
    """One lane grants a buffer while others may still read it."""
    t.drop(t.find(r"bar\.warp\.sync", _receives(t)))


@_add("deadlock")
def piece_not_granted(t: HopperText) -> None:
    """The receiver's warps do not say that they have read a piece."""
    t.drop(t.find(_GRANT, nth=3))


@_add("barrier", "race", "deadlock")
def piece_granted_twice(t: HopperText) -> None:
    """A warp of the receiver says twice that it has read a piece."""
    line = t.find(_GRANT, nth=3)
    t.insert(line, t.lines[line].strip())


@_add("deadlock", "barrier")
def piece_granted_to_oneself(t: HopperText) -> None:
    """The receiver grants its buffers to itself."""
    t.substitute(t.find(r"mapa\.shared::cluster\.u32\s+%\w+, %\w+, 1;"), r", 1;", ", 0;")


@_add("deadlock")
def piece_of_too_many_bytes(t: HopperText) -> None:
    """The receiver expects 16 bytes more than are sent."""
    t.change_bytes(_later_expectation(t), +16)


@_add("barrier", "race", "deadlock")
def piece_of_too_few_bytes(t: HopperText) -> None:
    """The receiver expects 16 bytes fewer than are sent."""
    t.change_bytes(_later_expectation(t), -16)


def _later_expectation(t: HopperText) -> int:
    """Where the receiver expects a piece that is not among the first."""
    return t.find(r"mbarrier\.arrive\.expect_tx", range(t.find(_GRANT, nth=1), len(t.lines)))


@_add(WRONG, "uninitialised")
def piece_sent_to_another_place(t: HopperText) -> None:
    """Half of a piece goes where the other half goes."""
    first, second = t.all(_SEND)[:2]
    target = t.lines[first].split("[")[1].split("]")[0]
    t.substitute(second, r"\[%\w+\]", f"[{target}]")


@_add("deadlock", WRONG, "race", "uninitialised", "barrier")
def piece_sent_to_oneself(t: HopperText) -> None:
    """The sender sends a piece to its own shared memory."""
    target = t.lines[t.find(_SEND)].split("[")[1].split("]")[0]
    t.substitute(t.find(rf"mapa\.shared::cluster\.u32\s+{target}, "), r", 0;", ", 1;")


@_add(WRONG)
def piece_added_twice(t: HopperText) -> None:
    """The receiver adds the first words of a piece twice."""
    line = t.find(r"add\.(?:rn\.)?f32", _receives(t))
    t.insert(line, t.lines[line].strip())
