"""Puts the figures of `python -m jax_ggemm bench --json` beside those of `benchmarks/peers.py`, as one Markdown table.

    python benchmarks/compare.py ours.json peers.json [more peers ...]

A ratio is a peer's time over ours: above 1 where ours is faster. The roofline is taken at the best of the rates that
the files hold, each measured in its own run. All files must be of the same state of the device (--state).
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax_ggemm.bench_products import OURS, PASSES
from jax_ggemm.benchmark import markdown
from jax_ggemm.roofline import Rates
from jax_ggemm.shapes import GroupedShape, work

SHOWN = ("quack", "torch", "tokamax", "jax.lax.ragged_dot")
"""Peers that get a ratio, where they are in the files."""


def shapes(report: dict[str, Any]) -> dict[str, GroupedShape]:
    """The shapes of a report, by name."""
    return {
        shape["name"]: GroupedShape(**{**shape, "group_sizes": tuple(shape["group_sizes"])})
        for shape in report["shapes"]
    }


def common_state(reports: Mapping[str, dict[str, Any]]) -> str:
    """The state of the device that all reports are of, in words.

    Args:
      reports: by the names of their files.

    Raises:
      ValueError: where they differ, or one does not say.
    """
    silent = [name for name, report in reports.items() if "state" not in report]
    if silent:
        raise ValueError(f"{', '.join(silent)}: no state of the device in it: an older version measured; measure again")
    words = {name: report["state"] or "none, on a CPU" for name, report in reports.items()}
    if len(set(words.values())) > 1:
        each = ", ".join(f"{name} ({state})" for name, state in words.items())
        raise ValueError(f"times of different states of the device are not comparable: {each}; use one --state for all")
    return next(iter(words.values()))


def best_rates(reports: list[dict[str, Any]]) -> Rates:
    """The best of each rate."""
    return Rates(**{name: max(report["rates"][name] for report in reports) for name in reports[0]["rates"]})


def rows(reports: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The table, its head first; the last line holds the geometric means of the ratios."""
    times: dict[tuple[str, str], dict[str, float]] = {}
    errors: dict[tuple[str, str], tuple[float, float]] = {}
    for report in reports:
        for result in report["products"]:
            place = result["shape"], result["product"]
            if result.get("microseconds") is not None:
                times.setdefault(place, {})[result["candidate"]] = result["microseconds"]
            if result.get("error") is not None:
                errors[place] = result["error"], result["dense_error"]
    known, rates = shapes(reports[0]), best_rates(reports)
    products = {name: product for product, name in PASSES.items()}
    peers = [name for name in SHOWN if any(name in found for found in times.values())]
    table = [("shape", "product", "roofline us", "ours us", "of roofline", *_heads(peers), "error / dense's")]
    ratios: dict[str, list[float]] = {name: [] for name in peers}
    for (shape, product), found in times.items():
        if OURS not in found:
            continue
        least = rates.least_seconds(work(known[shape], products[product])) * 1e6
        cells = []
        for name in peers:
            if name not in found:
                cells += ["", ""]
                continue
            ratios[name].append(found[name] / found[OURS])
            cells += [f"{found[name]:.0f}", f"{ratios[name][-1]:.2f}"]
        error = errors.get((shape, product))
        relative = "" if error is None else f"{error[0] / error[1]:.2f}"
        table.append(
            (shape, product, f"{least:.0f}", f"{found[OURS]:.0f}", f"{least / found[OURS]:.2f}", *cells, relative)
        )
    means = [("", f"{math.exp(sum(map(math.log, found)) / len(found)):.2f}") for found in ratios.values()]
    table.append(("geometric mean", "", "", "", "", *(cell for pair in means for cell in pair), ""))
    return table


def _heads(peers: list[str]) -> list[str]:
    return [head for name in peers for head in (f"{name} us", f"{name} / ours")]


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="+", type=Path, help="ours first")
    by_name = {str(path): json.loads(path.read_text()) for path in parser.parse_args().reports}
    try:
        state = common_state(by_name)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    reports = list(by_name.values())
    for report in reports:
        print(", ".join(f"{name} {value}" for name, value in report["environment"].items()))
    print(f"state of the device: {state}")
    rates = best_rates(reports)
    print(
        f"best measured: {rates.dense_flops / 1e12:.0f} TFLOP/s dense, {rates.read_bytes / 1e12:.2f} TB/s read, "
        f"{rates.written_bytes / 1e12:.2f} TB/s written\n"
    )
    print(markdown(rows(reports)))


if __name__ == "__main__":
    main()
