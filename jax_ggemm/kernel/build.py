"""Compiles kernel objects: the only module that runs the CuTe DSL. `objects.build_all` runs it as its own process."""

from __future__ import annotations

import pickle
import sys
import tempfile
from pathlib import Path

from cutlass import cute

from jax_ggemm.kernel.config import KernelSpec
from jax_ggemm.kernel.config_sm100 import Sm100Config
from jax_ggemm.kernel.multicast_sm100 import MulticastGemmSm100
from jax_ggemm.kernel.sm90 import GroupedGemmSm90
from jax_ggemm.kernel.sm100 import GroupedGemmSm100
from jax_ggemm.kernel.swapped_sm100 import SwappedGemmSm100
from jax_ggemm.kernel.varying_sm100 import VaryingGemmSm100

PREFIX = "jax_ggemm"
"""The name of the function in every object."""


def build(spec: KernelSpec, arch: str) -> tuple[bytes, str]:
    """Compiles a kernel.

    Args:
      spec: what for. Its configuration is one of the architecture's.
      arch: the GPU architecture, "sm_90a" or "sm_100a".

    Returns:
      A relocatable object (the host function that launches the kernel, and the kernel's machine code), and the PTX that
      this machine code was assembled from. Keeping the PTX changes no byte of the object.
    """
    gemm = _kernel_of(spec)
    with tempfile.TemporaryDirectory() as dumps:  # the DSL keeps PTX in a file
        options = f"--gpu-arch {arch} --keep-ptx --dump-dir {dumps}"
        compiled = cute.compile(gemm, *gemm.example_arguments(), options=options)
        return compiled.dump_to_object(PREFIX), str(compiled.__ptx__)


def _kernel_of(spec: KernelSpec) -> GroupedGemmSm90 | GroupedGemmSm100:
    if not isinstance(spec.config, Sm100Config):
        return GroupedGemmSm90(spec)
    if spec.config.swapped:
        return VaryingGemmSm100(spec) if spec.config.varying else SwappedGemmSm100(spec)
    return MulticastGemmSm100(spec) if spec.config.multicast > 1 else GroupedGemmSm100(spec)


def main() -> None:
    """Reads (arch, folder, specs) from standard input; writes objects and PTX to the folder, by index, and says so."""
    arch, folder, specs = pickle.load(sys.stdin.buffer)
    for i, spec in enumerate(specs):
        data, ptx = build(spec, arch)
        (Path(folder) / f"{i}.o").write_bytes(data)
        (Path(folder) / f"{i}.ptx").write_text(ptx)
        print(f"built {i}", flush=True)


if __name__ == "__main__":
    main()
