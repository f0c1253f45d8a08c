"""Faults in the Blackwell kernels: tensor memory, its slots, products and what they signal, descriptors, masks."""

from __future__ import annotations

from ptx_mutations.blackwell_text import BlackwellText
from ptx_mutations.mutation import WRONG, Mutations

ONE, PAIR, CONTRACTED = "sm_100a forward 128x256", "sm_100a forward 256x256", "sm_100a drhs 128x256"
FEW_TOKENS, MORE_TOKENS = "sm_100a forward 16x128", "sm_100a dlhs 32x128"
SWAPPED = (FEW_TOKENS, MORE_TOKENS)
FEW_ROWS, HALVES = "sm_100a dlhs 64x128", "sm_100a forward 256x512"
WHOLE = (ONE, PAIR, CONTRACTED, FEW_ROWS, *SWAPPED)
"""Whose accumulator is in one part. Of halves, what changes one of them is in `halves_mutations`."""
MUTATIONS: Mutations[BlackwellText] = Mutations(beds=(*WHOLE, HALVES))
_add = MUTATIONS.add
_LOAD = r"cp\.async\.bulk\.tensor"
_MMA = r"tcgen05\.mma"


# The ring of work tiles


@_add("race", "uninitialised", "deadlock", "barrier")
def ring_full_wait_of_epilogue(t: BlackwellText) -> None:
    """The epilogue reads later work tiles without waiting for them."""
    t.drop_block(t.wait("ring_full", t.epilogue, 1))


@_add("deadlock")
def ring_release_of_epilogue(t: BlackwellText) -> None:
    """The epilogue does not say that it has read its later work tiles."""
    t.drop(t.arrive("ring_empty", t.epilogue, 1))


# Stages and slots


@_add("deadlock")
def stage_never_returned(t: BlackwellText) -> None:
    """Products do not say that they have read a stage."""
    t.drop(t.commit("stage_empty"))


@_add("race", "barrier", "deadlock")
def stage_returned_twice(t: BlackwellText) -> None:
    """Products say twice that they have read a stage."""
    line = t.commit("stage_empty")
    t.insert(line, t.lines[line].strip())


# Not where nobody waits for a stage of tokens: FEW_TOKENS has more of them than of weights.
@_add("race", "barrier", "deadlock", beds=(ONE, PAIR, CONTRACTED, HALVES, FEW_ROWS, MORE_TOKENS))
def stage_returned_before_its_last_product(t: BlackwellText) -> None:
    """A stage is returned before the last of its products is issued."""
    commit = t.commit("stage_empty")
    t.move(t.find(_MMA, range(commit), -1), commit + 1)


@_add("deadlock", "barrier", "race")
def next_stage_returned(t: BlackwellText) -> None:
    """Products return the stage behind the one that they read."""
    line = t.commit("stage_empty")
    t.substitute(line, r"\+\d+\]", f"+{t.barriers['stage_empty'].start + 8}]")


@_add("deadlock", beds=WHOLE)
def slot_never_filled(t: BlackwellText) -> None:
    """The last product of a tile does not say that the tile is done."""
    t.drop(t.commit("slot_full"))


@_add("race", "uninitialised", "protocol", "deadlock", "barrier")
def slot_full_wait(t: BlackwellText) -> None:
    """The epilogue reads accumulators without waiting for the products."""
    t.drop_block(t.wait("slot_full", t.epilogue))


@_add("race", "deadlock", "barrier", "uninitialised", beds=WHOLE)
def slot_full_parity(t: BlackwellText) -> None:
    """The epilogue's parity of full slots never flips."""
    t.keep_parity(t.wait("slot_full", t.epilogue), t.epilogue)


@_add("race", "barrier", "protocol")
def slot_empty_wait(t: BlackwellText) -> None:
    """Products overwrite accumulators without waiting until the epilogue has read them."""
    t.drop_block(t.wait("slot_empty", t.products))


@_add("deadlock")
def slot_empty_parity(t: BlackwellText) -> None:
    """The warp that multiplies waits for the other parity of empty slots."""
    t.flip_parity(t.wait("slot_empty", t.products))


@_add("race", "barrier", "deadlock")
def slot_empty_count_one_less(t: BlackwellText) -> None:
    """A slot counts as read when all warps of the epilogue but one have read it."""
    t.set_count("slot_empty", -1)


@_add("deadlock")
def slot_empty_count_one_more(t: BlackwellText) -> None:
    """A slot waits for one warp of the epilogue too many."""
    t.set_count("slot_empty", +1)


