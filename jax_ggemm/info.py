"""Says which implementation a call takes on this machine, and why not the others: `python -m jax_ggemm info`."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_ggemm
from jax_ggemm import arguments, binding, cute, native, objects, tuned
from jax_ggemm.products import Call, Operands, Product
from jax_ggemm.shapes import operand_shapes

_PLATFORMS = {"cute": "gpu", "cpu": "cpu"}
"""Where the programs of an implementation run; the others run anywhere."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """Why each implementation can or cannot take a product here.

    Attributes:
      product: which product.
      refusals: the reason by implementation, best first; None where it can.
    """

    product: Product
    refusals: dict[str, str | None]

    @property
    def taken(self) -> str:
        """The implementation that a call without a name takes; "xla" takes all."""
        return next(name for name, refusal in self.refusals.items() if refusal is None)


def choose(product: Product, m: int, k: int, n: int, groups: int, dtype: np.dtype) -> Choice:
    """Asks every implementation whether it takes a product on this machine's default backend.

    Args:
      product: which product.
      m: rows.
      k: columns of the weights' first axis.
      n: columns of the weights' second axis.
      groups: number of groups.
      dtype: of operands and result.

    Returns:
      The answers.
    """
    lhs, rhs = operand_shapes(product, m, k, n, groups)
    int32 = np.dtype(np.int32)
    arrays: Any = [
        jax.ShapeDtypeStruct(shape, kind)
        for shape, kind in ((lhs, dtype), (rhs, dtype), ((groups,), int32), ((), int32))
    ]
    operands = Operands(*arrays)  # only types are read

    precision = arguments.canonical_precision(None)

    def refusal(name: str) -> str | None:
        try:
            binding.choose(Call(product, dtype, groups, precision, name), operands)
        except NotImplementedError as error:
            return str(error).partition("cannot take this call: ")[2] or str(error)
        platform = _PLATFORMS.get(name, jax.default_backend())
        if platform != jax.default_backend():
            return f"it runs on a {platform}, and the default backend here is {jax.default_backend()}"
        return None

    return Choice(product, {name: refusal(name) for name in binding.NAMES})


def library_problem() -> str | None:
    """Why the compiled library cannot be used here, or None."""
    try:
        native.register()
    except (ImportError, OSError) as error:
        return str(error)
    return None


def machine() -> list[str]:
    """Lines about the devices, the compiled library, the CuTe DSL and what is stored for them."""
    device = jax.devices()[0]
    problem = library_problem()
    runtime = objects.runtime_library()
    compiler = importlib.util.find_spec("cutlass") is not None
    return [
        f"jax_ggemm {jax_ggemm.__version__}, jax {jax.__version__}, {device.platform}: {device.device_kind}",
        f"compiled library: {'loaded' if problem is None else 'missing: ' + problem}",
        f"CuTe DSL runtime: {runtime or 'none; the GPU kernels need it: the extras cuda13 and cuda12 install it'}",
        f"CuTe DSL compiler: {'installed' if compiler else 'none; only compiled kernels can run'}",
        f"compiled kernels: {_files(objects.cache_directory(), '*.o')} in {objects.cache_directory()}, "
        f"{_files(objects.packaged_directory(), '*.o')} in the package",
        f"tuned configurations: {_files(tuned.directory(), '*.json')} in {tuned.directory()}",
    ]


def _files(folder: Path, pattern: str) -> int:
    return sum(1 for _ in folder.glob(pattern))


def report(m: int, k: int, n: int, groups: int, dtype: str) -> str:
    """What `python -m jax_ggemm info` prints.

    Args:
      m: rows.
      k: columns of the weights' first axis.
      n: columns of the weights' second axis.
      groups: number of groups.
      dtype: of operands and results.

    Returns:
      Lines of text.
    """
    kind = np.dtype(jnp.dtype(dtype))
    lines = [*machine(), f"a call of m {m}, k {k}, n {n}, {groups} groups, {dtype}:"]
    usable = library_problem() is None
    for product in Product:
        choice = choose(product, m, k, n, groups, kind)
        if usable or choice.taken == "xla":
            lines.append(f"  {product.value}: takes {choice.taken!r}")
        else:
            lines.append(f'  {product.value}: fails: {choice.taken!r} needs the compiled library; "xla" does not')
        if choice.taken == "cute":
            known = cute.architecture()
            taken = tuned.pick(tuned.Problem(product, kind, kind, m, k, n, groups), known.name)
            how = "picked" if taken == known.pick(product, m, k, n, groups) else "tuned"
            lines.append(f"    {how}: {taken}")
        lines += [f"    not {name!r}: {reason}" for name, reason in choice.refusals.items() if reason is not None]
    return "\n".join(lines)
