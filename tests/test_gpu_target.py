"""What programs for GPUs send, compiled without one; `gpu_target.py` says what must be installed for it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "gpu_target.py"
D, M, E, K, T = 32, 24, 8, 3, 16


@pytest.fixture(scope="module")
def found() -> Any:
    folder = os.environ.get("JAX_GGEMM_CUDA_COMPILER")
    if folder is None:
        pytest.skip("JAX_GGEMM_CUDA_COMPILER names no folder with jax-cuda12-pjrt; see tests/gpu_target.py")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), folder], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def names(collectives: Any) -> set[str]:
    return {name for name, _, _ in collectives}


def test_routed_tokens_alone_are_exchanged(found: Any) -> None:
    """FSDP gathers a rank's part of the weights; the tensor axis sums tokens; nothing else is gathered."""
    sent = [shapes for name, _, shapes in found["AllToAll"] if name == "all-to-all"]
    chunk = [2, T]  # two ranks
    assert sorted(shape for shapes in sent for shape in shapes) == [[2], *2 * [[*chunk, 2 * K]], *4 * [[*chunk, D]]]
    gathered = [math.prod(shape) for name, _, shapes in found["AllToAll"] if name == "all-gather" for shape in shapes]
    gate_up, down = E // 2 * D // 2 * M, E // 2 * M // 2 * D // 2
    assert sorted(gathered) == [down, gate_up]
    assert names(found["AllToAll"]) == {"all-to-all", "all-gather", "reduce-scatter", "all-reduce"}


def test_a_ring_gathers_nothing(found: Any) -> None:
    assert names(found["Ring"]) == {"collective-permute", "all-reduce"}


def test_the_bare_op_gathers_neither_rows_nor_weights(found: Any) -> None:
    assert names(found["ragged_dot"]) <= {"all-reduce", "reduce-scatter"}
