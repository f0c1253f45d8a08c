"""Hopper kernels with an address, a coordinate, a mask or a count that is off."""

from __future__ import annotations

from ptx_mutations.hopper_text import HopperText
from ptx_mutations.mutation import WRONG, Mutations
from ptx_mutations.text import NotFoundError

MUTATIONS: Mutations[HopperText] = Mutations(beds=("sm_90a forward 128x128",))
_add = MUTATIONS.add
_TILES = ("sm_90a forward 128x128", "sm_90a forward 128x128 pair")
"""Of what is done for a tile: also for a low one, of a pair of blocks."""
_LOAD = r"cp\.async\.bulk\.tensor\.\dd\.shared::cta"
_STORE = r"cp\.async\.bulk\.tensor\.\dd\.global"


# Tiles on their way into shared memory


@_add(WRONG)
def load_of_the_next_row(t: HopperText) -> None:
    """Tiles of lhs start one row late."""
    line = t.find(_LOAD, t.load)
    t.shift(line, t.coordinates(line)[1], 1)


@_add(WRONG)
def load_of_other_columns(t: HopperText) -> None:
    """Tiles of rhs start eight columns late."""
    line = t.find(_LOAD, t.load, 1)
    t.shift(line, t.coordinates(line)[0], 8)


@_add(WRONG)
def load_of_the_next_group(t: HopperText) -> None:
    """Tiles of rhs are those of the next weight matrix."""
    line = t.find(_LOAD, t.load, 1)
    t.shift(line, t.coordinates(line)[2], 1)


@_add(WRONG)
def load_of_the_next_k(t: HopperText) -> None:
    """Tiles of lhs are one tile of the contraction ahead."""
    line = t.find(_LOAD, t.load)
    t.shift(line, t.coordinates(line)[0], 64)


@_add("misaligned", WRONG)
def load_to_a_shifted_place(t: HopperText) -> None:
    """Tiles of lhs go to shared memory 128 bytes late, where the swizzle pattern is another."""
    line = t.find(_LOAD, t.load)
    place = int(t.lines[line].split("+")[1].split("]")[0])
    t.substitute(line, rf"\+{place}\]", f"+{place + 128}]")


@_add("misaligned")
def load_to_a_misaligned_place(t: HopperText) -> None:
    """Tiles of lhs go to shared memory 16 bytes late, which the TMA unit does not take."""
    line = t.find(_LOAD, t.load)
    place = int(t.lines[line].split("+")[1].split("]")[0])
    t.substitute(line, rf"\+{place}\]", f"+{place + 16}]")


@_add("race", "out-of-bounds", "uninitialised", WRONG)
def load_to_the_stage_behind(t: HopperText) -> None:
    """Tiles of lhs go one stage too far."""
    line = t.find(_LOAD, t.load)
    place = int(t.lines[line].split("+")[1].split("]")[0])
    t.substitute(line, rf"\+{place}\]", f"+{place + 2 * 64 * t.config.tile_m}]")


@_add("deadlock", "barrier", "race")
def load_that_signals_the_next_stage(t: HopperText) -> None:
    """The bytes of lhs are counted at the full barrier of the next stage."""
    line = t.find(_LOAD, t.load)
    t.substitute(line, r"\}\], \[(%\w+)\]", r"}], [\1+8]")


@_add("deadlock")
def load_dropped(t: HopperText) -> None:
    """One of the boxes of a stage is not loaded."""
    t.drop(t.find(_LOAD, t.load, -1))


@_add("barrier", "race", "deadlock")
def load_twice(t: HopperText) -> None:
    """One of the boxes of a stage is loaded twice."""
    line = t.find(_LOAD, t.load)
    t.insert(line, t.lines[line].strip())


# Products


def _descriptor(t: HopperText, nth: int, change: int) -> None:
    """Changes the constant bits of the nth operand's descriptor."""
    line = t.find(r"or\.b64\s+%\w+, %\w+, \d{15,};", t.products, nth)
    t.substitute(line, r"(\d+);", f"{int(t.last_operand(line)) + change};")


@_add(WRONG)
def descriptor_stride(t: HopperText) -> None:
    """Groups of eight rows of lhs are taken to lie 512 bytes apart instead of 1024."""
    _descriptor(t, 0, -(32 << 32))


@_add(WRONG, "race", "uninitialised", "out-of-bounds")
def descriptor_leading(t: HopperText) -> None:
    """Blocks of 64 columns of rhs are taken to lie 1 KiB too near each other."""
    _descriptor(t, 1, -(64 << 16))


@_add(WRONG, "protocol")
def descriptor_swizzle(t: HopperText) -> None:
    """Operand lhs is taken to be swizzled in rows of 64 bytes instead of 128."""
    _descriptor(t, 0, 1 << 62)


