"""The project's kernels for the emulator: an object with the PTX of the very same compilation, and a launch of it."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib.util
import operator
import pickle
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_ggemm import cute, objects
from jax_ggemm.files import write_whole
from jax_ggemm.kernel import architectures
from jax_ggemm.kernel.config import KernelSpec
from jax_ggemm.products import Call, Operands, Product
from ptx_emulator import native, parser
from ptx_emulator.emulator import Checks, EmulationError, Fault, Report, emulate
from ptx_emulator.host_object import HostLaunch, HostObject
from ptx_emulator.launches import Launch
from ptx_emulator.memory import Memory, empty

PREFIX = "jax_ggemm"
"""What kernel/build.py calls the function in every object."""


@dataclasses.dataclass(frozen=True)
class CompiledKernel:
    """What one compilation gave."""

    data: bytes
    ptx: str

    @functools.cached_property
    def host(self) -> HostObject:
        """Its host code, ready to run."""
        return HostObject(self.data, PREFIX)

    def launch(
        self,
        arguments: list[Any],
        memory: Memory,
        *,
        ptx: str | None = None,
        seed: int = 0,
        checks: Checks | None = None,
        raises: bool = True,
    ) -> tuple[HostLaunch, Report]:
        """Runs the host code, and emulates the one launch that it asks for.

        Args:
          arguments: of the host code, from the stream on, as ctypes values.
          memory: what the kernel may touch.
          ptx: instead of the object's own, for a mutation of it.
          seed: of the order of events.
          checks: what is looked for.
          raises: whether faults raise.

        Returns:
          The launch, and what the emulator says.
        """
        text = self.ptx if ptx is None else ptx
        done: list[tuple[HostLaunch, Report]] = []

        def on_launch(asked: HostLaunch) -> None:
            if asked.shared_bytes > asked.allowed_shared_bytes:
                raise AssertionError(
                    f"{asked.kernel} is launched with {asked.shared_bytes} bytes of shared memory, and allowed "
                    f"{asked.allowed_shared_bytes}"
                )
            sizes = [param.size for param in parser.parse(text)[asked.kernel].params]
            launch = Launch(asked.grid, asked.block, asked.cluster, asked.shared_bytes, asked.params(sizes))
            report = emulate(text, launch, memory, kernel=asked.kernel, seed=seed, checks=checks, raises=raises)
            done.append((asked, report))

        self.host.run(arguments, on_launch)
        if len(done) != 1:
            raise AssertionError(f"the host code made {len(done)} launches instead of one")
        return done[0]


def _path(spec: KernelSpec, arch: str) -> Path:
    return native.cache_directory() / f"kernel-{objects.key(spec, arch)}.pickle"


def compile_all(specs: Iterable[KernelSpec], arch: str) -> None:
    """Compiles what this user's cache lacks, in one process."""
    wanted = list(dict.fromkeys(specs))
    if all(_path(spec, arch).exists() for spec in wanted):
        return
    with native.one_at_a_time("kernels"):
        missing = [spec for spec in wanted if not _path(spec, arch).exists()]
        for spec, built in zip(missing, objects.build_all(missing, arch) if missing else (), strict=True):
            content = pickle.dumps((built.data, built.ptx))
            write_whole(_path(spec, arch), operator.methodcaller("write", content))


@functools.cache
def compiled(spec: KernelSpec, arch: str) -> CompiledKernel:
    """A kernel's object and PTX, from this user's cache or compiled now, which needs the CuTe DSL."""
    compile_all([spec], arch)
    return CompiledKernel(*pickle.loads(_path(spec, arch).read_bytes()))


