"""Trains a byte-level Mixture-of-Experts transformer on the sources of Python's own standard library.

    python examples/train_moe_lm.py                        # about two minutes on two CPU cores
    python examples/train_moe_lm.py --resume --steps 400   # and on from there

The MoE layers are `jax_ggemm.nnx_moe.MoE`; the rest is flax, optax and orbax. The output folder gets `checkpoints/`,
`settings.json`, `results.json` (all losses), `loss_and_load.png` and `sample.txt`. Without `--resume` a run that is
already there is moved aside, never overwritten. With it the settings are those of that run, and `--steps` is the total,
its steps included. With the same --steps the losses are those of a run that was never interrupted; a larger --steps
stretches the learning-rate schedule from there on. Ctrl-C leaves a checkpoint.

`--record-counts FILE` writes how many rows each expert received, so that a benchmark can replay real routing. FILE is
a NumPy .npz archive, replaced atomically at every checkpoint and at the end, with two arrays:

    counts    (steps, layers, experts) int32; counts[step, layer] are the `group_sizes` of that layer's grouped
              products and sum to tokens_per_step * top_k
    metadata  JSON in a string: model (its name), features (k of the gate/up product and n of the down product),
              hidden_features (k of the down product; the gate/up product has n = 2 * hidden_features), layers,
              experts, top_k, tokens_per_step, dtype, seed, and the versions jax and jax_ggemm

    file = numpy.load(FILE); file["counts"]; json.loads(str(file["metadata"]))
"""

from __future__ import annotations

import math
import signal
import sys
import time
from types import FrameType, TracebackType
from typing import Any, Self

import jax
import numpy as np
from tqdm import tqdm

import corpus
import jax_ggemm
import runs_on
from command_line import Run, Settings, parse
from jax_ggemm.files import write_json, write_whole
from records import draw, write_counts
from run_folder import Checkpoints, FolderError, move_old_run_aside, read_settings, steps_done, write_settings
from trainer import Trainer

SUMMARY_STEPS = 20
"""The training loss in the summary is the mean of so many steps."""


class StopRequest:
    """Turns the first SIGINT or SIGTERM into a request, so that the run ends with a checkpoint; a second one kills."""

    def __init__(self) -> None:
        self.made = False
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._handlers = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.made = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)


def next_pause(trainer: Trainer, run: Run) -> int:
    """The next step at which the host looks at the results."""
    step, config = trainer.step, trainer.config
    pauses = [step - step % every + every for every in (run.log_every, run.checkpoint_every, config.evaluate_every)]
    return min(*pauses, config.steps)


def train(trainer: Trainer, settings: Settings, run: Run, checkpoints: Checkpoints, *, quiet: bool = False) -> bool:
    """Trains to the last step, with a progress bar, measurements and checkpoints.

    Args:
      trainer: what is trained.
      settings: of the run.
      run: what to do beside.
      checkpoints: where they go.
      quiet: print nothing, as of several processes all but one do.

    Returns:
      Whether it got there; False after Ctrl-C.
    """
    config, history = trainer.config, trainer.history
    begin = trainer.step

    def save() -> None:
        checkpoints.save(trainer.step, trainer.model, trainer.optimizer, history)
        if run.record_counts is not None:
            write_counts(run.record_counts, history.counts, counts_metadata(settings))

    def say(line: str) -> None:
        if not quiet:
            tqdm.write(line)

    with (
        StopRequest() as stop,
        tqdm(total=config.steps, initial=begin, unit="step", dynamic_ncols=True, disable=quiet) as bar,
    ):
        while trainer.step < config.steps and not stop.made:
            before, start = trainer.step, time.perf_counter()
            # The first step compiles; alone, it spoils no speed.
            if before == begin:
                say("compiling the first step ...")
            trainer.advance(next_pause(trainer, run) if before > begin else before + 1)
            step, seconds = trainer.step, time.perf_counter() - start
            bar.set_postfix_str(progress(trainer, seconds, step - before), refresh=False)
            bar.update(step - before)
            if before == begin:
                say(f"compiled in {seconds:.0f} s")
            if step % config.evaluate_every == 0 or step == config.steps:
                held_out = trainer.evaluate()
                say(f"step {step:4}: loss {history.loss[-1]:.3f}, on held-out text {held_out:.3f} nats per byte")
            if step % run.checkpoint_every == 0 or step == config.steps:
                save()
    if stop.made:
        save()
    return trainer.step >= config.steps


def progress(trainer: Trainer, seconds: float, steps: int) -> str:
    """What the progress bar says of the last steps."""
    history, config = trainer.history, trainer.config
    load = history.relative_load()[-1]
    speed = steps * config.batch * config.length / seconds
    dropped = f", {trainer.dropped:,} choices dropped" if trainer.dropped else ""
    loss, least, most = history.loss[-1], load.min(), load.max()
    return f"{speed:,.0f} tokens/s, loss {loss:.3f}, experts {least:.2f}-{most:.2f} x mean load{dropped}"


