"""Faults in the small tcgen05 product, with one and with two blocks to a tile."""

from __future__ import annotations

from ptx_mutations.mutation import WRONG, Mutations
from ptx_mutations.tcgen05_text import Tcgen05Text

ONE, TWO = "sm_100a test bed, 1 block", "sm_100a test bed, 2 blocks"
MUTATIONS: Mutations[Tcgen05Text] = Mutations(beds=(ONE, TWO))
_add = MUTATIONS.add
_LOAD = r"cp\.async\.bulk\.tensor"
_MMA = r"tcgen05\.mma"
_COMMIT = r"tcgen05\.commit"


# Barriers


@_add("race", "barrier", "uninitialised", "protocol")
def no_meeting_after_the_initialisation(t: Tcgen05Text) -> None:
    """Warps do not wait for the barriers, nor for the address in tensor memory."""
    t.drop(t.find(t.meeting))


@_add("race", "protocol", "barrier")
def no_fence_after_the_initialisation(t: Tcgen05Text) -> None:
    """No fence.mbarrier_init."""
    t.drop(t.find(r"fence\.mbarrier_init"))


@_add("race", "barrier")
def empty_wait(t: Tcgen05Text) -> None:
    """The load warp fills stages without waiting until they have been multiplied."""
    t.drop_block(t.wait("stage_empty", t.load))


@_add("race", "uninitialised")
def full_wait(t: Tcgen05Text) -> None:
    """Products read stages without waiting for them."""
    t.drop_block(t.wait("stage_full", t.products))


@_add("race", "uninitialised", "protocol")
def done_wait(t: Tcgen05Text) -> None:
    """The accumulators are read without waiting for the products."""
    t.drop_block(t.wait("done", t.store))


@_add("deadlock")
def empty_parity(t: Tcgen05Text) -> None:
    """The load warp waits for the other parity of empty stages."""
    t.flip_parity(t.wait("stage_empty", t.load))


@_add("race", "uninitialised", "deadlock", "barrier")
def full_parity(t: Tcgen05Text) -> None:
    """The parity of full stages never flips for the warp that multiplies."""
    t.keep_parity(t.wait("stage_full", t.products), t.products)


@_add("deadlock")
def count_one_more(t: Tcgen05Text) -> None:
    """The first barrier expects two arrivals."""
    line = t.find(r"mbarrier\.init")
    register = t.last_operand(line)
    t.substitute(line, rf", {register};", ", 2;")


@_add("deadlock", "barrier")
def bytes_too_many(t: Tcgen05Text) -> None:
    """16 bytes more are expected than come."""
    t.change_bytes(t.arrive("stage_full", t.load), +16)


@_add("deadlock", "barrier", "race")
def bytes_too_few(t: Tcgen05Text) -> None:
    """16 bytes fewer are expected than come."""
    t.change_bytes(t.arrive("stage_full", t.load), -16)


