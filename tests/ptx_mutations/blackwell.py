"""The Blackwell kernels as test beds for mutations."""

from __future__ import annotations

import dataclasses

from jax_ggemm.kernel.config_sm100 import Sm100Config
from jax_ggemm.kernel.pick_sm100 import FEW_ROWS, PAIR, SMALL, TOKENS_16, TOKENS_448, WIDE_PAIR
from jax_ggemm.products import Product
from ptx_mutations import (
    blackwell_mutations,
    dynamic_mutations,
    halves_mutations,
    multicast_mutations,
    pipeline_mutations,
    staged_mutations,
    swapped_mutations,
    varying_mutations,
    weights_mutations,
)
from ptx_mutations.blackwell_text import BlackwellText, out_of_order
from ptx_mutations.grouped import GroupedBed, Problem


def beds() -> list[GroupedBed]:
    """Every bed."""
    problems = {product: Problem(product, n=264) for product in (Product.FORWARD, Product.DRHS)}
    # An odd number of tiles of the contraction, and columns and a contraction whose ends no wide box reaches past.
    tokens = Problem(Product.FORWARD, m=90, k=264, n=264, sizes=(35, 0, 16, 1, 30))
    more_tokens = Problem(Product.DLHS, m=150, k=264, n=264, sizes=(70, 0, 32, 1, 40))
    # A tile of two parts, whole granules, rows of a granule, more tiles than slots.
    varying = Problem(Product.FORWARD, m=420, k=264, n=264, sizes=(300, 0, 32, 1, 70))
    halves = Problem(Product.FORWARD, m=420, k=264, n=520, sizes=(300, 0, 100))
    # More steps than stages, and a last tile along n without a neighbour.
    shared = Problem(Product.FORWARD, m=200, k=264, n=264, sizes=(130, 0, 40), note="multicast")
    contracted = Problem(Product.DRHS, m=480, n=264, sizes=(70, 0, 40, 1, 330), blocks=4, note="multicast")
    modules = (pipeline_mutations, blackwell_mutations, weights_mutations, halves_mutations, swapped_mutations)
    modules = (*modules, dynamic_mutations, multicast_mutations, staged_mutations, varying_mutations)
    mutations = [module.MUTATIONS for module in modules]
    # Of the clusters that there can be, all but one have work: in any order of events, one of the two that run gets the
    # one without, and both see at its own place that none is left.
    asked = Problem(Product.FORWARD, m=420, k=136, n=120, sizes=(1, 65, 0, 129, 193), note="dynamic")
    asked_by_pairs = Problem(Product.DLHS, m=900, k=136, n=72, sizes=(1, 257, 0, 260, 257), note="dynamic")
    # Five clusters without work: one of two pairs gets three of them.
    few_tiles = dataclasses.replace(asked_by_pairs, sizes=(0, 0, 0, 0, 900), note="dynamic, few tiles")
    # Odd and even numbers change places: of 13 tiles in the first 32 groups, the last comes after the one behind it.
    order = Problem(Product.FORWARD, m=105, k=72, n=120, sizes=(2, 1, 1, 0, 0, 3, 0, 0) + (2, 0, 1, 0, 0, 3, 0, 0) * 4)
    any_order = dataclasses.replace(order, resident=1, note="dynamic, in another order")
    # Warps of the epilogue with all of their rows, and with one less.
    staged = Problem(Product.FORWARD, n=264, sizes=(256, 0, 63, 1, 95), note="staged")
    staged_weights = Problem(Product.DRHS, m=164, k=312, n=264, sizes=(100, 0, 64), note="staged")
    grouped = [
        GroupedBed(problem, config, "sm_100a", BlackwellText, mutations)
        for problem, config in (
            (problems[Product.FORWARD], Sm100Config()),
            (problems[Product.FORWARD], Sm100Config(tile_m=256, stages=4, weight_stages=4)),
            (problems[Product.DRHS], Sm100Config()),
            (halves, WIDE_PAIR),
            # No longer than what is held for the second half.
            (dataclasses.replace(halves, k=72, note="held"), WIDE_PAIR),
            (Problem(Product.DLHS, m=150, k=264, n=264, sizes=(3, 70, 0, 67)), FEW_ROWS),
            (tokens, TOKENS_16),
            # Fewer stages of tokens than weights are there for: otherwise nobody would ever wait for one.
            (more_tokens, dataclasses.replace(TOKENS_16, tile_m=32, stages=6, weight_stages=5)),
            (varying, TOKENS_448),
            (shared, dataclasses.replace(SMALL, multicast=2)),
            (contracted, dataclasses.replace(PAIR, multicast=2)),
            (asked, dataclasses.replace(FEW_ROWS, dynamic=True)),
            (asked_by_pairs, dataclasses.replace(PAIR, dynamic=True)),
            (few_tiles, dataclasses.replace(PAIR, dynamic=True)),
            (staged, Sm100Config(256, 256, 6, weight_stages=6, staged=True)),
            (staged_weights, Sm100Config(128, 128, 6, weight_stages=6, staged=True)),
        )
    ]
    few_rows = dataclasses.replace(FEW_ROWS, dynamic=True)
    return [*grouped, GroupedBed(any_order, few_rows, "sm_100a", _in_another_order, mutations)]


def _in_another_order(ptx: str, config: Sm100Config) -> BlackwellText:
    """A kernel's text that sees clusters in another order than that of their numbers."""
    return BlackwellText(out_of_order(ptx, config.blocks), config)