@_add("deadlock")
def slot_never_returned(t: BlackwellText) -> None:
    """The epilogue does not say that it has read a slot."""
    t.drop(t.find(r"mbarrier\.arrive\.", range(t.find(r"tcgen05\.ld"), len(t.lines))))


# Pairs of blocks


@_add("deadlock", beds=(PAIR, HALVES))
def stages_returned_to_one_block(t: BlackwellText) -> None:
    """Products tell the first block alone that a stage is empty."""
    t.tell_one_block(t.commit("stage_empty"))


@_add("deadlock", beds=(PAIR,))
def slots_filled_for_one_block(t: BlackwellText) -> None:
    """Products tell the first block alone that a tile is done."""
    t.tell_one_block(t.commit("slot_full"))


@_add("deadlock", "barrier", beds=(PAIR, HALVES))
def bytes_counted_by_each_block(t: BlackwellText) -> None:
    """The second block counts its bytes at its own barrier instead of the first block's."""
    t.substitute(t.find(r"and\.b32\s+%\w+, %\w+, -16777224;", t.load), r"-16777224;", "-8;")


@_add("deadlock", beds=(PAIR, HALVES))
def ring_release_of_the_block_that_follows(t: BlackwellText) -> None:
    """The warp of the second block that could multiply does not say that it has read its later work tiles."""
    t.drop(t.arrive("ring_empty", t.products, -1))


# Tensor memory


@_add("protocol", "out-of-bounds", "uninitialised")
def tensor_memory_halved(t: BlackwellText) -> None:
    """Half of the columns are allocated."""
    columns = t.last_operand(t.find(r"tcgen05\.alloc"))
    line = t.find(rf"mov\.b32\s+{columns}, {t.config.tmem_columns};", t.prologue)
    t.substitute(line, r"\d+;", f"{t.config.tmem_columns // 2};")


@_add("protocol")
def tensor_memory_kept(t: BlackwellText) -> None:
    """The columns are not freed."""
    t.drop(t.find(r"tcgen05\.dealloc"))


@_add("protocol")
def tensor_memory_freed_by_half(t: BlackwellText) -> None:
    """Half of the columns are freed."""
    line = t.find(r"tcgen05\.dealloc")
    t.substitute(t.find(rf"mov\.b32\s+{t.last_operand(line)}, \d+;"), r"\d+;", f"{t.config.tmem_columns // 2};")


@_add("protocol", "race", "uninitialised", WRONG, beds=WHOLE)
def slots_that_overlap(t: BlackwellText) -> None:
    """Slots of products lie half as far apart as those that the epilogue reads."""
    wait = t.wait("slot_empty", t.products)
    # Of 64 rows, two slots share columns, 16 lanes apart.
    shift = 20 if t.config.tile_m == 64 else t.config.slot_columns.bit_length() - 1
    line = t.find(rf"shl\.b32\s+%\w+, %\w+, {shift};", range(wait, len(t.lines)))
    t.substitute(line, r"\d+;", f"{shift - 1};")


@_add(WRONG, "uninitialised", "out-of-bounds", "protocol")
def accumulators_of_other_columns(t: BlackwellText) -> None:
    """The epilogue reads eight columns late."""
    line = t.find(r"tcgen05\.ld", t.epilogue)
    address = t.lines[line].split("[")[1].split("]")[0]
    t.shift(line, address.split("+")[0], 8)


@_add("race", "protocol")
def accumulators_on_their_way(t: BlackwellText) -> None:
    """A slot is given back while accumulators are on their way to the registers: no tcgen05.wait::ld."""
    t.drop(t.find(r"tcgen05\.wait::ld", t.epilogue))


@_add("protocol", "race", "deadlock")
def tensor_memory_freed_while_read(t: BlackwellText) -> None:
    """Nobody waits for the others at the end, before tensor memory is freed."""
    if t.config.blocks == 2:
        t.drop(t.find(r"barrier\.cluster\.wait", nth=-1))
        t.drop(t.find(r"barrier\.cluster\.arrive", nth=-1))
    else:
        t.drop(t.find(r"bar\.sync\s+0;", nth=-1))


# Addresses, descriptors, masks


@_add(WRONG)
def load_of_the_next_row(t: BlackwellText) -> None:
    """Tiles of lhs start one row late, or those of a contraction one row further on."""
    line = t.find(_LOAD, t.load)
    t.shift(line, t.coordinates(line)[1], 1)


