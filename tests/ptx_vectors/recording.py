"""The file with what a GPU answered."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np

PATH = Path(__file__).with_name("recorded.npz")


@dataclasses.dataclass(frozen=True)
class Recording:
    """What programs left in the buffers that they write."""

    results: dict[str, dict[int, np.ndarray]]
    """By program and argument."""
    refused: dict[str, str]
    """Programs that the GPU stopped, and the error."""
    digests: dict[str, str]
    """Of the programs, as they were when they ran."""
    machine: dict[str, str]
    """GPU, driver, date."""

    def save(self, path: Path) -> None:
        """Writes the file."""
        arrays = {f"{name}/{i}": a for name, of in self.results.items() for i, a in of.items()}
        about = json.dumps({"refused": self.refused, "digests": self.digests, "machine": self.machine})
        with path.open("wb") as file:
            np.savez_compressed(file, about=np.array(about), **arrays)  # type: ignore[arg-type]


def load(path: Path = PATH) -> Recording:
    """Reads the file."""
    results: dict[str, dict[int, np.ndarray]] = {}
    with np.load(path) as file:
        about = json.loads(str(file["about"]))
        for key in file.files:
            if key != "about":
                name, i = key.rsplit("/", 1)
                results.setdefault(name, {})[int(i)] = file[key]
    return Recording(results, about["refused"], about["digests"], about["machine"])
