"""The output folder of a training run: its settings and its checkpoints, and what a second run into it means.

A new run never overwrites an old one: the old folder is moved aside (`moe_lm` to `moe_lm.1` and so on).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orbax.checkpoint as ocp
from flax import nnx

from jax_ggemm.files import write_json
from records import History

SETTINGS_FILE = "settings.json"


class FolderError(Exception):
    """The folder cannot be used as asked; the message says what would do."""


def move_old_run_aside(folder: Path) -> Path | None:
    """Makes room for a new run.

    Args:
      folder: where the new run goes.

    Returns:
      Where the old run is now; None if there was none.

    Raises:
      FolderError: if the folder holds something else than a run.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    if not (folder / SETTINGS_FILE).exists():
        raise FolderError(f"{folder} is not empty and was not made by this program: choose another --out")
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    return folder.rename(aside)


def read_settings(folder: Path) -> dict[str, Any]:
    """The settings of the run in a folder.

    Raises:
      FolderError: if there is no run.
    """
    path = folder / SETTINGS_FILE
    if not path.exists():
        raise FolderError(f"{folder} holds no run to resume: leave out --resume to start one")
    return json.loads(path.read_text())


def steps_done(folder: Path) -> int:
    """The steps after which the latest checkpoint in a folder was written; 0 if there is none. Writes nothing."""
    return max((int(path.name) for path in folder.glob("checkpoints/*") if path.name.isdigit()), default=0)


def write_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Writes the settings, which also marks the folder as one of ours."""
    write_json(folder / SETTINGS_FILE, settings)


class Checkpoints:
    """The checkpoints in a folder: parameters, optimiser state and history, written atomically by orbax."""

    def __init__(self, folder: Path):
        # Saving is synchronous: the training step donates the buffers that a save in the background would read.
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager((folder / "checkpoints").absolute(), options=options)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._manager.close()

    def save(self, step: int, model: nnx.Module, optimizer: nnx.Optimizer, history: History) -> None:
        """Writes the checkpoint after `step` steps, unless it is there."""
        if step == self._manager.latest_step():
            return
        tree = {"model": nnx.state(model), "optimizer": nnx.state(optimizer), "history": dataclasses.asdict(history)}
        self._manager.save(step, args=ocp.args.StandardSave(tree), force=True)

    def restore(self, model: nnx.Module, optimizer: nnx.Optimizer, history: History) -> int:
        """Loads the latest checkpoint into the three arguments.

        Returns:
          The steps that are done; 0 if the run was interrupted before its first checkpoint.
        """
        step = self._manager.latest_step()
        if step is None:
            return 0
        empty = History.empty(*history.counts.shape[1:], steps=step)
        tree = {"model": nnx.state(model), "optimizer": nnx.state(optimizer), "history": dataclasses.asdict(empty)}
        restored = self._manager.restore(step, args=ocp.args.StandardRestore(tree))
        nnx.update(model, restored["model"])
        nnx.update(optimizer, restored["optimizer"])
        for name, values in restored["history"].items():
            setattr(history, name, values)
        return step
