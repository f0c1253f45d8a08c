"""Compiles the core on first use, and calls it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

_CORE = Path(__file__).parent / "core"
_FLAGS = ("-std=c++20", "-O3", "-march=native", "-ffp-contract=off", "-fPIC")


class BufferArgument(ctypes.Structure):
    """As in core/api.cc."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("start", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("written", ctypes.c_void_p),
        ("writable", ctypes.c_int32),
    )


class LaunchArgument(ctypes.Structure):
    """As in core/api.cc."""

    _fields_ = (
        ("instructions", ctypes.c_void_p),
        ("instruction_count", ctypes.c_int64),
        ("operands", ctypes.c_void_p),
        ("operand_count", ctypes.c_int64),
        ("specials", ctypes.c_void_p),
        ("special_count", ctypes.c_int64),
        ("constants", ctypes.c_void_p),
        ("constant_bytes", ctypes.c_int64),
        ("register_bytes", ctypes.c_int64),
        ("static_shared", ctypes.c_int64),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("cluster", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("registers", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("races", ctypes.c_int32),
        ("blackwell", ctypes.c_int32),
        ("max_faults", ctypes.c_int32),
        ("resident_clusters", ctypes.c_int32),
        ("timeline", ctypes.c_int32),
        ("max_instructions", ctypes.c_int64),
        ("costs", ctypes.c_void_p),
        ("buffers", ctypes.POINTER(BufferArgument)),
        ("buffer_count", ctypes.c_int64),
        ("counts", ctypes.c_void_p),
        ("executed", ctypes.c_int64),
    )


def cache_directory() -> Path:
    """Where compiled code of the emulator is kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jax_ggemm" / "ptx_emulator"


@contextlib.contextmanager
def one_at_a_time(what: str) -> Iterator[None]:
    """Of several processes that would make the same thing, one does; the others wait, and find it."""
    cache_directory().mkdir(parents=True, exist_ok=True)
    with (cache_directory() / f"{what}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{result.stderr[-4000:]}")


def compile_whole(command: list[str], target: Path) -> Path:
    """Runs a compiler that writes its last argument's file; whole or not at all, whoever else does the same."""
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            partial = Path(folder) / target.name
            _run([*command, "-o", str(partial)])
            partial.replace(target)
    return target


def compiler() -> str:
    """The C++ compiler."""
    found = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if found is None:
        raise RuntimeError("the emulator needs a C++ compiler: g++ or clang++")
    return found


def _cpu() -> bytes:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor().encode()
    return next((line for line in lines if line.startswith("flags")), platform.processor()).encode()


_KEPT = 8
"""Versions of each file of the core, and of all of it, that the cache keeps: for some checkouts side by side."""


def forget_old(folder: Path, stems: Iterable[str], suffix: str) -> None:
    """Of the files `<stem>-<key><suffix>`, leaves those that were used last."""
    for stem in stems:
        versions = [path for path in folder.glob(f"{stem}-*{suffix}") if path.name.count("-") == stem.count("-") + 1]
        for path in sorted(versions, key=lambda path: path.stat().st_mtime, reverse=True)[_KEPT:]:
            path.unlink(missing_ok=True)


def _library() -> Path:
    """The core, compiled if this user's cache does not hold it."""
    common = hashlib.sha256(_cpu() + " ".join((compiler(), *_FLAGS)).encode())
    for path in sorted((*_CORE.glob("*.h"), *_CORE.glob("*.def"))):
        common.update(path.name.encode() + path.read_bytes())

    def build(source: Path) -> Path:
        key = common.copy()
        key.update(source.name.encode() + source.read_bytes())
        target = cache_directory() / f"{source.stem}-{key.hexdigest()[:24]}.o"
        return compile_whole([compiler(), *_FLAGS, "-c", str(source)], target)

    with concurrent.futures.ThreadPoolExecutor(max_workers=2) as pool:
        objects = list(pool.map(build, sorted(_CORE.glob("*.cc"))))
    key = hashlib.sha256("".join(path.name for path in objects).encode()).hexdigest()[:24]
    library = cache_directory() / f"core-{key}.so"
    compile_whole([compiler(), "-shared", *map(str, objects)], library)
    for path in (*objects, library):
        path.touch()
    forget_old(cache_directory(), (source.stem for source in _CORE.glob("*.cc")), ".o")
    forget_old(cache_directory(), ("core",), ".so")
    return library


@functools.cache
def core() -> ctypes.CDLL:
    """The core, loaded."""
    with one_at_a_time("core"):
        library = _library()
    loaded = ctypes.CDLL(str(library))
    loaded.ptx_emulator_run.argtypes = [ctypes.POINTER(LaunchArgument)]
    loaded.ptx_emulator_run.restype = ctypes.c_void_p
    loaded.ptx_emulator_free.argtypes = [ctypes.c_void_p]
    loaded.ptx_emulator_free.restype = None
    return loaded