@_add(WRONG, beds=_TILES)
def descriptor_start(t: HopperText) -> None:
    """The second step of a product starts 32 bytes late in lhs."""
    line = t.find(r"add\.s32\s+%\w+, %\w+, 2;", t.tile)
    t.substitute(line, r"2;", "4;")


@_add(WRONG, "race", "uninitialised", beds=_TILES)
def descriptor_stage(t: HopperText) -> None:
    """The stage of rhs that a product reads lies half a stage off."""
    wait = t.wait("stage_full", t.tile)
    line = t.find(r"shl\.b32\s+%\w+, %\w+, 1[01];", range(wait, t.tile.stop))
    t.substitute(line, r"(1[01]);", f"{int(t.last_operand(line)) - 1};")


@_add(WRONG, beds=_TILES)
def transposed_operand(t: HopperText) -> None:
    """Operand lhs is taken to be contiguous across the contraction."""
    line = t.find(r"wgmma\.mma_async", t.tile)
    t.substitute(line, r"p, 1,\s+1, 0,", "p, 1, 1, 1,")


@_add(WRONG, beds=_TILES)
def negated_operand(t: HopperText) -> None:
    """One step of a product is subtracted."""
    line = t.find(r"wgmma\.mma_async", t.tile, 1)
    t.substitute(line, r"p, 1,\s+1,", "p, -1, 1,")


@_add(WRONG, beds=_TILES)
def product_that_does_not_accumulate(t: HopperText) -> None:
    """The last step of a product forgets what was added before."""
    line = t.find(r"wgmma\.mma_async", t.tile, -1)
    t.substitute(line - 1, r"setp\.ne\.b32", "setp.eq.b32")


@_add(WRONG, beds=_TILES)
def product_step_dropped(t: HopperText) -> None:
    """One step of 16 along the contraction is left out."""
    t.drop_block(t.find(r"wgmma\.mma_async", t.tile, 2))


@_add(WRONG, beds=_TILES)
def accumulators_not_zeroed(t: HopperText) -> None:
    """Accumulators start at one."""
    t.substitute(t.find(r"mov\.b32\s+%\w+, 0f00000000;", t.tile), "0f00000000", "0f3F800000")


# Results


def _masked(t: HopperText) -> range:
    """What writes tiles that end with their group."""
    return range(t.find(r"shfl\.sync\.bfly", t.tile), t.tile.stop)


@_add(WRONG, "race", beds=_TILES)
def row_mask_of_the_last_tile(t: HopperText) -> None:
    """Rows past the end of a group are written too, over those of the next group."""
    line = t.find(r"or\.pred\s+%\w+, %\w+, %\w+;", _masked(t))
    columns, rows = t.lines[line].rstrip(";").split(", ")[1:]
    for i in t.all(rf"or\.pred\s+%\w+, %\w+, {rows};", _masked(t)):
        t.substitute(i, rf", {rows};", f", {t.lines[i].split(', ')[1]};")
    assert columns != rows


@_add(WRONG, "out-of-bounds", "race", beds=_TILES)
def column_mask_of_the_last_tile(t: HopperText) -> None:
    """Columns past the end of the result are written too, over those of the next row."""
    for line in t.all(r"or\.pred\s+%\w+, %\w+, %\w+;", _masked(t)):
        columns, rows = t.lines[line].rstrip(";").split(", ")[1:]
        t.substitute(line, rf", {columns}, ", f", {rows}, ")


@_add(WRONG, "out-of-bounds", beds=_TILES)
def one_row_more(t: HopperText) -> None:
    """A tile that ends with its group writes one row more."""
    line = t.find(r"setp\.ge\.s32\s+%p\d+, %r\d+, %r\d+;", _masked(t))
    t.substitute(line, "setp.ge", "setp.gt")


@_add(WRONG)
def lanes_trade_with_the_wrong_neighbour(t: HopperText) -> None:
    """In the epilogue's transposition, lanes trade with the lane two over instead of the next one."""
    line = t.find(r"shfl\.sync\.bfly\.b32\s+%\w+, %\w+, 1, ", t.products)
    t.substitute(line, r", 1, ", ", 2, ")


@_add(WRONG)
def half_words_swapped(t: HopperText) -> None:
    """Two neighbouring columns of the result are swapped."""
    line = t.find(r"cvt\.rn\.(?:bf|f)16x2\.f32", t.products)
    t.substitute(line, r"(%\w+), (%\w+);", r"\2, \1;")


@_add(WRONG, "misaligned", "out-of-bounds")
def result_row_of_the_next_tile(t: HopperText) -> None:
    """Whole tiles are stored one row late."""
    line = t.find(_STORE, t.products)
    t.shift(line, t.coordinates(line)[1], 1)


@_add(WRONG)
def staging_of_shuffled_registers(t: HopperText) -> None:
    """Two registers of a stmatrix are swapped."""
    line = t.find(r"stmatrix", t.products)
    t.substitute(line, r"\{(%\w+), (%\w+),", r"{\2, \1,")


