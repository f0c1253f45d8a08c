"""The text that the example learns: the sources of the standard library of the Python that runs it, as bytes."""

from __future__ import annotations

import dataclasses
import hashlib
import sysconfig
from pathlib import Path

import numpy as np

SKIPPED_FOLDERS = frozenset(
    # Packages that are not the standard library; tests; and tables rather than text.
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
)
HELD_OUT_EVERY = 16
"""One file in 16 is held out: whole files, so that no function is on both sides."""


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Text as bytes.

    Attributes:
      train: (bytes,) uint8, to learn from.
      held_out: (bytes,) uint8, other files, to measure on.
      files: the number of files in both.
    """

    train: np.ndarray
    held_out: np.ndarray
    files: int

    @property
    def digest(self) -> str:
        """A hash of the text: another Python has other sources, and a run cannot be resumed on them."""
        return hashlib.sha256(self.train.tobytes() + b"\0" + self.held_out.tobytes()).hexdigest()


def load(limit: int) -> Corpus:
    """Reads the standard library's sources in sorted order.

    Args:
      limit: the most bytes to read.

    Returns:
      The text, split into two.

    Raises:
      FileNotFoundError: where this Python comes without sources, as some embedded ones do.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.rglob("*.py") if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts[:-1]))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    total = number = 0
    for number, path in enumerate(files, start=1):
        text = path.read_bytes()[: limit - total]
        parts[number % HELD_OUT_EVERY == HELD_OUT_EVERY // 2].append(text)
        total += len(text)
        if total >= limit:
            break
    if not parts[1]:
        raise FileNotFoundError(
            f"the first {limit} bytes of the .py files in {root} are {number} files, too few to hold one out"
        )
    train, held_out = (np.frombuffer(b"".join(part), np.uint8) for part in parts)
    return Corpus(train, held_out, number)


def unigram_entropy(text: np.ndarray) -> float:
    """The entropy of single bytes in nats: the loss of the best model that ignores the context."""
    counts = np.bincount(text, minlength=256)
    shares = counts[counts > 0] / text.size
    return float(-np.sum(shares * np.log(shares)))


def random_windows(text: np.ndarray, count: int, length: int, key: tuple[int, ...]) -> np.ndarray:
    """Windows at random places, a function of the key alone: a resumed run needs no state of an iterator.

    Args:
      text: (bytes,) uint8.
      count: the number of windows.
      length: their length.
      key: the seed and the step.

    Returns:
      (count, length) uint8.
    """
    starts = np.random.default_rng(key).integers(0, text.size - length + 1, size=count)
    return text[starts[:, None] + np.arange(length)]


def even_windows(text: np.ndarray, count: int, length: int) -> np.ndarray:
    """Windows at even distances over the whole text, (count, length) uint8."""
    starts = np.linspace(0, text.size - length, count).astype(np.int64)
    return text[starts[:, None] + np.arange(length)]