@_add("race", "barrier", "uninitialised", beds=(TWO,))
def bytes_of_one_block(t: Tcgen05Text) -> None:
    """The first block expects its own bytes alone, not those of both."""
    arrival = t.arrive("stage_full", t.load)
    place = t.find(rf"mov\.b32\s+{t.last_operand(arrival)}, \d+;", t.load)
    t.change_bytes(arrival, -int(t.last_operand(place)) // 2)


@_add("deadlock", "barrier", beds=(TWO,))
def both_blocks_signal_their_own(t: Tcgen05Text) -> None:
    """The second block counts its bytes at its own barrier instead of the first block's."""
    line = t.find(r"and\.b32\s+%\w+, %\w+, -16777224;", t.load)
    t.substitute(line, r"-16777224;", "-8;")


@_add("deadlock", beds=(TWO,))
def stages_returned_to_one_block(t: Tcgen05Text) -> None:
    """The first block's products tell that block alone that a stage is empty."""
    line = t.find(_COMMIT, t.products)
    t.substitute(t.find(rf"mov\.b16\s+{t.last_operand(line)}, 3;", t.products), r"3;", "1;")


@_add("deadlock", beds=(TWO,))
def results_announced_to_one_block(t: Tcgen05Text) -> None:
    """The first block's products tell that block alone that they are done."""
    line = t.find(_COMMIT, t.products, -1)
    t.substitute(t.find(rf"mov\.b16\s+{t.last_operand(line)}, 3;", t.products), r"3;", "1;")


@_add("deadlock")
def stages_not_returned(t: Tcgen05Text) -> None:
    """Products do not say that they have read a stage."""
    t.drop(t.find(_COMMIT, t.products))


@_add("deadlock")
def results_not_announced(t: Tcgen05Text) -> None:
    """Products do not say that they are done."""
    t.drop(t.find(_COMMIT, t.products, -1))


@_add("race", "barrier", "protocol", "deadlock")
def stages_returned_twice(t: Tcgen05Text) -> None:
    """Products say twice that they have read a stage."""
    line = t.find(_COMMIT, t.products)
    t.insert(line, t.lines[line].strip())


@_add("race")
def stages_returned_too_early(t: Tcgen05Text) -> None:
    """A stage is returned before the last of its products is issued."""
    commit, product = t.find(_COMMIT, t.products), t.find(_MMA, t.products, 3)
    t.move(commit, product)
    if t.ctas == 2:
        t.insert(product, f"mov.b16 	{t.last_operand(product)}, 3;")


# Tensor memory


@_add("protocol", "out-of-bounds", "uninitialised")
def tensor_memory_halved(t: Tcgen05Text) -> None:
    """Half of the columns are allocated."""
    line = t.find(r"tcgen05\.alloc")
    t.substitute(t.find(rf"mov\.b32\s+{t.last_operand(line)}, 64;", t.prologue), r"64;", "32;")


@_add("protocol")
def tensor_memory_kept(t: Tcgen05Text) -> None:
    """The columns are not freed."""
    t.drop(t.find(r"tcgen05\.dealloc"))


@_add("protocol", "out-of-bounds", "uninitialised", WRONG)
def tensor_memory_of_another_warp(t: Tcgen05Text) -> None:
    """Warps read the lanes of the first warp, which only that warp may read."""
    line = t.find(r"and\.b32\s+%\w+, %\w+, 14680064;", t.store)
    t.substitute(line, "14680064", "0")


@_add(WRONG, "uninitialised", "out-of-bounds")
def tensor_memory_columns(t: Tcgen05Text) -> None:
    """The accumulators are read eight columns late."""
    line = t.find(r"tcgen05\.ld", t.store)
    t.shift(line, t.lines[line].split("[")[1].split("]")[0], 8)


@_add("race", "protocol")
def no_meeting_before_the_end(t: Tcgen05Text) -> None:
    """Tensor memory is freed while other warps may still read it."""
    t.drop(t.find(t.meeting, nth=-1))
    if t.ctas == 2:
        t.drop(t.find(r"barrier\.cluster\.arrive", nth=-1))


# Addresses, descriptors, masks


@_add(WRONG)
def load_of_the_next_row(t: Tcgen05Text) -> None:
    """Tiles of a start one row late."""
    line = t.find(_LOAD, t.load)
    t.shift(line, t.coordinates(line)[1], 1)


@_add("deadlock")
def load_dropped(t: Tcgen05Text) -> None:
    """Tiles of b are not loaded."""
    t.drop(t.find(_LOAD, t.load, 1))


@_add("misaligned", WRONG)
def load_to_a_shifted_place(t: Tcgen05Text) -> None:
    """Tiles of a go to shared memory 128 bytes late, where the swizzle pattern is another."""
    t.substitute(t.find(_LOAD, t.load), r"\+1024\]", "+1152]")


@_add(WRONG, "race", "uninitialised")
def descriptor_stride(t: Tcgen05Text) -> None:
    """Groups of eight rows are taken to lie 512 bytes apart instead of 1024."""
    for line in t.all(r"or\.b64\s+%\w+, %\w+, \d{15,};"):
        t.substitute(line, r"\d{15,};", f"{int(t.last_operand(line)) - (32 << 32)};")


@_add(WRONG, "protocol")
def descriptor_swizzle(t: Tcgen05Text) -> None:
    """Operands are taken to be swizzled in rows of 64 bytes instead of 128."""
    for line in t.all(r"or\.b64\s+%\w+, %\w+, \d{15,};"):
        t.substitute(line, r"\d{15,};", f"{int(t.last_operand(line)) + (2 << 61)};")


@_add(WRONG)
def descriptor_start(t: Tcgen05Text) -> None:
    """The second step of a product starts 32 bytes late in one operand."""
    t.substitute(t.find(r"add\.s32\s+%\w+, %\w+, 2;", t.products), r"2;", "4;")


@_add(WRONG)
def instruction_of_another_type(t: Tcgen05Text) -> None:
    """The instruction descriptor takes bfloat16 operands for float16."""
    line = t.find(r"selp\.b32\s+%\w+, \d+, \d+, %\w+;", t.products, 1)
    values = [int(v) for v in t.lines[line].split(", ")[1:3]]
    changed = ", ".join(str(value & ~(0b111111 << 7)) for value in values)
    t.substitute(line, rf"{values[0]}, {values[1]}", changed)


@_add(WRONG)
def product_that_does_not_accumulate(t: Tcgen05Text) -> None:
    """The last step of a stage forgets what was added before."""
    line = t.find(r"mov\.pred\s+%\w+, -1;", t.products, -1)
    t.substitute(line, "-1;", "0;")


@_add(WRONG, "uninitialised")
def product_that_accumulates_from_the_start(t: Tcgen05Text) -> None:
    """The first step adds to whatever was in tensor memory."""
    line = t.find(_MMA, t.products)
    predicate = t.last_operand(line)
    t.substitute(t.find(rf"setp\.ne\.b32\s+{predicate}, ", t.products), r"setp\.ne\.b32", "setp.ge.s32")


@_add(WRONG)
def product_step_dropped(t: Tcgen05Text) -> None:
    """One step of 16 along the contraction is left out."""
    t.drop(t.find(_MMA, t.products, 2))


@_add(WRONG, "out-of-bounds")
def row_mask(t: Tcgen05Text) -> None:
    """One row past the end of the result is written."""
    for line in t.all(r"setp\.le\.s32\s+%\w+, %\w+, %\w+;", t.store):
        t.substitute(line, r"setp\.le\.s32", "setp.lt.s32")


@_add(WRONG)
def columns_swapped(t: Tcgen05Text) -> None:
    """Two neighbouring columns of the result are swapped."""
    line = t.find(r"tcgen05\.ld", t.store)
    t.substitute(line, r"\{(%\w+), (%\w+),", r"{\2, \1,")
