"""Faults in asking for tiles by cluster launch control: the answer and its barriers, what pairs agree on, numbers."""

from __future__ import annotations

from ptx_mutations.blackwell_text import BlackwellText
from ptx_mutations.mutation import WRONG, Mutations

ONE, PAIR = "sm_100a forward 64x128 dynamic", "sm_100a dlhs 256x256 dynamic"
ANY_ORDER = "sm_100a forward 64x128 dynamic, in another order"
FEW_TILES = "sm_100a dlhs 256x256 dynamic, few tiles"
MUTATIONS: Mutations[BlackwellText] = Mutations(beds=(ONE, PAIR))
_add = MUTATIONS.add

WITHIN, PAST = 0, 1
"""The places where a block asks: while it walks over the groups, and when its number is past the last tile."""
_ASK = r"clusterlaunchcontrol\.try_cancel"
_NUMBER = r"clusterlaunchcontrol\.query_cancel\.get_first_ctaid"


def _ask(t: BlackwellText, where: int) -> int:
    return t.find(_ASK, t.scheduler, where)


def _number(t: BlackwellText, where: int) -> int:
    return t.find(_NUMBER, t.scheduler, where)


def _after(t: BlackwellText, pattern: str, line: int) -> int:
    return t.find(pattern, range(line, t.scheduler.stop))


# The answer's barrier


@_add("deadlock")
def answer_count_one_more(t: BlackwellText) -> None:
    """An answer waits for two arrivals of the scheduler, which arrives once."""
    t.set_count("answered", +1)


@_add("deadlock")
def answer_never_expected(t: BlackwellText) -> None:
    """The scheduler does not arrive for its answer."""
    t.drop(t.arrive("answered", t.scheduler, WITHIN))


@_add("deadlock")
def answer_past_the_last_never_expected(t: BlackwellText) -> None:
    """Past the last tile, the scheduler does not arrive for its answer."""
    t.drop(t.arrive("answered", t.scheduler, PAST))


@_add("race", "barrier", "uninitialised")
def answer_bytes_not_expected(t: BlackwellText) -> None:
    """The scheduler arrives without saying that 16 bytes are to come."""
    line = t.arrive("answered", t.scheduler, WITHIN)
    t.substitute(line, r"arrive\.expect_tx", "arrive")
    t.substitute(line, r", %\w+;", ", 1;")


@_add("barrier")
def answer_bytes_too_few(t: BlackwellText) -> None:
    """Eight bytes of an answer are expected, and 16 come."""
    t.change_bytes(t.arrive("answered", t.scheduler, WITHIN), -8)


@_add("deadlock")
def answer_bytes_too_many(t: BlackwellText) -> None:
    """32 bytes of an answer are expected, and 16 come."""
    t.change_bytes(t.arrive("answered", t.scheduler, WITHIN), +16)


@_add("race", "uninitialised", "protocol")
def answer_not_waited_for(t: BlackwellText) -> None:
    """The answer is read without waiting for it."""
    t.drop_block(t.wait("answered", t.scheduler, WITHIN))


@_add("race", "barrier", "protocol")
def answer_past_the_last_not_waited_for(t: BlackwellText) -> None:
    """Past the last tile, the answer is read without waiting for it."""
    t.drop_block(t.wait("answered", t.scheduler, PAST))


@_add("race", "uninitialised", "protocol")
def answer_waited_for_once(t: BlackwellText) -> None:
    """The answer is read after one try to wait for it."""
    t.wait_once(t.wait("answered", t.scheduler, WITHIN))


@_add("race", "deadlock", "barrier")
def answer_parity(t: BlackwellText) -> None:
    """The parity of answers never flips."""
    t.keep_parity(t.wait("answered", t.scheduler, WITHIN), t.scheduler)


