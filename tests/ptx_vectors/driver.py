"""The few calls of the CUDA driver that a probe needs, through ctypes."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from ptx_vectors import tensor_map
from ptx_vectors.program import Buffer, Program, TensorMap

# Values of the enumerations of cuda.h.
_ELEMENTS = {"u8": 0, "u16": 1, "u32": 2, "s32": 3, "f16": 6, "f32": 7, "bf16": 9}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
_ATTRIBUTE_CLUSTER_DIMENSION = 4
_JIT_ERROR_LOG_BUFFER, _JIT_ERROR_LOG_BUFFER_SIZE_BYTES = 5, 6


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint32 * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


class CudaError(RuntimeError):
    """A call of the driver failed."""


class RefusedError(CudaError):
    """A kernel was stopped."""


def _aligned(size: int) -> ctypes.Array[Any]:
    """Zeroed bytes at a multiple of 64."""
    raw = (ctypes.c_char * (size + 64))()
    return (ctypes.c_char * size).from_buffer(raw, -ctypes.addressof(raw) % 64)


class Driver:
    """A context on the first GPU."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", 0)
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        name = ctypes.create_string_buffer(96)
        self._call("cuDeviceGetName", name, len(name), device)
        version = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(version))
        self.gpu = name.value.decode()
        self.cuda_version = f"{version.value // 1000}.{version.value % 1000 // 10}"

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorName(code, ctypes.byref(text))
            raise CudaError(f"{name}: {(text.value or b'?').decode()} ({code})")

    def _module(self, ptx: str) -> ctypes.c_void_p:
        module, log = ctypes.c_void_p(), ctypes.create_string_buffer(4096)
        options = (ctypes.c_int * 2)(_JIT_ERROR_LOG_BUFFER, _JIT_ERROR_LOG_BUFFER_SIZE_BYTES)
        values = (ctypes.c_void_p * 2)(ctypes.addressof(log), len(log))
        try:
            self._call("cuModuleLoadDataEx", ctypes.byref(module), ptx.encode(), 2, options, values)
        except CudaError as error:
            raise CudaError(f"{error}: {log.value.decode(errors='replace')}") from None
        return module

    def encode(self, of: TensorMap, address: int) -> bytes:
        """A tensor map as the driver encodes it."""
        rank = len(of.extents)
        encoded = _aligned(128)
        self._call(
            "cuTensorMapEncodeTiled",
            encoded,
            _ELEMENTS[of.element],
            ctypes.c_uint32(rank),
            ctypes.c_void_p(address),
            (ctypes.c_uint64 * rank)(*of.extents),
            (ctypes.c_uint64 * max(1, rank - 1))(*of.strides),
            (ctypes.c_uint32 * rank)(*of.box),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            0,
            _SWIZZLES[of.swizzle],
            0,
            int(of.fill_nan),
        )
        return bytes(encoded)

    def run(self, program: Program) -> tuple[dict[int, np.ndarray], list[str]]:
        """Runs a program.

        Args:
          program: which.

        Returns:
          What its written buffers hold afterwards, by argument, and remarks about its tensor maps.
        """
        function = ctypes.c_void_p()
        module = self._module(program.ptx)
        self._call("cuModuleGetFunction", ctypes.byref(function), module, b"probe")
        self._call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED_SIZE_BYTES, program.shared_bytes)
        addresses: dict[int, ctypes.c_uint64] = {}
        for i, buffer in program.buffers():
            addresses[i] = address = ctypes.c_uint64()
            data = np.ascontiguousarray(buffer.before)
            self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(data.nbytes))
            self._call("cuMemcpyHtoD_v2", address, ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(data.nbytes))
        of_buffer = {id(buffer): addresses[i] for i, buffer in program.buffers()}

        remarks: list[str] = []
        values: list[Any] = []
        for i, argument in enumerate(program.arguments):
            match argument:
                case Buffer():
                    values.append(addresses[i])
                case TensorMap():
                    values.append(self._tensor_map(argument, of_buffer[id(argument.buffer)].value, remarks))
                case np.uint64():
                    values.append(ctypes.c_uint64(int(argument)))
                case _:
                    values.append(ctypes.c_uint32(int(argument)))
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))

        cluster = _Attribute(_ATTRIBUTE_CLUSTER_DIMENSION, 0, (ctypes.c_uint32 * 16)(program.cluster, 1, 1))
        config = _Config(
            (ctypes.c_uint * 3)(program.blocks, 1, 1),
            (ctypes.c_uint * 3)(program.threads, 1, 1),
            program.shared_bytes,
            None,
            ctypes.pointer(cluster),
            int(program.cluster > 1),
        )
        self._call("cuLaunchKernelEx", ctypes.byref(config), function, pointers, None)
        try:
            self._call("cuCtxSynchronize")
        except CudaError as error:
            raise RefusedError(*error.args) from None
        results = {}
        for i, buffer in program.buffers():
            if buffer.written:
                results[i] = after = np.empty_like(buffer.before)
                self._call(
                    "cuMemcpyDtoH_v2", ctypes.c_void_p(after.ctypes.data), addresses[i], ctypes.c_size_t(after.nbytes)
                )
            self._call("cuMemFree_v2", addresses[i])
        self._call("cuModuleUnload", module)
        return results, remarks

    def _tensor_map(self, of: TensorMap, address: int, remarks: list[str]) -> ctypes.Array[Any]:
        """The driver's encoding, or, where it refuses, ours."""
        ours = tensor_map.encode(of, address)
        try:
            encoded = self.encode(of, address)
        except CudaError as error:
            remarks.append(f"own tensor map: {error}")
            encoded = ours
        if encoded[:64] != ours[:64]:
            words = [np.frombuffer(e[:64], np.uint64) for e in (encoded, ours)]
            remarks += [
                f"tensor map word {i}: {a:#x}, ours {b:#x}"
                for i, (a, b) in enumerate(zip(*words, strict=True))
                if a != b
            ]
        result = _aligned(128)
        result[:] = encoded
        return result
