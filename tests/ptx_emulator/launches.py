"""What a launch asks for: its limits, and the block of its parameters."""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from ptx_emulator.memory import empty
from ptx_emulator.parser import Kernel, Param

_LARGEST_GRID = (2**31 - 1, 65535, 65535)
_LARGEST_BLOCK = (1024, 1024, 64)
_THREADS = 1024
_CLUSTER = 16
"""CTAs; more than 8 must be asked for."""
_SHARED_BYTES = 227 * 1024
"""Of a CTA, static and dynamic, from sm_90 on."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """How a kernel is launched."""

    grid: tuple[int, int, int] = (1, 1, 1)
    """CTAs."""
    block: tuple[int, int, int] = (32, 1, 1)
    """Threads of a CTA."""
    cluster: tuple[int, int, int] = (1, 1, 1)
    """CTAs of a cluster."""
    shared_bytes: int = 0
    """Dynamic shared memory of a CTA."""
    params: Sequence[bytes | float] = ()
    """One value per .param of the kernel: its bytes, or a number of the declared type."""


def _check_extents(name: str, extents: tuple[int, int, int], largest: Sequence[int]) -> None:
    if not all(isinstance(extent, (int, np.integer)) for extent in extents):
        raise TypeError(f"{name} {tuple(extents)}: its extents must be integers")
    if len(extents) != 3 or any(not 1 <= own <= limit for own, limit in zip(extents, largest, strict=True)):
        raise ValueError(f"{name} {tuple(extents)}: it must have three extents from 1 to {tuple(largest)}")


def check(kernel: Kernel, launch: Launch) -> None:
    """Refuses a launch that no GPU would take.

    Raises:
      ValueError, TypeError: with what was asked for and what would do.
    """
    _check_extents("grid", launch.grid, _LARGEST_GRID)
    _check_extents("block", launch.block, _LARGEST_BLOCK)
    _check_extents("cluster", launch.cluster, (_CLUSTER,) * 3)
    threads, ctas = math.prod(launch.block), math.prod(launch.cluster)
    if threads > _THREADS:
        raise ValueError(f"block {launch.block} has {threads} threads: {_THREADS} are possible")
    if ctas > _CLUSTER:
        raise ValueError(f"cluster {launch.cluster} has {ctas} CTAs: {_CLUSTER} are possible")
    if any(own % of for own, of in zip(launch.grid, launch.cluster, strict=True)):
        raise ValueError(f"a grid of {launch.grid} is not made of clusters of {launch.cluster}")
    if not isinstance(launch.shared_bytes, (int, np.integer)):
        raise TypeError(f"shared_bytes {launch.shared_bytes!r}: it must be an integer")
    shared = kernel.static_shared + launch.shared_bytes
    if launch.shared_bytes < 0 or shared > _SHARED_BYTES:
        raise ValueError(
            f"{launch.shared_bytes} bytes of dynamic and {kernel.static_shared} of static shared memory: "
            f"{_SHARED_BYTES} are possible"
        )
    if kernel.reqntid and (*kernel.reqntid, 1, 1)[:3] != tuple(launch.block):
        raise ValueError(f"{kernel.name} requires blocks of {kernel.reqntid}, launched with {launch.block}")
    if kernel.maxntid and threads > math.prod(kernel.maxntid):
        raise ValueError(f"{kernel.name} is for blocks of up to {kernel.maxntid}, launched with {launch.block}")
    if kernel.reqnctapercluster and (*kernel.reqnctapercluster, 1, 1)[:3] != tuple(launch.cluster):
        raise ValueError(
            f"{kernel.name} requires clusters of {kernel.reqnctapercluster}, launched with {launch.cluster}"
        )


def _encode(param: Param, value: Any) -> bytes:
    if isinstance(value, (bytes, bytearray)):
        if len(value) != param.size:
            raise ValueError(f"parameter {param.name} has {param.size} bytes, {len(value)} were given")
        return bytes(value)
    if not isinstance(value, (bool, int, float, np.bool_, np.integer, np.floating)):
        raise TypeError(
            f"parameter {param.name} is a number of {param.size} bytes, {type(value).__name__} was given: it takes a "
            "number, or bytes; of an array its address, array.ctypes.data"
        )
    real = isinstance(value, (float, np.floating))
    if param.kind == "f" or (real and param.kind == "b"):
        layout = {4: "<f", 8: "<d"}.get(param.size)
        if layout is None:
            raise ValueError(f"parameter {param.name} has {param.size} bytes: {value!r} must be given as bytes")
        return struct.pack(layout, value)
    if real:
        raise TypeError(f"parameter {param.name} is an integer of {param.size} bytes, {value!r} was given")
    bits = 8 * param.size
    if not -(1 << (bits - 1)) <= int(value) < 1 << bits:
        raise ValueError(f"parameter {param.name} has {param.size} bytes, too few for {value!r}")
    return (int(value) % (1 << bits)).to_bytes(param.size, "little")


def param_block(kernel: Kernel, launch: Launch) -> np.ndarray:
    """The parameters, as a kernel finds them.

    Raises:
      ValueError, TypeError: for a value that a parameter cannot hold.
    """
    if len(launch.params) != len(kernel.params):
        raise ValueError(f"{kernel.name} takes {len(kernel.params)} parameters, {len(launch.params)} were given")
    block = empty((max(kernel.param_bytes, 1),), np.dtype(np.uint8))
    block[:] = 0
    for param, value in zip(kernel.params, launch.params, strict=True):
        block[param.offset : param.offset + param.size] = np.frombuffer(_encode(param, value), np.uint8)
    return block


def registers(kernel: Kernel, launch: Launch) -> int:
    """Registers that a thread starts with where ptxas gives it all that there are; 0 where it may give fewer."""
    threads = -(-math.prod(launch.block) // 32) * 32
    share = 65536 // (threads * kernel.min_ctas) // 8 * 8
    return share if kernel.reqntid and share < 255 else 0
