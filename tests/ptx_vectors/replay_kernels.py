"""Runs a recorded case of the Hopper kernels in the emulator."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
from ptx_emulator import kernels

from ptx_vectors.kernels import Case
from ptx_vectors.record_kernels import ARCHITECTURE, PATH

_BLOCKS = 4


@dataclasses.dataclass(frozen=True)
class KernelRecording:
    """What a GPU gave."""

    exact: dict[str, str]
    """Digests of results by case."""
    rounded: dict[str, np.ndarray]
    """Results by case, as unsigned integers."""
    machine: dict[str, str]


def load(path: Path = PATH) -> KernelRecording:
    """Reads the file of `record_kernels`."""
    with np.load(path) as file:
        about = json.loads(str(file["about"]))
        rounded = {name: file[digest] for name, digest in about["rounded"].items()}
    return KernelRecording(about["exact"], rounded, about["machine"])


def run(case: Case, seed: int = 0) -> np.ndarray:
    """The result of a case as it lies in memory: as `record_kernels.run`, in the emulator."""
    call, operands = case.operands()
    arrays = {
        "lhs": np.asarray(operands.lhs)[None],
        "rhs": np.asarray(operands.rhs)[None],
        "group_sizes": np.asarray(operands.group_sizes)[None],
        "group_offset": np.asarray(operands.group_offset)[None],
    }
    shape = (1, *operands.out_shape(call))
    result, _ = kernels.run(case.spec, ARCHITECTURE, arrays, shape, multiprocessors=_BLOCKS, seed=seed)
    return result[0].view({2: np.uint16, 4: np.uint32}[result.itemsize])