@_add("deadlock", "barrier")
def answer_told_to_another_barrier(t: BlackwellText) -> None:
    """The bytes of an answer are counted at the barrier of a slot."""
    line = _ask(t, WITHIN)
    change = t.barriers["slot_empty"].start - t.barriers["answered"].start
    t.substitute(line, r", \[(%\w+)\];", rf", [\1+{change}];")


# The answer


@_add("race")
def answer_not_fenced(t: BlackwellText) -> None:
    """No proxy fence between reading an answer and asking for the next one."""
    t.drop(_after(t, r"fence\.proxy\.async", _ask(t, WITHIN)))


# Where a block asks more than once past the last tile: of the last answer nothing has to be behind.
@_add("race", beds=(ANY_ORDER, FEW_TILES))
def answer_past_the_last_not_fenced(t: BlackwellText) -> None:
    """Past the last tile, no proxy fence between reading an answer and asking for the next one."""
    t.drop(_after(t, r"fence\.proxy\.async", _ask(t, PAST)))


@_add("race")
def answer_fenced_for_global_memory(t: BlackwellText) -> None:
    """The proxy fence behind an answer is one for global memory."""
    line = _after(t, r"fence\.proxy\.async", _ask(t, WITHIN))
    t.substitute(line, r"shared::cta", "global")


@_add("race")
def answer_not_read_by_all(t: BlackwellText) -> None:
    """One lane asks again while others may still read the last answer."""
    t.drop(_after(t, r"bar\.warp\.sync", _ask(t, WITHIN)))


@_add("protocol")
def answer_without_its_predicate(t: BlackwellText) -> None:
    """An answer's number is taken, whether or not it has one."""
    t.substitute(_number(t, WITHIN), r"@taken ", "")


@_add("protocol")
def answer_past_the_last_without_its_predicate(t: BlackwellText) -> None:
    """Past the last tile, an answer's number is taken, whether or not it has one."""
    t.substitute(_number(t, PAST), r"@taken ", "")


@_add("race", WRONG, "limit")
def number_of_another_axis(t: BlackwellText) -> None:
    """The place of the cluster along y is taken for its number."""
    t.substitute(_number(t, WITHIN), r"::x\.b32", "::y.b32")


@_add("uninitialised", "race", "misaligned", "protocol")
def answer_at_another_place(t: BlackwellText) -> None:
    """Answers come 16 bytes behind where they are read."""
    t.substitute(_ask(t, WITHIN), r"\[(%\w+)\], ", r"[\1+16], ")


@_add("misaligned")
def answer_misaligned(t: BlackwellText) -> None:
    """Answers come eight bytes behind a multiple of 16."""
    t.substitute(_ask(t, WITHIN), r"\[(%\w+)\], ", r"[\1+8], ")


# Asking


@_add("protocol")
def asked_by_every_lane(t: BlackwellText) -> None:
    """All lanes of the scheduler ask, not one of them."""
    t.drop(t.find(r"@%\w+ bra", range(_ask(t, WITHIN)), -1))


@_add("deadlock", "protocol", "barrier", "race")
def asked_twice(t: BlackwellText) -> None:
    """Two clusters are asked for at once."""
    line = _ask(t, WITHIN)
    t.insert(line, t.lines[line].strip())


@_add("deadlock")
def never_asked(t: BlackwellText) -> None:
    """Nothing is asked for while an answer is waited for."""
    t.drop(_ask(t, WITHIN))


@_add("protocol", "deadlock")
def asked_after_the_last_answer(t: BlackwellText) -> None:
    """Whoever hears past the last tile that no cluster is left asks again."""
    end = _after(t, r"setp\.ne\.b32\s+%\w+, %\w+, 2147483647;", _ask(t, PAST))
    t.substitute(end, r"2147483647;", "-1;")


# The tiles


