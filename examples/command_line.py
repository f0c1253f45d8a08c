"""The command line of `train_moe_lm.py`, and the settings that follow from it and from a run to resume."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from moe_lm import ModelConfig
from run_folder import FolderError
from trainer import TrainingConfig

CHANGEABLE = frozenset({"steps", "implementation"})
"""The settings that a resumed run may change."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """All that decides the numbers of a run."""

    model: ModelConfig
    training: TrainingConfig

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Builds the settings from values by name; defaults for the rest."""

        def pick(kind: type) -> Any:
            return kind(**{f.name: values[f.name] for f in dataclasses.fields(kind) if f.name in values})

        return cls(pick(ModelConfig), pick(TrainingConfig))

    def values(self) -> dict[str, Any]:
        """The values by name, for JSON."""
        return dataclasses.asdict(self.model) | dataclasses.asdict(self.training)


@dataclasses.dataclass(frozen=True)
class Run:
    """What to do, beside the settings.

    Attributes:
      out: the output folder.
      resume: whether to continue the run in it.
      record_counts: where to write the expert counts, if anywhere.
      checkpoint_every: steps between checkpoints.
      log_every: steps between updates of the progress bar; the host waits for the device only there.
      given: the settings that the command line names.
    """

    out: Path
    resume: bool
    record_counts: Path | None
    checkpoint_every: int
    log_every: int
    given: Mapping[str, Any]

    def __post_init__(self) -> None:
        for name in ("checkpoint_every", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")

    def settings(self, stored: Mapping[str, Any], done: int = 0) -> Settings:
        """The settings of this run.

        Args:
          stored: those of the run to resume; empty for a new one.
          done: the steps that the run to resume has done.

        Raises:
          FolderError: if the command line contradicts them, or asks for no step more.
          ValueError: for a bad value.
        """
        for name, value in self.given.items():
            if name in stored and stored[name] != value and name not in CHANGEABLE:
                option = "--" + name.replace("_", "-")
                raise FolderError(
                    f"the run in {self.out} has {option} {stored[name]}, not {value}: leave out {option}, or start"
                    " another run without --resume"
                )
        steps = self.given.get("steps")
        if steps is not None and 0 < steps <= done:
            raise FolderError(
                f"the run in {self.out} has done {done} steps; --steps is the total: pass --steps {done + steps} for"
                f" {steps} more"
            )
        return Settings.of({**stored, **self.given})


def parser(description: str) -> argparse.ArgumentParser:
    """Makes the parser; the options of the configurations are their fields."""
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for title, kind in (("training", TrainingConfig), ("model", ModelConfig)):
        group = result.add_argument_group(title)
        for field in dataclasses.fields(kind):
            default = "" if field.default is None else f" (default: {field.default})"
            group.add_argument(
                "--" + field.name.replace("_", "-"),
                type=str if field.default is None else type(field.default),
                choices=field.metadata.get("choices"),
                default=argparse.SUPPRESS,  # so that a resumed run can tell a default from a wish
                help=field.metadata["help"] + default,
            )
    group = result.add_argument_group("run")
    group.add_argument("--out", type=Path, default=Path("runs/moe_lm"), help="output folder (default: %(default)s)")
    group.add_argument("--resume", action="store_true", help="continue the run in the output folder")
    group.add_argument(
        "--record-counts", type=Path, metavar="FILE", help="write the rows of each expert at each step, as .npz"
    )
    group.add_argument(
        "--checkpoint-every", type=int, default=50, metavar="STEPS", help="between checkpoints (default: %(default)s)"
    )
    group.add_argument(
        "--log-every", type=int, default=5, metavar="STEPS", help="between progress updates (default: %(default)s)"
    )
    return result


def parse(description: str, arguments: Sequence[str] | None = None) -> Run:
    """Parses the command line; exits with a message where it is wrong."""
    command_line = parser(description)
    return run_of(command_line, vars(command_line.parse_args(arguments)))


def run_of(command_line: argparse.ArgumentParser, values: dict[str, Any]) -> Run:
    """The run that the values of a command line describe; exits with a message where they are wrong."""
    own = {field.name: values.pop(field.name) for field in dataclasses.fields(Run) if field.name != "given"}
    try:
        run = Run(**own, given=values)
        run.settings({})
    except ValueError as error:
        command_line.error(str(error))
    return run
