"""Trains the model of `examples/train_moe_lm.py` with several grouped products: losses side by side, and tokens/s.

    python benchmarks/training.py --steps 200 --products cute xla lax --json training.json

Every run has the same parameters, batches and schedule. "lax" is the same model on `jax.lax.ragged_dot`; the others are
what `implementation=` takes. Losses are compared with those of the last product that is not "lax": the largest and the
last relative difference of their means over so many steps as --window says. Steps after the first few are timed, in
blocks that the host waits for once.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import corpus
from jax_ggemm.benchmark import environment, markdown
from jax_ggemm.files import write_json
from moe_lm import ModelConfig
from trainer import Trainer, TrainingConfig

LAX = "lax"
WARM_UP_STEPS = 4
BLOCK = 14


def lax_ragged_dot(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, **_unused: Any) -> jax.Array:
    """`jax.lax.ragged_dot`, called as the layer calls a grouped product."""
    return jax.lax.ragged_dot(lhs, rhs, sizes)


def trainer_with(product: str, model: ModelConfig, training: TrainingConfig, text: corpus.Corpus) -> Trainer:
    """A trainer whose layers multiply with the product of this name."""
    trainer = Trainer(dataclasses.replace(model, implementation=None if product == LAX else product), training, text)
    if product == LAX:
        for block in trainer.model.blocks:
            options = block.moe.options
            experts = dataclasses.replace(options.experts, ragged_dot=lax_ragged_dot)
            block.moe.options = dataclasses.replace(options, experts=experts)
    return trainer


def train(trainer: Trainer, steps: int) -> tuple[np.ndarray, float, float]:
    """Trains; returns the losses, tokens/s, and the seconds of the first steps, which compile."""
    tokens = trainer.config.batch * trainer.config.length
    start = time.perf_counter()
    trainer.advance(min(steps, WARM_UP_STEPS))
    compiling, speeds = time.perf_counter() - start, []
    while trainer.step < steps:
        before, start = trainer.step, time.perf_counter()
        trainer.advance(min(steps, before + BLOCK))
        speeds.append((trainer.step - before) * tokens / (time.perf_counter() - start))
    return trainer.history.loss, float(np.median(speeds)) if speeds else float("nan"), compiling


def smooth(losses: np.ndarray, window: int) -> np.ndarray:
    """Means over so many steps, one per step from the first full window on."""
    window = min(window, losses.size)
    return np.convolve(losses.astype(np.float64), np.full(window, 1 / window), mode="valid")


def compare(losses: Sequence[float], reference: Sequence[float], window: int) -> tuple[float, float]:
    """The largest and the last relative difference of smoothed losses."""
    got, want = (smooth(np.asarray(values), window) for values in (losses, reference))
    differences = np.abs(got - want) / want
    return float(differences.max()), float(differences[-1])


def integers(parser: argparse.ArgumentParser, kind: type, names: Sequence[str]) -> Callable[[Any], dict[str, int]]:
    """Adds the integer fields of a dataclass as options; returns what reads them."""
    for field in dataclasses.fields(kind):
        if field.name in names:
            option = "--" + field.name.replace("_", "-")
            parser.add_argument(option, type=int, default=field.default, help=field.metadata["help"])
    return lambda options: {name: getattr(options, name) for name in names}


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--products", nargs="+", default=["cute", "xla", LAX], choices=["cute", "cpu", "xla", LAX])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--window", type=int, default=20, help="steps that losses are averaged over")
    parser.add_argument("--json", type=Path, help="also write losses and speeds to this file")
    model = integers(parser, ModelConfig, ("features", "hidden_features", "layers", "heads", "experts", "top_k"))
    training = integers(parser, TrainingConfig, ("steps", "batch", "length", "seed"))
    options = parser.parse_args()
    model_config = ModelConfig(**model(options), dtype=options.dtype)
    training_config = TrainingConfig(**training(options))
    text = corpus.load(training_config.corpus_bytes)
    found: dict[str, dict[str, Any]] = {}
    for product in options.products:
        trainer = trainer_with(product, model_config, training_config, text)
        losses, speed, compiling = train(trainer, options.steps)
        found[product] = {"losses": losses.tolist(), "tokens_per_second": speed, "first_seconds": compiling}
        print(f"{product}: {speed:,.0f} tokens/s, loss {losses[0]:.3f} to {losses[-1]:.3f}", flush=True)
    reference = [product for product in options.products if product != LAX][-1]
    rows = [("product", "tokens/s", "last loss", f"largest difference from {reference}", "last difference")]
    for product, values in found.items():
        largest, last = compare(values["losses"], found[reference]["losses"], options.window)
        values |= {"largest_difference": largest, "last_difference": last}
        speed, loss = values["tokens_per_second"], values["losses"][-1]
        rows.append((product, f"{speed:,.0f}", f"{loss:.4f}", f"{largest:.2%}", f"{last:.2%}"))
    print(markdown(rows))
    if options.json is not None:
        about = {"model": dataclasses.asdict(model_config), "training": dataclasses.asdict(training_config)}
        write_json(options.json, {"environment": environment(), **about, "window": options.window, "products": found})


if __name__ == "__main__":
    main()