def arguments(
    spec: KernelSpec, arrays: Mapping[str, np.ndarray], out: np.ndarray, multiprocessors: int
) -> list[ctypes._SimpleCData]:
    """What the custom call passes to a kernel's host code (ffi/cuda_handler.cc).

    Args:
      spec: the kernel.
      arrays: lhs, rhs, group_sizes, group_offset and maybe bias, each with one batch axis in front.
      out: the result, with its batch axis.
      multiprocessors: as many blocks are launched.

    Returns:
      The stream, the pointers and the extents.
    """
    lhs, rhs, sizes = arrays["lhs"], arrays["rhs"], arrays["group_sizes"]
    bias = arrays.get("bias")
    ragged = spec.product.rows_are_ragged
    weights = rhs.shape if ragged else out.shape
    batch, m = out.shape[0], lhs.shape[1]

    def step(length: int, per_element: int) -> int:
        return per_element if length == batch and batch > 1 else 0

    extents = [
        m,
        weights[2],
        weights[3],
        sizes.shape[1],
        weights[1],
        batch,
        step(lhs.shape[0], m),
        step(rhs.shape[0], weights[1] if ragged else m),
        step(1 if bias is None else bias.shape[0], weights[1]),
        multiprocessors,
    ]
    pointers = [lhs, rhs, sizes, arrays["group_offset"], out if bias is None else bias, out]
    return [
        ctypes.c_void_p(0),
        *(ctypes.c_void_p(array.ctypes.data) for array in pointers),
        *map(ctypes.c_int32, extents),
    ]


def _check_arrays(spec: KernelSpec, arrays: Mapping[str, np.ndarray], out_shape: tuple[int, ...]) -> None:
    """Refuses arrays that the custom call would never pass: kernels believe what they are told."""
    ragged = spec.product.rows_are_ragged
    names = {"lhs", "rhs", "group_sizes", "group_offset"} | ({"bias"} if spec.has_bias else set())
    if set(arrays) != names:
        raise ValueError(f"the kernel takes {sorted(names)}, {sorted(arrays)} were given")
    ranks = {"lhs": 3, "rhs": 4 if ragged else 3, "group_sizes": 2, "group_offset": 1, "bias": 3}
    for name, array in arrays.items():
        dtype = spec.in_dtype if name in ("lhs", "rhs") else np.dtype(np.float32 if name == "bias" else np.int32)
        if array.dtype != dtype or array.ndim != ranks[name]:
            raise ValueError(f"{name} must be {dtype} of rank {ranks[name]}, {array.dtype} {array.shape} was given")
    lhs, rhs, sizes = arrays["lhs"].shape, arrays["rhs"].shape, arrays["group_sizes"].shape
    if spec.product is Product.FORWARD:
        fits = out_shape[1:] == (lhs[1], rhs[3]) and lhs[2] == rhs[2]
    elif spec.product is Product.DLHS:
        fits = out_shape[1:] == (lhs[1], rhs[2]) and lhs[2] == rhs[3]
    else:
        fits = len(out_shape) == 4 and out_shape[2:] == (lhs[2], rhs[2]) and lhs[1] == rhs[1]
    if "bias" in arrays:
        fits = fits and arrays["bias"].shape[1:] == (rhs[1], out_shape[2])
    batch = out_shape[0]
    fits = fits and all(array.shape[0] in (1, batch) for array in arrays.values())
    if not fits or sizes[0] != batch or arrays["group_offset"].shape != (batch,):
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        raise ValueError(f"a {spec.product.value} product with a result of {out_shape} is not made of {shapes}")


