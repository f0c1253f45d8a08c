"""The small tcgen05 product as a test bed for mutations."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
from ptx_emulator import Checks, Memory, native
from ptx_emulator.kernels import PREFIX, CompiledKernel
from ptx_emulator.memory import empty

from jax_ggemm import objects
from jax_ggemm.files import write_whole
from ptx_mutations import tcgen05_mutations
from ptx_mutations.harness import Outcome
from ptx_mutations.mutation import Mutation
from ptx_mutations.tcgen05_text import Tcgen05Text

_SOURCE = Path(native.__file__).parent / "testbeds" / "tcgen05_gemm.py"
_BF16 = np.dtype(ml_dtypes.bfloat16)
_M, _N, _K = 300, 72, 264

_PROGRAM = """
import pathlib, pickle, sys, tempfile
sys.path.insert(0, sys.argv[1])
from cutlass import cute
import tcgen05_gemm
gemm = tcgen05_gemm.Tcgen05Gemm(int(sys.argv[2]))
with tempfile.TemporaryDirectory() as dumps:
    options = f"--gpu-arch {tcgen05_gemm.ARCH} --keep-ptx --dump-dir {dumps}"
    compiled = cute.compile(gemm, *gemm.example_arguments(), options=options)
    pathlib.Path(sys.argv[3]).write_bytes(pickle.dumps((compiled.dump_to_object(sys.argv[4]), str(compiled.__ptx__))))
"""


@functools.cache
def _compiled(ctas: int) -> CompiledKernel:
    """The kernel for so many blocks to a tile, from this user's cache or compiled now, which needs the CuTe DSL."""
    key = hashlib.sha256(_SOURCE.read_bytes() + _PROGRAM.encode() + objects.versions()["dsl"].encode()).hexdigest()[:24]
    path = native.cache_directory() / f"tcgen05-{ctas}-{key}.pickle"
    if not path.exists():
        environment = {name: value for name, value in os.environ.items() if not name.startswith("CUTE_DSL_")}
        partial = path.with_suffix(f".{os.getpid()}")
        path.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-c", _PROGRAM, str(_SOURCE.parent), str(ctas), str(partial), PREFIX]
        subprocess.run(command, env=environment | {"CUTE_DSL_ARCH": "sm_100a", "JAX_PLATFORMS": "cpu"}, check=True)
        content = partial.read_bytes()
        partial.unlink()
        write_whole(path, lambda file: file.write(content))
    return CompiledKernel(*pickle.loads(path.read_bytes()))


class Tcgen05Bed:
    """A product with tails along every axis, of small integers: every sum is exact."""

    def __init__(self, ctas: int):
        self.ctas = ctas
        self.name = tcgen05_mutations.TWO if ctas == 2 else tcgen05_mutations.ONE

    @functools.cached_property
    def mutations(self) -> Sequence[Mutation[Tcgen05Text]]:
        """Those that are for this bed."""
        return [m for m in tcgen05_mutations.MUTATIONS.all if self.name in m.beds]

    @functools.cached_property
    def _operands(self) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(2)
        operands = empty((_M, _K), _BF16), empty((_N, _K), _BF16)
        for array in operands:
            array[...] = rng.integers(-3, 4, array.shape)
        return operands

    @functools.cached_property
    def _expected(self) -> np.ndarray:
        a, b = (array.astype(np.float32) for array in self._operands)
        return a @ b.T

    def text(self) -> Tcgen05Text:
        """The kernel's PTX."""
        return Tcgen05Text(_compiled(self.ctas).ptx, self.ctas)

    def run(self, ptx: str, seed: int, races: bool = True) -> Outcome:
        """Runs an edited text."""
        memory, result = Memory(), empty((_M, _N), np.dtype(np.float32))
        for name, array in zip("ab", self._operands, strict=True):
            memory.add(name, array)
        memory.add("result", result, writable=True, initialised=False)
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (*self._operands, result)]
        arguments = [ctypes.c_void_p(0), *pointers, *map(ctypes.c_int32, (_M, _N, _K))]
        _, report = _compiled(self.ctas).launch(
            arguments, memory, ptx=ptx, seed=seed, checks=Checks(races=races), raises=False
        )
        return Outcome(report, int(np.count_nonzero(result != self._expected)))


def beds() -> list[Tcgen05Bed]:
    """Every bed."""
    return [Tcgen05Bed(1), Tcgen05Bed(2)]
