"""Compiles kernel objects ahead of time: what `python -m jax_ggemm compile` does."""

from __future__ import annotations

import importlib.util
import operator
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import tqdm

from jax_ggemm import objects
from jax_ggemm.files import write_json, write_whole
from jax_ggemm.kernel.config import KernelSpec

KEEP = ("ptx", "cubin")
"""What can be kept beside an object."""

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


def missing_tools() -> list[str]:
    """The packages whose programs `resources` would need and does not find."""
    return [f"nvidia-cuda-{name}" for name in ("cuobjdump", "nvdisasm") if _tool(name) is None]


def resources(data: bytes) -> dict[str, int | None]:
    """Registers, stack and spills of an object's kernel.

    Args:
      data: the object.

    Returns:
      Registers per thread, bytes of stack and of local memory, and the number of instructions that store or load
      local memory (STL, LDL); None for what the tool is missing that would tell.
    """
    usage: dict[str, int] = {}
    spills = None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin(data))
        file.flush()
        cuobjdump, nvdisasm = _tool("cuobjdump"), _tool("nvdisasm")
        if cuobjdump is not None:
            text = subprocess.run([cuobjdump, "-res-usage", file.name], capture_output=True, text=True, check=True)
            usage = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text.stdout)}
        if nvdisasm is not None:
            text = subprocess.run([nvdisasm, "-c", file.name], capture_output=True, text=True, check=True)
            spills = len(re.findall(r"\b(?:STL|LDL)\b", text.stdout))
    return {
        "registers": usage.get("REG"),
        "stack_bytes": usage.get("STACK"),
        "local_bytes": usage.get("LOCAL"),
        "spill_instructions": spills,
    }


def _report(spec: KernelSpec, arch: str, name: str, data: bytes) -> dict[str, Any]:
    return {
        "key": name,
        "arch": arch,
        **spec.describe(),
        "stages": spec.config.stages,
        "shared_memory_bytes": spec.shared_memory_bytes,
        "object_bytes": len(data),
        **resources(data),
    }


def compile_all(
    specs: Sequence[KernelSpec],
    arch: str,
    out: Path,
    keep: Collection[str] = (),
    max_bytes: int | None = None,
) -> list[dict[str, Any]]:
    """Compiles kernels into a folder, with a manifest, and shows how far it is.

    Args:
      specs: the kernels.
      arch: the GPU architecture.
      out: the folder; made where it is missing. What is there already is not compiled again.
      keep: what else to write: "ptx" for KEY.ptx, from the compilation that made the object, and "cubin" for the
        machine code in KEY.cubin.
      max_bytes: the most that all objects may have together.

    Returns:
      The entries of the manifest.

    Raises:
      ValueError: where the objects have more than `max_bytes`; no manifest is written then.
    """
    names = [objects.key(spec, arch) for spec in specs]
    missing = [
        i
        for i, name in enumerate(names)
        if objects.read(out / f"{name}.o") is None or ("ptx" in keep and not (out / f"{name}.ptx").exists())
    ]
    built = objects.build_all([specs[i] for i in missing], arch) if missing else iter(())
    with tqdm.tqdm(total=len(specs), initial=len(specs) - len(missing), unit="kernel", disable=None) as bar:
        for i, compiled in zip(missing, built, strict=True):
            if "ptx" in keep:  # before the object: an object that is there has its PTX
                write_whole(out / f"{names[i]}.ptx", operator.methodcaller("write", compiled.ptx.encode()))
            objects.write(out / f"{names[i]}.o", compiled.data)
            bar.set_postfix_str(f"{specs[i].product.value} {specs[i].in_dtype.name}")
            bar.update()
    contents = [objects.read(out / f"{name}.o") or b"" for name in names]
    total = sum(map(len, contents))
    if max_bytes is not None and total > max_bytes:
        raise ValueError(
            f"{len(specs)} kernels have {total} bytes, more than the {max_bytes} that are allowed: "
            "name fewer dtypes, results or products, or allow more"
        )
    entries = []
    for spec, name, data in zip(specs, names, contents, strict=True):
        if "cubin" in keep:
            write_whole(out / f"{name}.cubin", operator.methodcaller("write", cubin(data)))
        entries.append(_report(spec, arch, name, data))
    write_json(out / "manifest.json", {"versions": objects.versions(), "kernels": entries})
    return entries