# Asking waits for room as well: each wait alone is there for the other's sake.
@_add("race", beds=(ONE,))
def room_not_waited_for(t: BlackwellText) -> None:
    """The scheduler neither waits for room in the ring before it asks nor before it writes."""
    for line in t.all(r"mbarrier\.try_wait", t.scheduler):
        if t.barrier(line) == "ring_empty":
            t.drop_block(line)


@_add(WRONG, "race", "deadlock", "limit", "protocol")
def first_tile_of_its_neighbour(t: BlackwellText) -> None:
    """Every block starts with the tile behind its own."""
    line = t.find(r"mov\.u32\s+%\w+, %ctaid\.x;")
    register = t.first_operand(line)
    t.insert(line + 1, f"add.s32 	{register}, {register}, {t.config.blocks};")


@_add(WRONG, "race", "out-of-bounds", beds=(ANY_ORDER,))
def walk_not_begun_again(t: BlackwellText) -> None:
    """The walk over the groups goes on, although the number of the cluster is smaller than the one before."""
    line = _after(t, r"add\.s32\s+%\w+, %\w+, 1073741824;", _number(t, WITHIN))
    t.substitute(line, r"1073741824;", "0;")


# Pairs


@_add("deadlock", beds=(PAIR,))
def answer_for_one_block(t: BlackwellText) -> None:
    """The answer comes to the first block of the pair alone."""
    t.substitute(_ask(t, WITHIN), r"\.multicast::cluster::all", "")


@_add("race", "barrier", "protocol", "deadlock", beds=(PAIR,))
def pair_not_waited_for(t: BlackwellText) -> None:
    """The first block asks without waiting until the second one has read the last answer."""
    t.drop_block(t.wait("ready", t.scheduler, WITHIN))


@_add("race", "barrier", "protocol", "deadlock", beds=(PAIR,))
def pair_waited_for_once(t: BlackwellText) -> None:
    """The first block asks after one try to wait for the second one."""
    t.wait_once(t.wait("ready", t.scheduler, WITHIN))


@_add("race", "barrier", "deadlock", beds=(PAIR,))
def pair_count_one_less(t: BlackwellText) -> None:
    """One block of the pair is enough for an answer to be asked for."""
    t.set_count("ready", -1)


@_add("deadlock", beds=(PAIR,))
def pair_count_one_more(t: BlackwellText) -> None:
    """Three blocks of the pair have to be ready for an answer."""
    t.set_count("ready", +1)


@_add("deadlock", beds=(PAIR,))
def pair_never_ready(t: BlackwellText) -> None:
    """No block of a pair says that it is ready for an answer."""
    t.drop(t.find(r"mbarrier\.arrive\.release\.cluster", t.scheduler, WITHIN))


@_add("deadlock", "barrier", "race", beds=(PAIR,))
def pair_ready_each_for_itself(t: BlackwellText) -> None:
    """Each block of a pair says to itself that it is ready for an answer."""
    line = t.find(r"mbarrier\.arrive\.release\.cluster", t.scheduler, WITHIN)
    register = t.lines[line].split("[")[1].split("]")[0]
    mapped = t.find(rf"mapa\.shared::cluster\.u32\s+{register}, ")
    t.substitute(mapped, r"mapa\.shared::cluster\.u32\s+(%\w+), (%\w+), 0;", r"mov.b32 	\1, \2;")


@_add("race", "deadlock", "barrier", beds=(PAIR,))
def asked_by_both_blocks(t: BlackwellText) -> None:
    """Both blocks of a pair ask."""
    wait = t.block(t.wait("ready", t.scheduler, WITHIN)).start
    t.drop(t.find(r"@%\w+ bra", range(wait), -1))


@_add(WRONG, "race", "deadlock", "out-of-bounds", beds=(PAIR,))
def block_taken_for_a_cluster(t: BlackwellText) -> None:
    """The number of a block is taken for that of its pair."""
    t.substitute(_after(t, r"shr\.u32\s+%\w+, %\w+, 1;", _number(t, WITHIN)), r", 1;", ", 0;")