def run(
    spec: KernelSpec,
    arch: str,
    arrays: Mapping[str, np.ndarray],
    out_shape: tuple[int, ...],
    *,
    multiprocessors: int = 4,
    seed: int = 0,
    checks: Checks | None = None,
) -> tuple[np.ndarray, Report]:
    """Emulates one kernel, as the custom call would launch it.

    Args:
      spec: the kernel.
      arch: what it is compiled for.
      arrays: see `arguments`.
      out_shape: of the result, with its batch axis.
      multiprocessors: as many blocks are launched.
      seed: of the order of events.
      checks: what is looked for.

    Returns:
      The result and the report.

    Raises:
      ValueError: for arrays whose dtypes or shapes do not belong together.
      EmulationError: for a fault; also where a byte of the result was not written.
      AssertionError: where the launch has another amount of shared memory than the stage plan.
    """
    _check_arrays(spec, arrays, out_shape)
    kernel = compiled(spec, arch)
    memory = Memory()
    for name, array in arrays.items():
        memory.add(name, array)
    out = empty(out_shape, spec.out_dtype)
    memory.add("out", out, writable=True, initialised=False)
    launch, report = kernel.launch(arguments(spec, arrays, out, multiprocessors), memory, seed=seed, checks=checks)
    if launch.shared_bytes != spec.shared_memory_bytes:
        raise AssertionError(
            f"{launch.shared_bytes} bytes of shared memory are launched, "
            f"the plan has {spec.shared_memory_bytes}: {spec}"
        )
    unwritten = memory.unwritten("out")
    if unwritten:
        message = f"{unwritten} of {out.nbytes} bytes of the result were never written"
        raise EmulationError(dataclasses.replace(report, faults=(Fault("unwritten", message, launch.kernel, "", 0),)))
    return out, report


@dataclasses.dataclass(frozen=True)
class Emulated:
    """What `implementation=` takes to run every kernel in the emulator: the calls and kernels of a GPU of `arch`."""

    arch: str
    multiprocessors: int = 4
    seed: int = 0
    checks: Checks | None = None
    on_report: Callable[[KernelSpec, Report], None] | None = None
    """Called after each launch, with its kernel and what the emulator says of it: counts, warnings, the timeline."""
    name: str = "ptx_emulator"

    def __post_init__(self) -> None:
        if self.checks is not None and self.checks.timeline is not None and self.on_report is None:
            raise ValueError("checks.timeline: only `on_report` gets to see a timeline, and it is None")

    @property
    def architectures(self) -> tuple[str, ...]:
        """As `cute.Targets`."""
        return (self.arch,)

    def unavailable(self, spec: KernelSpec, arch: str) -> str | None:
        """Why a kernel cannot be had, or None where it can."""
        del spec, arch
        return None if importlib.util.find_spec("cutlass") else "the CuTe DSL is not installed"

    def call(self, specs: Mapping[str, KernelSpec], arrays: list[jax.Array], result: Any) -> jax.Array:
        """Stands for the custom call."""
        spec = specs[self.arch]
        compiled(spec, self.arch)  # not during the callback
        names = ("lhs", "rhs", "group_sizes", "group_offset", "bias")[: len(arrays)]

        def emulated(*values: Any) -> np.ndarray:
            given = {name: np.ascontiguousarray(value) for name, value in zip(names, values, strict=True)}
            blocks, seed, checks = self.multiprocessors, self.seed, self.checks
            out, report = run(spec, self.arch, given, result.shape, multiprocessors=blocks, seed=seed, checks=checks)
            if self.on_report is not None:
                self.on_report(spec, report)
            return out

        return jax.pure_callback(emulated, result, *arrays)

    def unsupported(self, call: Call, operands: Operands) -> str | None:
        """Why the kernels cannot take the call, or None where they can."""
        return cute.unsupported(call, operands, self)

    def __call__(self, call: Call, operands: Operands) -> jax.Array:
        """Runs the product."""
        return cute.grouped_product(call, operands, self)


def implementation(arch: str, **options: Any) -> Emulated:
    """An implementation that emulates every kernel.

    Args:
      arch: the architecture, such as "sm_90a".
      **options: other fields of `Emulated`.

    Returns:
      What `implementation=` of the public functions takes. It runs on the CPU, under jit as well.

    Raises:
      ValueError: for an architecture that there are no kernels for, or a timeline that nobody would see.
    """
    if arch not in architectures.BY_NAME:
        raise ValueError(f"arch {arch!r}: there are kernels for {', '.join(architectures.BY_NAME)}")
    return Emulated(arch, **options)
