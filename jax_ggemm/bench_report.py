"""What `python -m jax_ggemm bench` does over the table of shapes: measures, prints tables, and writes JSON."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tqdm

from jax_ggemm import bench_layer, bench_products
from jax_ggemm.benchmark import environment
from jax_ggemm.device_state import State
from jax_ggemm.device_time import state_here
from jax_ggemm.files import write_json
from jax_ggemm.roofline import Rates, measure_rates
from jax_ggemm.shapes import BY_NAME, TABLE, GroupedShape


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
      shapes: of the three products.
      layers: whole layers.
      names: of the implementations, from `bench_products.NAMES`.
      dtype: of operands and results.
      budget: seconds after which only this package is timed.
      state: that the device is brought into for each time; a CPU is not.
      out: a JSON file, or None; replaced whole after every shape.
    """

    shapes: Sequence[GroupedShape]
    layers: Sequence[bench_layer.LayerShape]
    names: Sequence[str]
    dtype: str
    budget: float
    state: State
    out: Path | None


def chosen_shapes(names: Sequence[str], counts: Sequence[Sequence[GroupedShape]]) -> list[GroupedShape]:
    """The shapes of the table by these names ("all" for every one), and those of files of recorded histograms."""
    from_table = TABLE if "all" in names else [BY_NAME[name] for name in names]
    return [*from_table, *itertools.chain.from_iterable(counts)]


def run(plan: Plan) -> None:
    """Measures what a plan asks for, and prints the tables.

    Args:
      plan: what to measure.
    """
    about = environment()
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    print(f"state of the device: {state_here(plan.state) or 'none, on a CPU'}")
    rates = measure_rates(plan.dtype, plan.state)
    print(
        f"measured: {rates.dense_flops / 1e12:.0f} TFLOP/s dense, {rates.read_bytes / 1e12:.2f} TB/s read, "
        f"{rates.written_bytes / 1e12:.2f} TB/s written",
        flush=True,
    )
    products: list[bench_products.Result] = []
    layers: list[bench_layer.Result] = []

    def save() -> None:
        if plan.out is not None:
            write_json(plan.out, _as_json(about, rates, plan, products, layers))

    timed = bench_products.run(plan.shapes, plan.names, plan.dtype, rates, plan.budget, plan.state)
    with tqdm.tqdm(total=len(plan.shapes), unit="shape", disable=None) as bar:
        for result in timed:
            if products and products[-1].shape != result.shape:
                bar.update()
                save()
            products.append(result)
            bar.set_postfix_str(f"{result.shape} {result.product} {result.candidate}")
    if products:
        print(bench_products.table(products), flush=True)
    save()
    for part in bench_layer.run(plan.layers, plan.names, plan.dtype, plan.state):
        layers.append(part)
        save()
    if layers:
        print(bench_layer.table(layers))


def _as_json(
    about: dict[str, str],
    rates: Rates,
    plan: Plan,
    products: Sequence[bench_products.Result],
    layers: Sequence[bench_layer.Result],
) -> dict[str, Any]:
    return {
        "environment": about,
        "dtype": plan.dtype,
        "state": state_here(plan.state),
        "rates": dataclasses.asdict(rates),
        "shapes": [dataclasses.asdict(shape) for shape in plan.shapes],
        "products": [dataclasses.asdict(result) for result in products],
        "layers": [dataclasses.asdict(result) for result in layers],
    }
