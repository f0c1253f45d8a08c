"""The Blackwell kernels as test beds for mutations."""

from __future__ import annotations

from jax_ggemm.kernel.config_sm100 import Sm100Config
from jax_ggemm.products import Product
from ptx_mutations import blackwell_mutations, pipeline_mutations
from ptx_mutations.blackwell_text import BlackwellText
from ptx_mutations.grouped import GroupedBed, Problem


def beds() -> list[GroupedBed]:
    """Every bed."""
    problems = {product: Problem(product, n=264) for product in (Product.FORWARD, Product.DRHS)}
    mutations = [pipeline_mutations.MUTATIONS, blackwell_mutations.MUTATIONS]
    return [
        GroupedBed(problem, config, "sm_100a", BlackwellText, mutations)
        for problem, config in (
            (problems[Product.FORWARD], Sm100Config()),
            (problems[Product.FORWARD], Sm100Config(tile_m=256, stages=4, weight_stages=4)),
            (problems[Product.DRHS], Sm100Config()),
        )
    ]