@_add("deadlock")
def load_dropped(t: BlackwellText) -> None:
    """Tiles of lhs are not loaded."""
    t.drop(t.find(_LOAD, t.load))


@_add("barrier", "deadlock", "race")
def load_twice(t: BlackwellText) -> None:
    """Tiles of lhs are loaded twice."""
    line = t.find(_LOAD, t.load)
    t.insert(line, t.lines[line].strip())


@_add("misaligned", WRONG, "out-of-bounds", "race", "uninitialised")
def load_to_a_shifted_place(t: BlackwellText) -> None:
    """Tiles of lhs go to shared memory 128 bytes late, where the swizzle pattern is another."""
    t.substitute(t.find(_LOAD, t.load), r"\+1024\]", "+1152]")


@_add(WRONG, "race", "uninitialised", "out-of-bounds")
def descriptor_stride(t: BlackwellText) -> None:
    """Groups of eight rows of lhs are taken to lie 512 bytes apart instead of 1024."""
    line = t.find(r"or\.b64\s+%\w+, %\w+, \d{15,};")
    t.substitute(line, r"\d{15,};", f"{int(t.last_operand(line)) - (32 << 32)};")


@_add(WRONG, "protocol")
def descriptor_swizzle(t: BlackwellText) -> None:
    """Operand lhs is taken to be swizzled in rows of 64 bytes instead of 128."""
    line = t.find(r"or\.b64\s+%\w+, %\w+, \d{15,};")
    t.substitute(line, r"\d{15,};", f"{int(t.last_operand(line)) + (2 << 61)};")


@_add(WRONG)
def product_that_does_not_accumulate(t: BlackwellText) -> None:
    """The last step of a stage forgets what was added before."""
    t.substitute(t.find(r"mov\.pred\s+%\w+, -1;", t.products, -1), "-1;", "0;")


@_add(WRONG, "uninitialised")
def product_that_accumulates_from_the_start(t: BlackwellText) -> None:
    """The first step adds to whatever was in tensor memory."""
    predicate = t.last_operand(t.find(_MMA, t.products))
    t.substitute(t.find(rf"setp\.ne\.b32\s+{predicate}, ", t.products), r"setp\.ne\.b32", "setp.ge.s32")


@_add(WRONG)
def product_step_dropped(t: BlackwellText) -> None:
    """One step of 16 along the contraction is left out."""
    t.drop(t.find(_MMA, t.products, 2))


@_add(WRONG, "out-of-bounds", "race", "deadlock")
def group_off_by_one(t: BlackwellText) -> None:
    """A tile is taken to be of the group behind its own."""
    line = t.find(r"popc\.b32", t.scheduler)
    register = t.first_operand(line)
    t.insert(line + 1, f"add.s32 	{register}, {register}, 1;")


@_add(WRONG)
def half_words_swapped(t: BlackwellText) -> None:
    """Two neighbouring columns of the result are swapped."""
    line = t.find(r"cvt\.rn\.(?:bf|f)16x2\.f32", t.epilogue)
    t.substitute(line, r"(%\w+), (%\w+);", r"\2, \1;")


@_add(WRONG, "race", "out-of-bounds", beds=(ONE, PAIR, HALVES, FEW_ROWS, *SWAPPED))
def tile_of_too_many_rows(t: BlackwellText) -> None:
    """A tile that ends with its group may write as many rows as a whole one."""
    line = t.find(rf"min\.s32\s+%\w+, %\w+, {t.config.tile_m};", t.scheduler)
    t.substitute(line, r"min\.s32\s+(%\w+), %\w+, (\d+);", r"mov.b32 	\1, \2;")


@_add("race", "out-of-bounds", WRONG, beds=(ONE, PAIR, HALVES, FEW_ROWS))
def row_past_the_tail(t: BlackwellText) -> None:
    """One row more than a tile has is written, where its group ends in the middle of one."""
    read = t.find(r"tcgen05\.wait::ld", t.epilogue)
    t.substitute(t.find(r"setp\.ge\.s32\s+%\w+, %\w+, %\w+;", range(read, len(t.lines))), r"setp\.ge", "setp.gt")


@_add(WRONG, "uninitialised", beds=(FEW_ROWS,))
def halves_of_a_warp_too_near(t: BlackwellText) -> None:
    """Of 64 rows, half of a warp reads columns 32 behind those of the other half, instead of 64."""
    t.substitute(t.find(r"tcgen05\.ld[\w.:]*16x32bx2", t.epilogue), r"\], 64;", "], 32;")