@_add(WRONG, "misaligned", "race", "uninitialised")
def staging_swizzle(t: HopperText) -> None:
    """The staging buffers are written in another swizzle pattern than the TMA unit reads."""
    masks = t.all(r"and\.b32\s+%\w+, %\w+, 48;", t.products)
    if not masks:
        raise NotFoundError("no swizzle of 64 bytes")
    for line in masks:
        t.substitute(line, "48;", "16;")


@_add(WRONG)
def staging_buffer_stored_twice(t: HopperText) -> None:
    """The second piece of a whole tile is stored to the columns of the first."""
    line = t.find(_STORE, t.staged, 1)
    t.substitute(line, r"\{%\w+,", "{" + t.coordinates(t.find(_STORE, t.staged))[0] + ",")


# Ragged contractions: the view whose rows end with the group

_DRHS = ("sm_90a drhs 128x128",)


@_add(WRONG, beds=_DRHS)
def group_that_ends_a_row_late(t: HopperText) -> None:
    """The rows that are contracted are those one row further on."""
    line = t.find(_LOAD, t.load)
    t.shift(line, t.coordinates(line)[3], 1)


@_add(WRONG, beds=_DRHS)
def group_that_starts_a_row_early(t: HopperText) -> None:
    """The contraction begins with the last row of the group before, and leaves out the group's own last one."""
    line = t.find(_LOAD, t.load, 1)
    t.shift(line, t.coordinates(line)[1], -1)


@_add("out-of-bounds", beds=_DRHS)
def view_of_another_turn(t: HopperText) -> None:
    """The view is taken one turn short, where its strides do not come back to the operand."""
    line = t.find(_LOAD, t.load)
    turn = t.coordinates(line)[2]
    t.substitute(line, rf", {turn}, ", ", %mutant, ")
    t.insert(line, f"mov.b32 	%mutant, {2**30 - 1};")
    t.declare_mutant()


@_add(WRONG, beds=_DRHS)
def result_of_the_next_group(t: HopperText) -> None:
    """Products are stored as those of the group behind."""
    line = t.find(_STORE, t.products)
    t.shift(line, t.coordinates(line)[2], 1)


@_add(WRONG, beds=_DRHS)
def empty_group_not_zeroed(t: HopperText) -> None:
    """Accumulators of a group without rows keep what the tile before left in them."""
    first = t.find(r"mov\.b32\s+%\w+, 0f00000000;", t.products)
    for line in t.all(r"mov\.b32\s+%\w+, %\w+;", range(first + 1, first + 12))[:4]:
        t.drop(line)


# The scheduler


@_add(WRONG, "out-of-bounds", "race", "deadlock")
def group_off_by_one(t: HopperText) -> None:
    """A tile is taken to be of the group behind its own."""
    line = t.find(r"popc\.b32", t.scheduler)
    register = t.first_operand(line)
    t.insert(line + 1, f"add.s32 	{register}, {register}, 1;")


@_add(WRONG, "out-of-bounds", "race", "deadlock")
def scan_with_a_wrong_step(t: HopperText) -> None:
    """The scan over the sizes of groups skips a step."""
    line = t.find(r"shfl\.sync\.up\.b32\s+%\w+, %\w+, 2, 0, -1;", t.scheduler)
    t.substitute(line, r", 2, 0", ", 4, 0")


@_add(WRONG)
def tile_skipped(t: HopperText) -> None:
    """Each block goes on to the tile behind its next one, so that some are never written."""
    line = t.find(r"vote\.sync\.ballot", t.scheduler)
    step = t.find(r"mov\.u32\s+%\w+, %nctaid\.x;", t.scheduler)
    register = t.first_operand(step)
    t.insert(step + 1, f"add.s32 	{register}, {register}, 1;")
    assert step < line


@_add(WRONG, "race")
def tile_of_too_many_rows(t: HopperText) -> None:
    """A tile that ends with its group may write as many rows as a whole one."""
    for i in t.all(r"min\.s32", t.scheduler):
        if t.lines[i].rstrip().endswith(f", {t.config.tile_m};"):
            t.substitute(i, r"min\.s32\s+(%\w+), %\w+, (\d+);", r"mov.b32 	\1, \2;")
            return
    raise NotFoundError("no minimum of the rows left and those of a tile")


@_add(WRONG, "race")
def last_group_forgotten(t: HopperText) -> None:
    """The last group counts as empty."""
    line = t.find(r"setp\.ge\.u32", t.scheduler)
    register, groups = t.lines[line].rstrip(";").split(", ")[1:]
    t.substitute(line, rf", {groups};", ", %mutant;")
    t.insert(line, f"add.s32 	%mutant, {groups}, -1;")
    t.declare_mutant()
    assert register != groups