def counts_metadata(settings: Settings) -> dict[str, Any]:
    """What the file of `--record-counts` says beside the counts."""
    model, training = settings.model, settings.training
    names = ("features", "hidden_features", "layers", "experts", "top_k", "dtype")
    return {
        "model": "moe_lm",
        **{name: getattr(model, name) for name in names},
        "tokens_per_step": training.batch * training.length,
        "seed": training.seed,
        "jax": jax.__version__,
        "jax_ggemm": jax_ggemm.__version__,
    }


def finish(trainer: Trainer, run: Run) -> None:
    """Writes losses, picture and sample, and says how the run ended."""
    history, text = trainer.history, trainer.text
    measured = np.flatnonzero(~np.isnan(history.held_out))
    entropy = corpus.unigram_entropy(text.held_out)
    held_out = float(history.held_out[measured[-1]])
    train_entropy, train_loss = corpus.unigram_entropy(text.train), float(history.loss[-SUMMARY_STEPS:].mean())
    results = {
        "steps": trainer.step,
        "train_loss": train_loss,
        "train_unigram_entropy": train_entropy,
        "train_ratio": train_loss / train_entropy,
        "held_out_loss": held_out,
        "held_out_unigram_entropy": entropy,
        "held_out_ratio": held_out / entropy,
        "losses": history.loss.tolist(),
        "held_out_losses": {str(step + 1): float(history.held_out[step]) for step in measured},
    }
    write_json(run.out / "results.json", results)
    draw(run.out / "loss_and_load.png", history, entropy)
    prompt, continuation = trainer.sample()
    write_whole(run.out / "sample.txt", lambda file: file.write((prompt + continuation).encode()))

    print(f"\nHeld-out text, continued by the model from >>> on:\n\n{prompt[-150:]}>>>{continuation}\n")
    load = history.relative_load()[-SUMMARY_STEPS:].mean(axis=0)
    for layer, row in enumerate(load, start=1):
        print(f"load of the experts, layer {layer} (1 = mean): " + " ".join(f"{share:.2f}" for share in row))
    bits = held_out / math.log(2)
    print(f"training loss {train_loss:.3f} = {train_loss / train_entropy:.3f} x unigram entropy {train_entropy:.3f}")
    print(f"held-out loss {held_out:.3f} = {held_out / entropy:.3f} x unigram entropy {entropy:.3f} ({bits:.2f} bits)")
    print(f"picture, sample, losses and checkpoints: {run.out}")


def prepare(run: Run) -> tuple[Trainer, Settings]:
    """Checks everything, then makes the output folder ready, and says what will run.

    Raises:
      FolderError: if the folder does not allow it.
      FileNotFoundError, ValueError: if there is not enough text.
      ImportError, NotImplementedError: if the implementation cannot run here.
    """
    stored = read_settings(run.out) if run.resume else {}
    settings = run.settings(stored, steps_done(run.out) if run.resume else 0)
    model = settings.model
    implementation = runs_on.implementation_that_runs(model.implementation, model.dtype)
    text = corpus.load(settings.training.corpus_bytes)
    if run.resume and stored["corpus"] != text.digest:
        raise FolderError(f"the run in {run.out} learned the sources of another Python: resume it with that one")
    trainer = Trainer(model, settings.training, text)
    if not run.resume and (aside := move_old_run_aside(run.out)):
        print(f"earlier run  moved to {aside}")
    write_settings(run.out, {**settings.values(), "corpus": text.digest})
    print(f"device       {runs_on.device_line()}")
    print(f"versions     {runs_on.versions_line()}")
    print(f"ragged_dot   implementation {implementation!r}")
    print(f"text         {text.files} files, {text.train.size:,} bytes to learn, {text.held_out.size:,} held out")
    print(
        f"model        {trainer.num_parameters:,} parameters, {model.layers} layers of {model.experts} experts, ",
        end="",
    )
    print(f"{model.top_k} for each byte")
    return trainer, settings


def main() -> int:
    """Runs the command; returns its exit code."""
    run = parse(__doc__ or "")
    sys.stdout.reconfigure(line_buffering=True, errors="replace")  # the sample holds any characters
    started = time.perf_counter()
    try:
        trainer, settings = prepare(run)
    except (FolderError, FileNotFoundError, ValueError, ImportError, NotImplementedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with Checkpoints(run.out) as checkpoints:
        if run.resume:
            checkpoints.restore(trainer.model, trainer.optimizer, trainer.history)
            print(f"resuming     after step {trainer.step} of {settings.training.steps}")
        if not train(trainer, settings, run, checkpoints):
            print(f"stopped after step {trainer.step}; --resume --out {run.out} goes on from there")
            return 128 + signal.SIGINT
    finish(trainer, run)
    print(f"total time {time.perf_counter() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
