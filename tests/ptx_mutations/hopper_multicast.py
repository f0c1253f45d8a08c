"""Hopper kernels whose blocks load tiles of rhs in pairs, each a half for both, and multiply low tiles by columns."""

from __future__ import annotations

from jax_ggemm.kernel.schedule import ALONE, SILENT, TOGETHER
from ptx_mutations.hopper_text import HopperText
from ptx_mutations.mutation import WRONG, Mutations
from ptx_mutations.text import NotFoundError

_FORWARD, _DRHS = "sm_90a forward 128x128 pair", "sm_90a drhs 128x128 pair"
MUTATIONS: Mutations[HopperText] = Mutations(beds=(_FORWARD, _DRHS))
_add = MUTATIONS.add
_MULTICAST = r"cp\.async\.bulk\.tensor.*multicast::cluster"


def _half(t: HopperText) -> int:
    """Columns of rhs that a block loads."""
    return t.config.tile_n // 2


def _deals(t: HopperText) -> range:
    """Where the scheduler makes tiles of a deal."""
    return range(t.find(r"vote\.sync\.ballot", t.scheduler), t.scheduler.stop)


def _stages(t: HopperText) -> int:
    """Where the stages of rhs begin in shared memory, behind the barriers and those of lhs."""
    return 1024 + t.config.stages * 128 * t.config.tile_m


# Loads


@_add("deadlock")
def half_for_the_first_block_alone(t: HopperText) -> None:
    """Both halves of a tile go to the first block alone."""
    mask = t.lines[t.find(_MULTICAST, t.load)].rstrip(";").split(", ")[-2]
    t.substitute(t.find(rf"mov\.b16\s+{mask}, 3;", t.load), "3;", "1;")


@_add(WRONG)
def half_of_the_other_block(t: HopperText) -> None:
    """Each block loads the columns that the other should, to the place of its own."""
    line = t.find(rf"and\.b32\s+%\w+, %\w+, {_half(t)};", t.load)
    register = t.first_operand(line)
    t.insert(line + 1, f"xor.b32 	{register}, {register}, {_half(t)};")


@_add(WRONG)
def half_of_the_first_block_twice(t: HopperText) -> None:
    """Both blocks load the columns of the first half."""
    t.substitute(t.find(rf"and\.b32\s+%\w+, %\w+, {_half(t)};", t.load), r"\d+;", "0;")


@_add("race", "uninitialised")
def half_put_where_the_first_is(t: HopperText) -> None:
    """Both blocks put their half where the first one belongs."""
    t.substitute(t.find(rf"and\.b32\s+%\w+, %\w+, {128 * _half(t)};", t.load), r"\d+;", "0;")


@_add("deadlock")
def half_not_loaded(t: HopperText) -> None:
    """Blocks do not load their halves."""
    t.drop(t.find(_MULTICAST, t.load))


@_add("deadlock", "barrier", "race")
def half_that_signals_the_next_stage(t: HopperText) -> None:
    """The bytes of a half are counted at the full barrier of the next stage, in both blocks."""
    t.substitute(t.find(_MULTICAST, t.load), r"\}\], \[(%\w+)\]", r"}], [\1+8]")


@_add("barrier", "race", "uninitialised")
def bytes_of_ones_own_half(t: HopperText) -> None:
    """A stage expects as many bytes as its block loads, without the half of the other one."""
    t.change_bytes(t.arrive("stage_full", t.load), -128 * _half(t))


# Roles


def _load_together_from(t: HopperText, role: int) -> None:
    """Changes which roles load halves: from this one on."""
    t.substitute(t.find(rf"setp\.lt\.s32\s+%\w+, %\w+, {TOGETHER};", t.load), rf"{TOGETHER};", f"{role};")


@_add(WRONG)
def tiles_side_by_side_loaded_together(t: HopperText) -> None:
    """Blocks load halves for each other where their tiles have other columns, too."""
    _load_together_from(t, ALONE)


@_add("deadlock", "barrier", "race", beds=(_FORWARD,))
def tile_loaded_together_by_one(t: HopperText) -> None:
    """Of the blocks with the same tile, only the silent one loads a half for both."""
    _load_together_from(t, SILENT)


def _silence(t: HopperText) -> tuple[int, str, str, str]:
    """Where the second block becomes silent: the line, its role then, the role otherwise, which block this is."""
    line = t.find(rf"selp\.b32\s+%\w+, {SILENT}, %\w+, %\w+;", t.scheduler)
    role, _, otherwise, second = t.lines[line].rstrip(";").split("selp.b32")[1].strip().split(", ")
    return line, role, otherwise, second


def _decision(t: HopperText) -> tuple[int, str]:
    """Where a block's role is decided: the line, which block this is."""
    _, role, otherwise, second = _silence(t)
    return t.find(rf"selp\.b32\s+%\w+, {role}, {otherwise}, ", t.scheduler), second


@_add(WRONG, beds=(_FORWARD,))
def both_blocks_silent(t: HopperText) -> None:
    """The last of an odd number of tiles is written by neither block."""
    line, _, otherwise, _ = _silence(t)
    t.substitute(line, rf" {otherwise},", f" {SILENT},")


@_add("race", beds=(_FORWARD,))
def no_block_silent(t: HopperText) -> None:
    """The last of an odd number of tiles is written by both blocks."""
    line, _, otherwise, _ = _silence(t)
    t.substitute(line, rf"{SILENT}, {otherwise},", f"{otherwise}, {otherwise},")


@_add(WRONG, beds=(_FORWARD,))
def second_block_always_silent(t: HopperText) -> None:
    """The second block writes none of its tiles."""
    line, _ = _decision(t)
    t.substitute(line, r"(%\w+), %\w+, (%\w+);", r"\1, \1, \2;")


