"""The training step, the measurement on held-out text, and the state that they change."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import corpus
from moe_lm import ModelConfig, MoELM, generate
from records import History

LOAD_BALANCE_COEFFICIENT = 0.01
Z_LOSS_COEFFICIENT = 0.001
WARMUP_STEPS = 20


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """How to train, as far as it changes the numbers. A field's metadata is its help on the command line."""

    steps: int = dataclasses.field(
        default=250, metadata={"help": "training steps in total, those of a resumed run included"}
    )
    batch: int = dataclasses.field(default=16, metadata={"help": "windows of text in a step"})
    length: int = dataclasses.field(default=128, metadata={"help": "bytes in a window"})
    learning_rate: float = dataclasses.field(default=4e-3, metadata={"help": "its peak, after the warmup"})
    evaluate_every: int = dataclasses.field(default=50, metadata={"help": "steps between measurements"})
    evaluate_batches: int = dataclasses.field(default=8, metadata={"help": "batches of held-out text to measure on"})
    corpus_bytes: int = dataclasses.field(default=8_000_000, metadata={"help": "the most bytes of text to read"})
    seed: int = dataclasses.field(default=0, metadata={"help": "of parameters, batches and the sample"})

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if value <= 0 and (name, value) != ("seed", 0):
                raise ValueError(f"{name} must be positive, got {value}")


class StepMetrics(NamedTuple):
    """What a step leaves on the device.

    Attributes:
      loss: () float32, of the batch, without the auxiliary losses.
      counts: (layers, experts) int32.
      dropped: (layers,) int32, choices of experts that a buffer had no room for.
    """

    loss: jax.Array
    counts: jax.Array
    dropped: jax.Array


class Placement(Protocol):
    """Where a model and its batches are. It must be hashable."""

    def build(self, config: ModelConfig, rngs: nnx.Rngs) -> MoELM:
        """Makes the model, wherever its arrays may be."""

    def place(self, module: nnx.Module) -> None:
        """Puts the arrays of a model or an optimiser in their places."""

    def batch(self, windows: np.ndarray) -> Any:
        """Puts windows in their places."""

    def keep(self, module: nnx.Module) -> None:
        """Inside jit: keeps the new values of a model or an optimiser in their places."""


@dataclasses.dataclass(frozen=True)
class OneDevice:
    """Everything on the first device of this process."""

    def build(self, config: ModelConfig, rngs: nnx.Rngs) -> MoELM:
        """See `Placement`."""
        return MoELM(config, rngs=rngs)

    def place(self, module: nnx.Module) -> None:
        """Places the arrays as a restored checkpoint is: both run the same program."""
        nnx.update(module, jax.device_put(nnx.state(module), jax.local_devices()[0]))

    def batch(self, windows: np.ndarray) -> Any:
        """See `Placement`."""
        return windows

    def keep(self, module: nnx.Module) -> None:
        """See `Placement`."""


def next_byte_loss(model: MoELM, windows: jax.Array) -> tuple[jax.Array, Any]:
    """The mean cross-entropy of windows (batch, length + 1) in nats per byte, and the routing statistics."""
    logits, stats = model(windows[:, :-1])
    targets = windows[:, 1:].astype(jnp.int32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean(), stats


@nnx.jit(donate_argnums=(0, 1), static_argnums=3)
def train_step(model: MoELM, optimizer: nnx.Optimizer, windows: jax.Array, placement: Placement) -> StepMetrics:
    """Takes one step; changes the model and the optimiser."""

    def total_loss(model: MoELM) -> tuple[jax.Array, StepMetrics]:
        loss, stats = next_byte_loss(model, windows)
        balance = LOAD_BALANCE_COEFFICIENT * stats.load_balance_loss.mean()
        return loss + balance + Z_LOSS_COEFFICIENT * stats.z_loss.mean(), StepMetrics(loss, stats.counts, stats.dropped)

    gradients, metrics = nnx.grad(total_loss, has_aux=True)(model)
    optimizer.update(model, gradients)
    placement.keep(model)
    placement.keep(optimizer)
    return metrics


@nnx.jit
def evaluate_step(model: MoELM, windows: jax.Array) -> jax.Array:
    """The loss of windows, without learning from them."""
    return next_byte_loss(model, windows)[0]


class Trainer:
    """A model in training: what a checkpoint holds, and the steps that change it.

    Args:
      model: the model's sizes.
      config: how to train.
      text: what to learn.
      placement: where.
    """

    def __init__(
        self, model: ModelConfig, config: TrainingConfig, text: corpus.Corpus, placement: Placement | None = None
    ):
        if config.length >= min(text.train.size, text.held_out.size):
            raise ValueError(f"length must be below the {text.held_out.size} bytes of held-out text: {config.length}")
        self.config = config
        self.text = text
        self.placement = OneDevice() if placement is None else placement
        self.dropped = 0
        self.model = self.placement.build(model, nnx.Rngs(config.seed))
        warmup, peak = max(1, min(WARMUP_STEPS, config.steps // 4)), config.learning_rate
        schedule = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, max(config.steps, warmup + 1), 0.1 * peak)
        rule = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1))
        self.optimizer = nnx.Optimizer(self.model, rule, wrt=nnx.Param)
        self.placement.place(self.model)
        self.placement.place(self.optimizer)
        self.history = History.empty(model.layers, model.experts)

    @property
    def step(self) -> int:
        """The steps that are done."""
        return self.history.loss.size

    @property
    def num_parameters(self) -> int:
        """The number of trained values."""
        return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(self.model, nnx.Param)))

    def advance(self, until: int) -> None:
        """Trains up to step `until`; the host waits for the device once, at the end."""
        config, metrics = self.config, []
        for step in range(self.step, until):
            windows = corpus.random_windows(self.text.train, config.batch, config.length + 1, (config.seed, step))
            metrics.append(train_step(self.model, self.optimizer, self.placement.batch(windows), self.placement))
        losses, counts, dropped = zip(*jax.device_get(metrics), strict=True)
        self.dropped += int(np.sum(dropped))
        self.history.extend(np.stack(losses), np.stack(counts))

    def evaluate(self) -> float:
        """Measures the loss on held-out text, always the same, and notes it for this step."""
        config = self.config
        windows = corpus.even_windows(self.text.held_out, config.evaluate_batches * config.batch, config.length + 1)
        losses = [
            evaluate_step(self.model, self.placement.batch(batch))
            for batch in np.split(windows, config.evaluate_batches)
        ]
        self.history.held_out[-1] = np.mean(jax.device_get(losses))
        return float(self.history.held_out[-1])

    def sample(self, count: int = 400) -> tuple[str, str]:
        """A piece of held-out text, and `count` bytes with which the model continues it."""
        prompt = corpus.even_windows(self.text.held_out, 3, self.config.length)[1]
        key = jax.random.key(self.config.seed)
        tokens = generate(self.model, jnp.asarray(prompt), key, jnp.float32(0.7), count=count)
        return prompt.tobytes().decode(errors="replace"), bytes(np.asarray(tokens, np.uint8)).decode(errors="replace")
