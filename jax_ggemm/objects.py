"""Kernel objects: what names one, where it is looked for, and how it is made.

An object is found in this process, in the user's cache, inside the installed package, or else compiled, which needs
the CuTe DSL and a few seconds. A file is the object with the SHA-256 of its bytes behind it: linkers and loaders
ignore what follows an ELF image, and a file that was cut short or damaged is told from a good one.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import pickle
import platform
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from jax_ggemm import native
from jax_ggemm.files import write_whole
from jax_ggemm.kernel.config import KernelSpec

DSL = "nvidia-cutlass-dsl"
_PINNED_DSL = "4.8.1"
"""The version that the extras of this package install."""

_DIGEST_BYTES = hashlib.sha256().digest_size

_registered: set[str] = set()
_lock = threading.Lock()


@functools.cache
def versions() -> dict[str, str]:
    """What an object depends on beside its spec."""
    kernels = Path(__file__).parent / "kernel"
    sources = hashlib.sha256()
    for path in sorted(kernels.glob("*.py")):
        sources.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    try:
        dsl = importlib.metadata.version(DSL)
    except importlib.metadata.PackageNotFoundError:
        dsl = _PINNED_DSL
    host = f"{platform.machine()}-{platform.system()}".lower()
    return {"sources": sources.hexdigest(), "dsl": dsl, "cuda": cuda_flavour(), "host": host}


@functools.cache
def cuda_flavour() -> str:
    """The CUDA version, cu12 or cu13: of JAX's plugin or, on a machine without one, of the installed DSL."""
    for packages in (("jax-cuda{}-plugin",), (f"{DSL}-libs-cu{{}}",)):
        for version in (13, 12):
            for package in packages:
                try:
                    importlib.metadata.version(package.format(version))
                except importlib.metadata.PackageNotFoundError:
                    continue
                return f"cu{version}"
    return "cu13"


def key(spec: KernelSpec, arch: str) -> str:
    """The name of an object: a hash of everything that it depends on, and of nothing else."""
    parts = {"spec": spec.describe(), "arch": arch, **versions()}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:40]


def cache_directory() -> Path:
    """Where this user's objects are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jax_ggemm" / "objects"


def packaged_directory() -> Path:
    """Objects that a release put into the package."""
    return Path(__file__).parent / "kernel" / "objects"


def write(path: Path, data: bytes) -> None:
    """Writes an object's file, whole or not at all, whoever else writes it at the same time."""
    write_whole(path, lambda file: file.write(data + hashlib.sha256(data).digest()))


def read(path: Path) -> bytes | None:
    """The object in a file; None where there is no file, or a damaged one."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    data, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    return data if hashlib.sha256(data).digest() == digest else None


def _find(name: str) -> bytes | None:
    for directory in (cache_directory(), packaged_directory()):
        data = read(directory / f"{name}.o")
        if data is not None:
            return data
    return None


def runtime_library() -> Path | None:
    """The CuTe DSL's runtime library: the file that JAX_GGEMM_CUTE_RUNTIME names, or that of the installed DSL."""
    named = os.environ.get("JAX_GGEMM_CUTE_RUNTIME")
    if named is not None:
        return Path(named) if Path(named).exists() else None
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(location) / cuda_flavour() / "lib" / "libcute_dsl_runtime.so"
        if path.exists():
            return path
    return None


def unavailable(spec: KernelSpec, arch: str, runs_here: bool = True) -> str | None:
    """Why there is no such kernel, or None where there is one.

    Args:
      spec: the kernel.
      arch: the GPU architecture.
      runs_here: it is also to run on this machine, which has the GPU for it.
    """
    extra = f"pip install 'jax_ggemm[{cuda_flavour().replace('cu', 'cuda')}]'"
    if runs_here and runtime_library() is None:
        return f"the CuTe DSL's runtime library is missing: {extra}, or name it with JAX_GGEMM_CUTE_RUNTIME"
    name = key(spec, arch)
    if name in _registered or importlib.util.find_spec("cutlass") is not None or _find(name) is not None:
        return None
    return f"there is no compiled kernel for it, nor the CuTe DSL to compile one: {extra}"


def load(spec: KernelSpec, arch: str) -> tuple[str, bytes]:
    """A kernel's key and object, from wherever it is found; compiled and put into the user's cache where it is not."""
    name = key(spec, arch)
    data = _find(name)
    if data is None:
        data = build(spec, arch)
        with contextlib.suppress(OSError):  # the object is here, even if the cache cannot be written
            write(cache_directory() / f"{name}.o", data)
    return name, data


def ensure(spec: KernelSpec, arch: str) -> str:
    """Makes a kernel's object known to the custom call in this process, and returns its key."""
    name = key(spec, arch)
    with _lock:
        if name not in _registered:
            native.add_object(name, load(spec, arch)[1], runtime_library())
            _registered.add(name)
    return name


class Compiled(NamedTuple):
    """What one compilation of a kernel gives.

    Attributes:
      data: the object.
      ptx: what the machine code in it was assembled from.
    """

    data: bytes
    ptx: str


def build(spec: KernelSpec, arch: str) -> bytes:
    """Compiles a kernel to an object. Needs the CuTe DSL, but no GPU."""
    return next(build_all([spec], arch)).data


def build_all(specs: Sequence[KernelSpec], arch: str) -> Iterator[Compiled]:
    """Compiles kernels, in a process of its own.

    The DSL takes its target and much else from the environment of the process that first imports it. That must not
    depend on what this process did with it, nor the other way round.

    Args:
      specs: the kernels.
      arch: the GPU architecture.

    Yields:
      Their objects and PTX, in order, as they are done.

    Raises:
      RuntimeError: where the compiler fails, or is not installed.
    """
    if importlib.util.find_spec("cutlass") is None:
        raise RuntimeError("the CuTe DSL, which compiles kernels, is not installed: pip install 'jax_ggemm[compile]'")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CUTE_DSL_")}
    environment |= {"CUTE_DSL_ARCH": arch, "JAX_PLATFORMS": "cpu"}
    package = Path(__file__).parent
    program = (
        f"import sys; sys.path.insert(0, {str(package.parent)!r}); from jax_ggemm.kernel import build; build.main()"
    )
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(BrokenPipeError):  # it failed early: said below
                pickle.dump((arch, folder, list(specs)), process.stdin)
                process.stdin.close()
            done = 0
            for line in process.stdout:
                if line == f"built {done}\n".encode():
                    files = Path(folder) / f"{done}.o", Path(folder) / f"{done}.ptx"
                    yield Compiled(files[0].read_bytes(), files[1].read_text())
                    done += 1
        if done < len(specs):
            errors.seek(0)
            raise RuntimeError(f"the CuTe DSL could not compile {specs[done]} for {arch}:\n{errors.read()[-4000:]}")
