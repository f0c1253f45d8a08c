"""Grouped kernels of any architecture as test beds for mutations."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import oracle
from ptx_emulator import Checks, Memory, kernels
from ptx_emulator.memory import empty

from jax_ggemm.kernel.config import KernelSpec
from jax_ggemm.products import Product
from ptx_mutations.harness import Outcome
from ptx_mutations.kernel_text import KernelText
from ptx_mutations.mutation import Mutation, Mutations

_BF16 = np.dtype(ml_dtypes.bfloat16)


@dataclasses.dataclass(frozen=True)
class Problem:
    """A call: whole tiles and ragged ones, more tiles per block than the ring has slots, more steps than stages."""

    product: Product
    m: int = 420
    k: int = 200
    n: int = 136
    sizes: tuple[int, ...] = (256, 0, 40, 1, 100)
    blocks: int = 2
    resident: int = 2
    """Clusters that run at a time."""
    note: str = ""
    """What sets it apart from another one of the same kernel."""

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of lhs, rhs and the result."""
        m, k, n, g = self.m, self.k, self.n, len(self.sizes)
        return {
            Product.FORWARD: ((m, k), (g, k, n), (m, n)),
            Product.DLHS: ((m, n), (g, k, n), (m, k)),
            Product.DRHS: ((m, k), (m, n), (g, k, n)),
        }[self.product]


class GroupedBed:
    """One kernel on one problem, with small integers for operands: every sum is exact, so that results are known.

    Args:
      problem: what is computed.
      config: how.
      arch: the architecture.
      text: makes an editable text of PTX and configuration.
      mutations: lists of them, of which those are taken that name this bed.
    """

    def __init__(
        self,
        problem: Problem,
        config: Any,
        arch: str,
        text: Callable[[str, Any], KernelText],
        mutations: Sequence[Mutations[Any]],
    ):
        self.spec = KernelSpec(problem.product, _BF16, _BF16, False, config)
        self.problem = problem
        pair = " pair" if config.cluster > 1 else ""
        note = problem.note and f" {problem.note}"
        self.name = f"{arch} {problem.product.value} {config.tile_m}x{config.tile_n}{pair}{note}"
        self.mutations: Sequence[Mutation[Any]] = [m for of in mutations for m in of.all if self.name in m.beds]
        self._arch = arch
        self._text = text

    @functools.cached_property
    def _kernel(self) -> kernels.CompiledKernel:
        return kernels.compiled(self.spec, self._arch)

    @functools.cached_property
    def _arrays(self) -> dict[str, np.ndarray]:
        """The operands, each with a batch axis."""
        rng = np.random.default_rng(1)
        shapes = self.problem.shapes()
        arrays = {name: empty((1, *shape), _BF16) for name, shape in zip(("lhs", "rhs"), shapes, strict=False)}
        for array in arrays.values():
            array[...] = rng.integers(-3, 4, array.shape)
        integers = np.dtype(np.int32)
        arrays["group_sizes"] = empty((1, len(self.problem.sizes)), integers)
        arrays["group_sizes"][...] = self.problem.sizes
        arrays["group_offset"] = empty((1,), integers)
        arrays["group_offset"][...] = 0
        return arrays

    @functools.cached_property
    def _expected(self) -> np.ndarray:
        lhs, rhs = self._arrays["lhs"][0], self._arrays["rhs"][0]
        sizes = self.problem.sizes
        product = {Product.FORWARD: oracle.forward, Product.DLHS: oracle.d_lhs}.get(self.problem.product)
        expected = product(lhs, rhs, sizes) if product else oracle.d_rhs(lhs, rhs, sizes, len(sizes))
        return expected.value.astype(np.float32).astype(_BF16)

    def text(self) -> KernelText:
        """The kernel's PTX."""
        return self._text(self._kernel.ptx, self.spec.config)

    def run(self, ptx: str, seed: int, races: bool = True) -> Outcome:
        """Runs an edited text."""
        memory, result = Memory(), empty((1, *self._expected.shape), _BF16)
        for name, array in self._arrays.items():
            memory.add(name, array)
        memory.add("result", result, writable=True, initialised=False)
        arguments = kernels.arguments(self.spec, self._arrays, result, self.problem.blocks)
        checks = Checks(races=races, resident_clusters=self.problem.resident)
        _, report = self._kernel.launch(arguments, memory, ptx=ptx, seed=seed, checks=checks, raises=False)
        # Zeros of either sign are the same result; what was never written is NaN.
        return Outcome(report, int(np.count_nonzero(result[0] != self._expected)))
