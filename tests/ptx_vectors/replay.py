"""Runs a probe in the emulator."""

from __future__ import annotations

import numpy as np
from ptx_emulator import Launch, Memory, Report, emulate
from ptx_emulator.memory import empty

from ptx_vectors import tensor_map
from ptx_vectors.program import Buffer, Program, TensorMap


def run(program: Program, seed: int = 0) -> tuple[dict[int, np.ndarray], Report]:
    """Runs a program.

    Args:
      program: which.
      seed: of the order in which warps and engines take turns.

    Returns:
      What its written buffers hold afterwards, by argument, and the emulator's report.
    """
    memory, arrays = Memory(), {}
    for i, buffer in program.buffers():
        arrays[id(buffer)] = array = empty(buffer.before.shape, buffer.before.dtype)
        array[...] = buffer.before
        memory.add(f"argument {i}", array, writable=buffer.written)
    params: list[bytes | int] = []
    for argument in program.arguments:
        match argument:
            case Buffer():
                params.append(arrays[id(argument)].ctypes.data)
            case TensorMap():
                params.append(tensor_map.encode(argument, arrays[id(argument.buffer)].ctypes.data))
            case _:
                params.append(int(argument))
    launch = Launch(
        grid=(program.blocks, 1, 1),
        block=(program.threads, 1, 1),
        cluster=(program.cluster, 1, 1),
        shared_bytes=program.shared_bytes,
        params=params,
    )
    report = emulate(program.ptx, launch, memory, seed=seed, raises=False)
    return {i: arrays[id(buffer)] for i, buffer in program.buffers() if buffer.written}, report
