"""Runs the host code of a CuTe DSL object in this process: the launcher that ships, with its launches handed over."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from ptx_emulator import native

_SHIM = Path(__file__).parent / "host" / "shim.cc"
_FLAGS = ("-std=c++20", "-O1", "-fPIC")

_CALLBACK = ctypes.CFUNCTYPE(
    ctypes.c_int32,
    ctypes.c_char_p,
    *(ctypes.POINTER(ctypes.c_uint32),) * 3,
    ctypes.c_uint64,
    ctypes.c_uint64,
    ctypes.POINTER(ctypes.c_void_p),
)


@dataclasses.dataclass(frozen=True)
class HostLaunch:
    """A launch as the host code asked for it."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int
    """Dynamic shared memory."""
    allowed_shared_bytes: int
    """What the host code had the kernel allowed."""
    arguments: ctypes._Pointer[ctypes.c_void_p]
    """Pointers to the parameters' values; their number and sizes are the kernel's."""

    def params(self, sizes: Sequence[int]) -> list[bytes]:
        """The values of the parameters."""
        return [ctypes.string_at(self.arguments[i], size) for i, size in enumerate(sizes)]


@functools.cache
def _shim() -> Path:
    key = hashlib.sha256(_SHIM.read_bytes()).hexdigest()[:24]
    target = native.cache_directory() / f"shim-{key}.o"
    return native.compile_whole([native.compiler(), *_FLAGS, "-c", str(_SHIM)], target)


class HostObject:
    """The host code of one object.

    Args:
      data: a relocatable object that the CuTe DSL dumped.
      prefix: the name that it was dumped with.
    """

    def __init__(self, data: bytes, prefix: str):
        key = hashlib.sha256(data + _shim().name.encode()).hexdigest()[:24]
        folder = native.cache_directory()
        folder.mkdir(parents=True, exist_ok=True)
        relocatable = folder / f"object-{key}.o"
        library = folder / f"object-{key}.so"
        if not library.exists():
            partial = relocatable.with_suffix(f".{id(self)}.o")
            partial.write_bytes(data)
            partial.replace(relocatable)
        # Its own runtime, whatever else this process has loaded.
        native.compile_whole(
            [native.compiler(), "-shared", "-Wl,-Bsymbolic", "-Wl,-z,noexecstack", str(relocatable), str(_shim())],
            library,
        )
        self._library = ctypes.CDLL(str(library))
        name_address = ctypes.addressof(ctypes.c_char.in_dll(self._library, f"{prefix}_function_name"))
        self._function = getattr(self._library, ctypes.string_at(name_address).decode())
        self._function.restype = None
        self._loaded = ctypes.c_void_p()
        pointer = ctypes.pointer(ctypes.pointer(self._loaded))
        status, device = ctypes.c_int32(0), ctypes.c_int32(0)
        for stage, values in (("init", (pointer, status)), ("load_to_device", (pointer, device, status))):
            function = getattr(self._library, f"_mlir_{prefix}_cuda_{stage}")
            function.restype = None
            function(_addresses([value if value is pointer else ctypes.pointer(value) for value in values]))
            if status.value != 0:
                raise RuntimeError(f"the object's {stage} gave CUDA error {status.value}")

    def run(self, arguments: Sequence[ctypes._SimpleCData], on_launch: Callable[[HostLaunch], None]) -> None:
        """Calls the launcher.

        Args:
          arguments: its values, from the stream on, without the status that comes last.
          on_launch: is called for each launch.

        Raises:
          Whatever `on_launch` raises.
          RuntimeError: where the host code gives an error.
        """
        raised: list[BaseException] = []

        def call(kernel, grid, block, cluster, shared_bytes, allowed, values):
            try:
                on_launch(
                    HostLaunch(
                        kernel.decode(),
                        *((pointer[0], pointer[1], pointer[2]) for pointer in (grid, block, cluster)),
                        shared_bytes,
                        allowed,
                        values,
                    )
                )
            except BaseException as error:
                raised.append(error)
                return 1
            return 0

        callback = _CALLBACK(call)
        self._library.ptx_emulator_on_launch(callback)
        status = ctypes.c_int32(0)
        self._function(_addresses([ctypes.pointer(value) for value in (*arguments, status)]))
        if raised:
            raise raised[0]
        if status.value != 0:
            raise RuntimeError(f"the object's host code gave CUDA error {status.value}")


def _addresses(pointers: Sequence[object]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(pointers))(*(ctypes.cast(pointer, ctypes.c_void_p) for pointer in pointers))
