"""The Hopper kernels as test beds for mutations."""

from __future__ import annotations

import dataclasses

from jax_ggemm.kernel.config import Sm90Config
from jax_ggemm.products import Product
from ptx_mutations import hopper_data, hopper_multicast, hopper_pairs, hopper_synchronisation, pipeline_mutations
from ptx_mutations.grouped import GroupedBed, Problem
from ptx_mutations.hopper_text import HopperText


def beds() -> list[GroupedBed]:
    """Every bed."""
    narrow = Sm90Config(128, 128, 6)
    # Nine tiles of a contraction that a pair shares.
    thick = Problem(Product.DRHS, m=700, k=136, n=136, sizes=(40, 570, 0, 1), blocks=4)
    # Three tiles by three, of which the last is low; one of 65 rows by three, and a low one; rows of no group.
    pairs = Problem(Product.FORWARD, m=420, k=136, n=264, sizes=(300, 0, 65, 36), blocks=4)
    pair = dataclasses.replace(narrow, cluster=2)
    modules = (pipeline_mutations, hopper_synchronisation, hopper_data, hopper_multicast, hopper_pairs)
    return [
        GroupedBed(problem, config, "sm_90a", HopperText, [module.MUTATIONS for module in modules])
        for problem, config in (
            (Problem(Product.FORWARD), narrow),
            (Problem(Product.DRHS), narrow),
            (pairs, pair),
            (thick, pair),
        )
    ]
