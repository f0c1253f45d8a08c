"""Compiles kernel objects ahead of time: what `python -m jax_ggemm compile` does."""

from __future__ import annotations

import importlib.util
import operator
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax_ggemm import objects
from jax_ggemm.files import write_json, write_whole
from jax_ggemm.kernel.config import KernelSpec

_ELF = b"\x7fELF"
_CUDA_MACHINE = 190


def cubin(data: bytes) -> bytes:
    """The kernel's machine code: the CUDA ELF image inside an object."""
    at = data.find(_ELF, 1)
    while at >= 0:
        (machine,) = struct.unpack_from("<H", data, at + 18)
        if machine == _CUDA_MACHINE:
            (sections,) = struct.unpack_from("<Q", data, at + 40)
            size, count = struct.unpack_from("<HH", data, at + 58)
            (programs,) = struct.unpack_from("<Q", data, at + 32)
            program_size, program_count = struct.unpack_from("<HH", data, at + 54)
            return data[at : at + max(sections + size * count, programs + program_size * program_count)]
        at = data.find(_ELF, at + 1)
    raise ValueError("the object holds no CUDA image")


def _tool(name: str) -> str | None:
    """A program of the CUDA toolkit: on the path, or from NVIDIA's package on PyPI."""
    found = shutil.which(name)
    spec = importlib.util.find_spec("nvidia")
    for location in (spec.submodule_search_locations or ()) if found is None and spec is not None else ():
        found = next((str(path) for path in Path(location).glob(f"*/bin/{name}")), None)
    return found


def resources(data: bytes) -> dict[str, int]:
    """Registers, stack and spills of an object's kernel, as far as the CUDA tools are there to tell."""
    result: dict[str, int] = {}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin(data))
        file.flush()
        cuobjdump, nvdisasm = _tool("cuobjdump"), _tool("nvdisasm")
        if cuobjdump is not None:
            text = subprocess.run([cuobjdump, "-res-usage", file.name], capture_output=True, text=True, check=True)
            usage = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text.stdout)}
            names = {"REG": "registers", "STACK": "stack_bytes", "LOCAL": "local_bytes"}
            result.update({names[name]: value for name, value in usage.items()})
        if nvdisasm is not None:
            text = subprocess.run([nvdisasm, "-c", file.name], capture_output=True, text=True, check=True)
            result["spill_instructions"] = len(re.findall(r"\b(?:STL|LDL)\b", text.stdout))
    return result


def _report(spec: KernelSpec, arch: str, name: str, data: bytes) -> dict[str, Any]:
    return {
        "key": name,
        "arch": arch,
        **spec.describe(),
        "stages": spec.config.stages,
        "shared_memory_bytes": spec.config.shared_memory_bytes,
        "object_bytes": len(data),
        **resources(data),
    }


def compile_all(specs: Sequence[KernelSpec], arch: str, out: Path, keep_cubin: bool) -> list[dict[str, Any]]:
    """Compiles kernels into a folder, with a manifest.

    Args:
      specs: the kernels.
      arch: the GPU architecture.
      out: the folder; made where it is missing. An object that is there already is not compiled again.
      keep_cubin: also write the machine code, as KEY.cubin.

    Returns:
      The entries of the manifest.
    """
    names = [objects.key(spec, arch) for spec in specs]
    paths = [out / f"{name}.o" for name in names]
    missing = [i for i, path in enumerate(paths) if objects.read(path) is None]
    built = objects.build_all([specs[i] for i in missing], arch) if missing else iter(())
    for done, (i, data) in enumerate(zip(missing, built, strict=True), start=1):
        objects.write(paths[i], data)
        if sys.stderr.isatty():
            print(f"\r{done}/{len(missing)} {specs[i].product.value} {specs[i].config}", end="\033[K", file=sys.stderr)
    if missing and sys.stderr.isatty():
        print(file=sys.stderr)
    entries = []
    for spec, name, path in zip(specs, names, paths, strict=True):
        data = objects.read(path) or b""
        if keep_cubin:
            write_whole(out / f"{name}.cubin", operator.methodcaller("write", cubin(data)))
        entries.append(_report(spec, arch, name, data))
    write_json(out / "manifest.json", {"versions": objects.versions(), "kernels": entries})
    return entries
