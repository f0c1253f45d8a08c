"""Compiles kernel objects: the only module that runs the CuTe DSL. `objects.build_all` runs it as its own process."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from cutlass import cute

from jax_ggemm.kernel.config import KernelSpec
from jax_ggemm.kernel.config_sm100 import Sm100Config
from jax_ggemm.kernel.sm90 import GroupedGemmSm90
from jax_ggemm.kernel.sm100 import GroupedGemmSm100

PREFIX = "jax_ggemm"
"""The name of the function in every object."""


def build(spec: KernelSpec, arch: str) -> bytes:
    """Compiles a kernel.

    Args:
      spec: what for. Its configuration is one of the architecture's.
      arch: the GPU architecture, "sm_90a" or "sm_100a".

    Returns:
      A relocatable object: the host function that launches the kernel, and the kernel's machine code.
    """
    gemm = (GroupedGemmSm100 if isinstance(spec.config, Sm100Config) else GroupedGemmSm90)(spec)
    compiled = cute.compile(gemm, *gemm.example_arguments(), options=f"--gpu-arch {arch}")
    return compiled.dump_to_object(PREFIX)


def main() -> None:
    """Reads (arch, folder, specs) from standard input; writes each object to the folder, by its index, and says so."""
    arch, folder, specs = pickle.load(sys.stdin.buffer)
    for i, spec in enumerate(specs):
        (Path(folder) / str(i)).write_bytes(build(spec, arch))
        print(f"built {i}", flush=True)


if __name__ == "__main__":
    main()
