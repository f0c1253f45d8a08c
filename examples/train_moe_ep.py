"""Trains the language model of train_moe_lm.py with its experts spread over a mesh of devices.

    python examples/train_moe_ep.py --cpu-devices 8 --mesh expert=4,data=2           # virtual CPU devices
    python examples/train_moe_ep.py --mesh expert=2                                  # two GPUs, one process
    python examples/train_moe_ep.py --mesh expert=2 --coordinator localhost:9911 --processes 2 --process 0 &
    python examples/train_moe_ep.py --mesh expert=2 --coordinator localhost:9911 --processes 2 --process 1

Batches are split over the axes data and expert, expert weights over expert (with --fsdp over data too) and the width of
experts over tensor; the rest of the model is on every device. It prints the mesh, the bytes that a step exchanges,
tokens/s and the load of the experts. The output folder is that of train_moe_lm.py, without a sample and a picture.
--resume continues a run after whatever ended it (SIGKILL too) from its last whole checkpoint, on the same mesh or on
another, and with the same losses as if it had not been interrupted.
"""

from __future__ import annotations

import sys
import time

import jax

import corpus
import runs_on
from command_line import Run, Settings, parser, run_of
from jax_ggemm.exchange_cost import LayerSizes, cost
from jax_ggemm.files import write_json
from mesh_placement import OnMesh, add_options, take_options, wait_for_all
from run_folder import Checkpoints, FolderError, move_old_run_aside, read_settings, steps_done, write_settings
from train_moe_lm import SUMMARY_STEPS, train
from trainer import Trainer


def prepare(run: Run, placement: OnMesh) -> tuple[Trainer, Settings]:
    """Checks everything, then makes the output folder ready.

    Raises:
      FolderError: if the folder does not allow it.
      FileNotFoundError, ValueError: if text, model and mesh do not fit each other.
    """
    stored = read_settings(run.out) if run.resume else {}
    settings = run.settings(stored, steps_done(run.out) if run.resume else 0)
    text = corpus.load(settings.training.corpus_bytes)
    if run.resume and stored["corpus"] != text.digest:
        raise FolderError(f"the run in {run.out} learned the sources of another Python: resume it with that one")
    trainer = Trainer(settings.model, settings.training, text, placement)
    wait_for_all("the folder is as it was")
    if jax.process_index() == 0:
        if not run.resume and (aside := move_old_run_aside(run.out)):
            print(f"earlier run  moved to {aside}")
        write_settings(run.out, {**settings.values(), "corpus": text.digest})
    wait_for_all("the folder is ready")
    return trainer, settings


def describe(trainer: Trainer, settings: Settings, placement: OnMesh) -> None:
    """Says what will run."""
    mesh, exchange = placement.mesh, placement.parallel.exchange
    device = jax.devices()[0]
    axes = " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
    print(f"mesh         {axes}: {mesh.size} of {jax.device_count()} devices in {jax.process_count()} processes")
    print(f"device       {device.platform} ({device.device_kind})")
    print(f"versions     {runs_on.versions_line()}")
    model = settings.model
    print(f"model        {trainer.num_parameters:,} parameters, {model.layers} layers of {model.experts} experts")
    print(f"exchange     {exchange}, {exchanged_bytes(settings, placement):,.0f} bytes to other devices in a step")


def exchanged_bytes(settings: Settings, placement: OnMesh) -> float:
    """Bytes of tokens and their gradients that all devices send to others in a step, with balanced routing."""
    model, training = settings.model, settings.training
    shape = placement.mesh.shape
    ranks = shape["expert"]
    split = shape.get("data", 1) * (ranks if placement.parallel.exchange.split_tokens else 1)
    layer = LayerSizes(
        tokens=training.batch * training.length // split,
        features=model.features,
        top_k=model.top_k,
        ranks=ranks,
        experts_per_rank=model.experts // ranks,
        itemsize=jax.numpy.dtype(model.dtype).itemsize,
    )
    step = cost(placement.parallel.exchange, layer)
    again = 1 + placement.checkpoint_blocks  # a block that is computed again exchanges again
    return placement.mesh.size * model.layers * (again * step.forward + step.backward)


def main() -> int:
    """Runs the command; returns its exit code."""
    command_line = parser(__doc__ or "")
    add_options(command_line)
    values = vars(command_line.parse_args())
    options = take_options(command_line, values)
    run = run_of(command_line, values)
    sys.stdout.reconfigure(line_buffering=True)
    first = jax.process_index() == 0
    try:
        placement = options.placement()
        # Not within jax.set_mesh: every process makes the whole model on a device of its own first.
        trainer, settings = prepare(run, placement)
    except (FolderError, FileNotFoundError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if first:
        describe(trainer, settings, placement)
    with jax.set_mesh(placement.mesh), Checkpoints(run.out) as checkpoints:
        if run.resume:
            checkpoints.restore(trainer.model, trainer.optimizer, trainer.history)
            if first:
                print(f"resuming     after step {trainer.step} of {settings.training.steps}")
        begin, started = trainer.step, time.perf_counter()
        done = train(trainer, settings, run, checkpoints, quiet=not first)
        seconds = time.perf_counter() - started
    if first:
        finish(trainer, run, (trainer.step - begin) / seconds)
    return 0 if done else 130


def finish(trainer: Trainer, run: Run, speed: float) -> None:
    """Writes the losses, and says how the run ended."""
    history, config = trainer.history, trainer.config
    loss = float(history.loss[-SUMMARY_STEPS:].mean())
    write_json(run.out / "results.json", {"steps": trainer.step, "losses": history.loss.tolist(), "train_loss": loss})
    for layer, row in enumerate(history.relative_load()[-SUMMARY_STEPS:].mean(axis=0), start=1):
        print(f"load of the experts, layer {layer} (1 = mean): " + " ".join(f"{share:.2f}" for share in row))
    tokens = speed * config.batch * config.length
    print(f"training loss {loss:.3f} after step {trainer.step}; {tokens:,.0f} tokens/s, compilation included;", end=" ")
    print(f"{trainer.dropped:,} choices dropped")


if __name__ == "__main__":
    sys.exit(main())
