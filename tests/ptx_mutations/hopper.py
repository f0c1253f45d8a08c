"""The Hopper kernels as test beds for mutations."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Sequence

import ml_dtypes
import numpy as np
import oracle
from ptx_emulator import Launch, Memory, emulate, kernels
from ptx_emulator.host_object import HostLaunch
from ptx_emulator.memory import empty
from ptx_emulator.parser import parse

from jax_ggemm.kernel.config import KernelSpec, Sm90Config
from jax_ggemm.products import Product
from ptx_mutations import hopper_data, hopper_synchronisation
from ptx_mutations.harness import Outcome
from ptx_mutations.hopper_text import HopperText
from ptx_mutations.mutation import Mutation

_ARCHITECTURE = "sm_90a"
_BF16 = np.dtype(ml_dtypes.bfloat16)
_BLOCKS = 2


@dataclasses.dataclass(frozen=True)
class Problem:
    """A call: whole tiles and ragged ones, more tiles per block than the ring has slots, more steps than stages."""

    product: Product
    m: int = 420
    k: int = 200
    n: int = 136
    sizes: tuple[int, ...] = (256, 0, 40, 1, 100)

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of lhs, rhs and the result."""
        m, k, n, g = self.m, self.k, self.n, len(self.sizes)
        return {
            Product.FORWARD: ((m, k), (g, k, n), (m, n)),
            Product.DLHS: ((m, n), (g, k, n), (m, k)),
            Product.DRHS: ((m, k), (m, n), (g, k, n)),
        }[self.product]


class HopperBed:
    """One kernel on one problem, with small integers for operands: every sum is exact, so that results are known."""

    def __init__(self, product: Product, config: Sm90Config):
        self.spec = KernelSpec(product, _BF16, _BF16, False, config)
        self.problem = Problem(product)
        self.name = f"{product.value} {config.tile_m}x{config.tile_n}"

    @functools.cached_property
    def mutations(self) -> Sequence[Mutation[HopperText]]:
        """Those that are for this bed."""
        everything = (*hopper_synchronisation.MUTATIONS.all, *hopper_data.MUTATIONS.all)
        return [m for m in everything if self.name in m.beds]

    @functools.cached_property
    def _compiled(self) -> kernels.CompiledKernel:
        return kernels.compiled(self.spec, _ARCHITECTURE)

    @functools.cached_property
    def _arrays(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(1)
        lhs, rhs, out = self.problem.shapes()
        arrays = {"lhs": empty(lhs, _BF16), "rhs": empty(rhs, _BF16)}
        for array in arrays.values():
            array[...] = rng.integers(-3, 4, array.shape)
        arrays["sizes"] = empty((len(self.problem.sizes),), np.dtype(np.int32))
        arrays["sizes"][...] = self.problem.sizes
        arrays["offset"] = empty((1,), np.dtype(np.int32))
        arrays["offset"][...] = 0
        return arrays | {"result": empty(out, _BF16)}

    @functools.cached_property
    def _expected(self) -> np.ndarray:
        lhs, rhs, sizes, *_ = self._arrays.values()
        product = {Product.FORWARD: oracle.forward, Product.DLHS: oracle.d_lhs}.get(self.problem.product)
        expected = product(lhs, rhs, sizes) if product else oracle.d_rhs(lhs, rhs, sizes, len(sizes))
        return expected.value.astype(np.float32).astype(_BF16)

    @functools.cached_property
    def _launch(self) -> Launch:
        """The launch that the object's own host code asks for."""
        launches: list[Launch] = []

        def record(host: HostLaunch) -> None:
            (kernel,) = parse(self._compiled.ptx).values()
            params = host.params([param.size for param in kernel.params])
            launches.append(Launch(host.grid, host.block, host.cluster, host.shared_bytes, params))

        lhs, rhs, sizes, offset, result = (ctypes.c_void_p(a.ctypes.data) for a in self._arrays.values())
        p, groups = self.problem, len(self.problem.sizes)
        extents = (p.m, p.k, p.n, groups, groups, 1, 0, 0, 0, _BLOCKS)
        pointers = (ctypes.c_void_p(0), lhs, rhs, sizes, offset, result, result)
        self._compiled.host.run([*pointers, *map(ctypes.c_int32, extents)], record)
        (launch,) = launches
        return launch

    def text(self) -> HopperText:
        """The kernel's PTX."""
        return HopperText(self._compiled.ptx, self.spec.config)

    def run(self, ptx: str, seed: int) -> Outcome:
        """Runs an edited text."""
        result = self._arrays["result"]
        result.view(np.uint16)[...] = 0xFFFF
        memory = Memory()
        for name, array in self._arrays.items():
            memory.add(name, array, writable=name == "result", initialised=name != "result")
        report = emulate(ptx, self._launch, memory, seed=seed, raises=False)
        # Zeros of either sign are the same result.
        right = (result == self._expected) | ((result == 0) & (self._expected == 0))
        return Outcome(report, int(np.count_nonzero(~right)))


def beds() -> list[HopperBed]:
    """Every bed."""
    return [
        HopperBed(Product.FORWARD, Sm90Config(128, 128, 6)),
        HopperBed(Product.DRHS, Sm90Config(128, 128, 6)),
    ]
