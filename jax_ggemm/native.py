"""Loads the compiled library and registers its handlers with XLA, once and on first use."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import re
from pathlib import Path

import jax
import jaxlib.version

TARGET = "jax_ggemm"
"""The name of the custom call, on every platform."""

_LIBRARY = "libjax_ggemm.so"


def _library_path() -> Path:
    """The compiled library: beside this file or, where this file is a source tree, in the installed package."""
    beside = Path(__file__).parent / _LIBRARY
    if beside.exists():
        return beside
    try:
        installed = Path(str(importlib.metadata.distribution("jax_ggemm").locate_file(f"jax_ggemm/{_LIBRARY}")))
    except importlib.metadata.PackageNotFoundError:
        installed = beside
    if not installed.exists():
        raise ImportError(
            f"the compiled library {_LIBRARY} is missing: install the package with `pip install .` "
            "(it needs a C++17 compiler), or pass implementation='xla'"
        )
    return installed


def _runtime_ffi_version() -> tuple[int, int]:
    """The version of XLA's FFI that the installed jaxlib speaks, from the header it ships."""
    header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    found = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header.read_text()))
    return int(found["MAJOR"]), int(found["MINOR"])


@functools.cache
def _library() -> ctypes.CDLL:
    """The compiled library, opened.

    Raises:
      ImportError: where the library is missing, or was built for a newer or incompatible FFI than
        the installed jaxlib has. (Registering such a library would take JAX's CPU backend down.)
    """
    library = ctypes.CDLL(str(_library_path()))
    built = library.jax_ggemm_ffi_major(), library.jax_ggemm_ffi_minor()
    runs = _runtime_ffi_version()
    if built[0] != runs[0] or built[1] > runs[1]:
        raise ImportError(
            f"{_LIBRARY} was built for XLA FFI {built[0]}.{built[1]}, and jaxlib {jaxlib.version.__version__} has "
            f"{runs[0]}.{runs[1]}: install a later jaxlib, or build jax_ggemm against the headers of this one"
        )
    return library


@functools.cache
def register() -> None:
    """Makes the custom call known to XLA's CPU backend.

    Raises:
      ImportError: where the library is missing, or does not fit the installed jaxlib.
    """
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(_library().jax_ggemm_cpu), platform="cpu")


@functools.cache
def register_cuda() -> None:
    """Makes the custom call known to XLA's CUDA backend.

    Raises:
      ImportError: where the library is missing, or does not fit the installed jaxlib.
    """
    stages = {
        "instantiate": jax.ffi.pycapsule(_library().jax_ggemm_cuda_instantiate),
        "initialize": jax.ffi.pycapsule(_library().jax_ggemm_cuda_initialize),
        "execute": jax.ffi.pycapsule(_library().jax_ggemm_cuda),
    }
    jax.ffi.register_ffi_target(TARGET, stages, platform="CUDA")


def set_runtime(path: Path) -> None:
    """Names the CuTe DSL's runtime library, which loads kernel objects."""
    _library().jax_ggemm_cuda_set_runtime(str(path).encode())


def add_object(key: str, data: bytes, runtime: Path | None) -> None:
    """Makes a kernel object known to the custom call on GPUs.

    Args:
      key: its name.
      data: the object.
      runtime: the CuTe DSL's runtime library.
    """
    if runtime is not None:
        set_runtime(runtime)
    _library().jax_ggemm_cuda_add_object(key.encode(), data, ctypes.c_size_t(len(data)))
