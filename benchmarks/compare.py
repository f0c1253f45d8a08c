"""Puts the figures of `python -m jax_ggemm bench --json` beside those of `benchmarks/peers.py`, as one Markdown table.

    python benchmarks/compare.py ours.json peers.json [more peers ...]

A ratio is a peer's time over ours: above 1 where ours is faster. The roofline is taken at the best of the rates that
the files hold, each measured in its own run. All files must be of one device, one state of it (--state) and one dtype,
and shapes of one name must be the same shape. Shapes that the first file lacks are left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jax_ggemm.bench_products import OURS, PASSES
from jax_ggemm.benchmark import markdown
from jax_ggemm.device_state import State
from jax_ggemm.roofline import Rates
from jax_ggemm.shapes import GroupedShape, work

SHOWN = ("quack", "torch", "tokamax", "jax.lax.ragged_dot")
"""Peers that get a ratio, where they are in the files."""

FIELDS = ("environment", "state", "dtype", "rates", "shapes", "products")
"""What a report holds."""


@dataclasses.dataclass(frozen=True)
class Report:
    """What a file holds.

    Attributes:
      name: of the file.
      environment: the device and the versions, by name.
      device: its name.
      state: of the device, in words.
      dtype: of operands and results.
      rates: of the device.
      shapes: that were timed.
      times: results with a time, one dictionary per shape, product and candidate.
    """

    name: str
    environment: dict[str, str]
    device: str
    state: str
    dtype: str
    rates: Rates
    shapes: tuple[GroupedShape, ...]
    times: tuple[dict[str, Any], ...]


def load(path: Path) -> Report:
    """Reads a report.

    Raises:
      ValueError: where the file is not there, or no report over shapes.
    """
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path}: no JSON, or not all of it: {error}") from None
    if not isinstance(content, dict) or "products" not in content:
        raise ValueError(
            f"{path}: no report over shapes: `python -m jax_ggemm bench --shapes NAME --json FILE` writes one that "
            "compares, and so does benchmarks/peers.py"
        )
    missing = [field for field in FIELDS if field not in content]
    if missing:
        raise ValueError(f"{path}: no {', '.join(missing)} in it: an older version measured; measure again")
    state = content["state"]
    if state not in (None, *State):
        raise ValueError(f"{path}: {state!r} is no state: {', '.join(State)} or, on a CPU, null")
    try:
        return Report(
            str(path),
            content["environment"],
            content["environment"]["device"],
            state or "none, on a CPU",
            jnp.dtype(content["dtype"]).name,
            Rates(**content["rates"]),
            tuple(GroupedShape(**{**one, "group_sizes": tuple(one["group_sizes"])}) for one in content["shapes"]),
            tuple(
                {"place": (one["shape"], one["product"]), **one}
                for one in content["products"]
                if one.get("microseconds") is not None
            ),
        )
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path}: not as `bench` and peers.py write it: {error}") from None


def check(reports: Sequence[Report]) -> None:
    """Whether the times of reports can share a table.

    Args:
      reports: ours first.

    Raises:
      ValueError: where they cannot.
    """
    first = reports[0]
    if all(one["candidate"] != OURS for one in first.times):
        raise ValueError(f"{first.name}: no times of {OURS} in it: the file of `bench --shapes` goes first")
    values = {
        "devices": [report.device for report in reports],
        "states of the device": [report.state for report in reports],
        "dtypes": [report.dtype for report in reports],
    }
    for what, found in values.items():
        if len(set(found)) > 1:
            each = ", ".join(f"{report.name} ({value})" for report, value in zip(reports, found, strict=True))
            raise ValueError(f"times of different {what} are not comparable: {each}")
    shapes: dict[str, tuple[Report, GroupedShape]] = {}
    times: dict[tuple[Any, ...], Report] = {}
    for report in reports:
        for shape in report.shapes:
            other, known = shapes.setdefault(shape.name, (report, shape))
            if (known.k, known.n, known.group_sizes) != (shape.k, shape.n, shape.group_sizes):
                raise ValueError(
                    f"the shape {shape.name} is not the same in {other.name} and {report.name}: "
                    f"{_in_words(known)}, and {_in_words(shape)}"
                )
        for one in report.times:
            key = *one["place"], one["candidate"]
            if key in times:
                raise ValueError(f"{' '.join(key)} is timed twice, in {times[key].name} and {report.name}: which one?")
            times[key] = report
        if {shape.name for shape in first.shapes}.isdisjoint(shape.name for shape in report.shapes):
            raise ValueError(f"{report.name}: no shape in it that is in {first.name}")


def _in_words(shape: GroupedShape) -> str:
    sizes = ", ".join(map(str, shape.group_sizes[:8])) + (", ..." if shape.groups > 8 else "")
    return f"k {shape.k}, n {shape.n}, {shape.groups} groups of {sizes} rows"


def left_out(reports: Sequence[Report]) -> Iterator[str]:
    """What is not in the table, in words: the shapes of other reports that the first one lacks."""
    known = {shape.name for shape in reports[0].shapes}
    for report in reports[1:]:
        missing = [shape.name for shape in report.shapes if shape.name not in known]
        if missing:
            yield f"left out, since {reports[0].name} lacks them: {', '.join(missing)} of {report.name}"


def best_rates(reports: Sequence[Report]) -> Rates:
    """The best of each rate."""
    return Rates(*map(max, zip(*(dataclasses.astuple(report.rates) for report in reports), strict=True)))


def rows(reports: Sequence[Report]) -> list[tuple[str, ...]]:
    """The table, its head first; the last line holds the geometric means of the ratios."""
    results: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for one in itertools.chain.from_iterable(report.times for report in reports):
        results.setdefault(one["place"], {})[one["candidate"]] = one
    known, rates = {shape.name: shape for shape in reports[0].shapes}, best_rates(reports)
    results = {place: found for place, found in results.items() if OURS in found and place[0] in known}
    products, itemsize = {name: product for product, name in PASSES.items()}, jnp.dtype(reports[0].dtype).itemsize
    peers = [name for name in SHOWN if any(name in found for found in results.values())]
    table = [("shape", "product", "roofline us", "ours us", "of roofline", *_heads(peers), "error / dense's")]
    ratios: dict[str, list[float]] = {name: [] for name in peers}
    for (shape, product), found in results.items():
        least = rates.least_seconds(work(known[shape], products[product], itemsize)) * 1e6
        ours, cells = found[OURS]["microseconds"], []
        for name in peers:
            if name not in found:
                cells += ["", ""]
                continue
            time = found[name]["microseconds"]
            ratios[name].append(time / ours)
            cells += [f"{time:.0f}", f"{ratios[name][-1]:.2f}"]
        error = found[OURS].get("error")
        relative = "" if error is None else f"{error / found[OURS]['dense_error']:.2f}"
        table.append((shape, product, f"{least:.0f}", f"{ours:.0f}", f"{least / ours:.2f}", *cells, relative))
    means = [("", f"{math.exp(sum(map(math.log, found)) / len(found)):.2f}") for found in ratios.values()]
    table.append(("geometric mean", "", "", "", "", *(cell for pair in means for cell in pair), ""))
    return table


def _heads(peers: list[str]) -> list[str]:
    return [head for name in peers for head in (f"{name} us", f"{name} / ours")]


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="+", type=Path, help="ours first")
    paths = parser.parse_args().reports
    try:
        reports = [load(path) for path in paths]
        check(reports)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    for report in reports:
        print(", ".join(f"{name} {value}" for name, value in report.environment.items()))
    print(f"state of the device: {reports[0].state}\ndtype: {reports[0].dtype}")
    for line in left_out(reports):
        print(line)
    rates = best_rates(reports)
    print(
        f"best measured: {rates.dense_flops / 1e12:.0f} TFLOP/s dense, {rates.read_bytes / 1e12:.2f} TB/s read, "
        f"{rates.written_bytes / 1e12:.2f} TB/s written\n"
    )
    print(markdown(rows(reports)))


if __name__ == "__main__":
    main()
