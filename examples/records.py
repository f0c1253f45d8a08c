"""What a training run leaves behind beside its checkpoints: losses, expert counts, a picture."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from jax_ggemm.files import write_whole


@dataclasses.dataclass
class History:
    """What was measured at each step so far; a checkpoint holds it, so a resumed run continues it.

    Attributes:
      loss: (steps,) float32, of the training batch, in nats per byte and without the auxiliary losses.
      held_out: (steps,) float32, NaN where it was not measured.
      counts: (steps, layers, experts) int32, the rows that each expert received.
    """

    loss: np.ndarray
    held_out: np.ndarray
    counts: np.ndarray

    @classmethod
    def empty(cls, layers: int, experts: int, steps: int = 0) -> History:
        """A history of so many steps, to be filled."""
        return cls(
            np.full(steps, np.nan, np.float32),
            np.full(steps, np.nan, np.float32),
            np.zeros((steps, layers, experts), np.int32),
        )

    def extend(self, loss: np.ndarray, counts: np.ndarray) -> None:
        """Adds steps; their held-out loss is not measured yet."""
        self.loss = np.append(self.loss, loss)
        self.held_out = np.append(self.held_out, np.full_like(loss, np.nan))
        self.counts = np.concatenate([self.counts, counts])

    def relative_load(self) -> np.ndarray:
        """The rows of each expert over the mean of its layer: 1 everywhere for a balanced router."""
        return self.counts / np.maximum(self.counts.mean(axis=2, keepdims=True), 1)


def write_counts(path: Path, counts: np.ndarray, metadata: Mapping[str, Any]) -> None:
    """Writes the file of `--record-counts`; `train_moe_lm.py` describes it."""
    text = np.array(json.dumps(metadata))
    write_whole(path, lambda file: np.savez_compressed(file, counts=counts, metadata=text))


def draw(path: Path, history: History, entropy: float) -> None:
    """Draws the losses and the load of every expert over the steps.

    Args:
      path: of the PNG file.
      history: what was measured.
      entropy: the unigram entropy of the held-out text, for comparison.
    """
    steps = np.arange(1, history.loss.size + 1)
    measured = ~np.isnan(history.held_out)
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(steps, history.loss, linewidth=0.8, color="tab:gray", label="training batch")
    left.plot(steps[measured], history.held_out[measured], "o-", markersize=3, color="tab:blue", label="held-out text")
    left.axhline(entropy, linestyle="--", linewidth=1, color="tab:red", label="unigram entropy")
    left.set(xlabel="step", ylabel="nats per byte", title="Loss")
    left.legend()

    load = history.relative_load()
    layers, experts = load.shape[1:]
    picture = right.imshow(
        load.reshape(steps.size, layers * experts).T,
        aspect="auto",
        interpolation="nearest",
        cmap="RdBu_r",
        vmin=0,
        vmax=2,
        extent=(0.5, steps.size + 0.5, layers * experts - 0.5, -0.5),
    )
    for layer in range(1, layers):
        right.axhline(layer * experts - 0.5, linewidth=1, color="black")
    right.set_yticks([(layer + 0.5) * experts - 0.5 for layer in range(layers)], [str(n + 1) for n in range(layers)])
    right.set(xlabel="step", ylabel="layer (one line for each expert)", title="Expert load")
    figure.colorbar(picture, ax=right, label="rows / mean of the layer", extend="max")
    write_whole(path, lambda file: figure.savefig(file, format="png", dpi=120))
