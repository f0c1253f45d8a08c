"""Device memory: arrays of this process, and which bytes of them a kernel may touch."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass
class Buffer:
    """One array that a kernel may touch."""

    name: str
    array: np.ndarray
    writable: bool
    written: np.ndarray | None
    """A byte per byte, non-zero once it was written; None where all bytes hold values from the start."""

    @property
    def address(self) -> int:
        """Of the first byte."""
        return self.array.ctypes.data


class Memory:
    """The buffers of a launch. Anything else is out of bounds."""

    def __init__(self) -> None:
        self.buffers: dict[str, Buffer] = {}

    def add(self, name: str, array: np.ndarray, writable: bool = False, initialised: bool = True) -> int:
        """Lets kernels touch an array.

        Args:
          name: for reports.
          array: C-contiguous; it is used in place.
          writable: False where a write is a fault.
          initialised: False where the kernel must not read a byte before it wrote it.

        Returns:
          The address of the array, as kernels take it.

        Raises:
          ValueError: for an array that kernels could not use like this.
        """
        if name in self.buffers:
            raise ValueError(f"there is a buffer {name!r} already")
        if not array.flags.c_contiguous:
            raise ValueError(f"buffer {name!r} is not C-contiguous")
        if writable and not array.flags.writeable:
            raise ValueError(f"buffer {name!r} is writable for the kernel, and its array is read-only")
        written = None if initialised else np.zeros(array.nbytes, np.uint8)
        self.buffers[name] = Buffer(name, array, writable, written)
        return self.buffers[name].address

    def unwritten(self, name: str) -> int:
        """How many bytes of a buffer that was added with `initialised=False` were never written."""
        written = self.buffers[name].written
        return 0 if written is None else int(np.count_nonzero(written == 0))


def empty(shape: tuple[int, ...], dtype: np.dtype, align: int = 256) -> np.ndarray:
    """An array whose address is a multiple of `align` bytes, as XLA's allocations are; filled with 0xff bytes."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.full(size + align, 0xFF, np.uint8)
    start = -raw.ctypes.data % align
    return raw[start : start + size].view(dtype).reshape(shape)