@_add("deadlock", "barrier", "race")
def second_block_always_alone(t: HopperText) -> None:
    """The second block loads all of its tile itself, whatever the first one does."""
    line, second = _decision(t)
    role = t.first_operand(line)
    t.insert(line + 1, f"selp.b32 	{role}, {ALONE}, {role}, {second};")


@_add(WRONG, "deadlock", "race", beds=(_FORWARD,))
def tile_behind_the_last(t: HopperText) -> None:
    """Of an odd number of tiles, the second block takes the one behind the last."""
    line = t.find(r"min\.s32\s+%\w+, %\w+, %\w+;", _deals(t))
    t.substitute(line, r"min\.s32\s+(%\w+), (%\w+), %\w+;", r"mov.b32 	\1, \2;")


@_add(WRONG, "race", beds=(_FORWARD,))
def one_tile_for_two(t: HopperText) -> None:
    """A pair goes on by one tile of a group for each deal, instead of two."""
    t.substitute(t.find(r"shl\.b32\s+%\w+, %\w+, 1;", _deals(t)), "1;", "0;")


@_add(WRONG, "race", beds=(_FORWARD,))
def both_blocks_take_the_first_tile(t: HopperText) -> None:
    """Both blocks of a pair take the first of the two tiles."""
    t.substitute(t.find(r"and\.b32\s+%\w+, %\w+, 1;", _deals(t)), "1;", "0;")


# Stages


@_add("race", "barrier", "deadlock")
def stage_empty_for_one_block(t: HopperText) -> None:
    """A stage counts as empty when as many warps as one block has have read theirs."""
    t.set_count("stage_empty", -8)


def _return_to(t: HopperText, register: str) -> None:
    """Changes which block a release is for."""
    for line in t.all(r"mapa\.shared::cluster\.u32\s+%\w+, %\w+, %\w+;", t.products):
        t.substitute(line, r", %\w+;", f", {register};")


@_add("deadlock", "barrier", "race")
def stage_returned_to_the_first_block(t: HopperText) -> None:
    """Both blocks tell the first one alone that a stage is empty."""
    _return_to(t, "0")


@_add("race", "barrier", "deadlock")
def stage_returned_to_oneself(t: HopperText) -> None:
    """A block tells itself twice that a stage is empty, and the other one not at all."""
    t.insert(t.products.start, "mov.u32 	%mutant, %cluster_ctarank;")
    t.declare_mutant()
    _return_to(t, "%mutant")


@_add("deadlock", "barrier", "race", beds=(_DRHS,))
def half_of_a_contraction_one_shorter(t: HopperText) -> None:
    """Of an odd number of tiles of a contraction, the second block multiplies one less than the first."""
    line = t.find(r"shl\.b32\s+%\w+, %\w+, 6;", _deals(t))
    rows, k_tiles = t.lines[line].rstrip(";").split("shl.b32")[1].strip().split(", ")[:2]
    first_block = t.last_operand(t.find(rf"selp\.b32\s+%\w+, 0, {rows}, ", _deals(t)))
    t.insert(line + 1, f"selp.b32 	%mutant, 0, -1, {first_block};", f"add.s32 	{k_tiles}, {k_tiles}, %mutant;")
    t.declare_mutant()


# Low tiles


@_add(WRONG, beds=(_FORWARD,))
def tile_of_65_rows_taken_for_low(t: HopperText) -> None:
    """A tile of 65 rows is multiplied as if it had 64."""
    t.substitute(t.find(r"setp\.lt\.s32\s+%\w+, %\w+, 65;", t.products), "65;", "66;")


def _take_base(t: HopperText, place: int, line: int) -> None:
    """Has a part find an operand where the other part does: with, or without, the place of its warpgroup."""
    lines = t.all(rf"add\.s32\s+%\w+, %\w+, {place};", t.products)
    if len(lines) != 2:
        raise NotFoundError(f"{len(lines)} places of an operand, not one of whole and one of low tiles")
    bases = [t.lines[i].split(", ")[1] for i in lines]
    assert bases[0] != bases[1]
    t.substitute(lines[line], rf", {bases[line]},", f", {bases[1 - line]},")


@_add(WRONG, beds=(_FORWARD,))
def low_tile_of_the_first_columns_twice(t: HopperText) -> None:
    """Both warpgroups multiply a low tile with the first half of the columns."""
    _take_base(t, _stages(t), 1)


@_add(WRONG, beds=(_FORWARD,))
def low_tile_split_by_rows(t: HopperText) -> None:
    """The second warpgroup multiplies the lower half of the rows, of which a low tile has none."""
    _take_base(t, 1024, 1)


@_add("race", WRONG, beds=(_FORWARD,))
def low_results_at_the_first_columns(t: HopperText) -> None:
    """Both warpgroups write their half of a low tile to the first half of the columns."""
    offset = t.first_operand(t.find(rf"mul\.wide\.s16\s+%\w+, %\w+, {_half(t)};", t.products))
    t.substitute(t.find(rf"add\.s32\s+%\w+, %\w+, {offset};", t.products, 1), rf", {offset};", ", 0;")


# Start and end


@_add("race", "barrier", "uninitialised", "protocol")
def pair_does_not_meet_at_the_start(t: HopperText) -> None:
    """Blocks of a pair meet only within themselves before they use each other's barriers."""
    t.meet_alone(0)


@_add("race", "barrier", "protocol")
def leaves_before_the_last_releases_came(t: HopperText) -> None:
    """A block leaves when its own tiles are done: the other one may still tell it that stages are empty."""
    t.leave_early()
