"""Chooses the implementation of a grouped product and runs it.

Only this module and the modules of the implementations know about custom calls and platforms; what
is above sees a function of arrays.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jax_ggemm import cpu, cute, xla
from jax_ggemm.products import Call, Implementation, Operands

NAMES = ("cute", "cpu", "xla")
"""The names that `implementation=` takes, best first."""


def choose(call: Call, operands: Operands) -> Call:
    """The call with its implementation decided, as far as that can be done before the platform is known.

    Args:
      call: with the `implementation` that the user asked for.
      operands: without batch axes; only their types are read.

    Returns:
      The call with "xla" where only that takes it; with None where the platform decides at lowering.

    Raises:
      ValueError: for an unknown name.
      NotImplementedError: where the implementation cannot take the call.
    """
    reason: str | None
    match call.implementation:
        case None:
            if cpu.unsupported(call, operands) is not None:
                return choose(dataclasses.replace(call, implementation="xla"), operands)
            return call
        case "cute":
            reason = cute.unsupported(call, operands)
        case "cpu":
            reason = cpu.unsupported(call, operands)
        case "xla":
            reason = xla.unsupported(call, operands)
        case Implementation() as implementation:
            reason = implementation.unsupported(call, operands)
        case other:
            raise ValueError(f"implementation must be one of {NAMES}, None or an Implementation; got {other!r}")
    if reason is not None:
        raise NotImplementedError(f"implementation={call.implementation!r} cannot take this call: {reason}")
    return call


_wrong_platform = Primitive("jax_ggemm_wrong_platform")
_wrong_platform.def_abstract_eval(lambda lhs, *, result, only: lhs.update(weak_type=False, **dict(result)))


@functools.partial(mlir.register_lowering, _wrong_platform)
def _refuse(_context: mlir.LoweringRuleContext, *_operands: Any, result: Any, only: str) -> Any:
    del result
    raise NotImplementedError(
        f"implementation={only!r} runs on the {only} platform, and this program is for another one; "
        "implementation=None takes what each platform has"
    )


def _only_on(platform: str, call: Call, operands: Operands) -> jax.Array:
    """Stands where a program for another platform than this one has no implementation; refuses to be lowered."""
    result = (("shape", operands.out_shape(call)), ("dtype", call.out_dtype))
    return _wrong_platform.bind(operands.lhs, result=result, only=platform)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def grouped_product(call: Call, operands: Operands) -> jax.Array:
    """Runs one grouped product on the call's implementation.

    Args:
      call: the product, as `choose` returned it.
      operands: its arrays, with or without batch axes.

    Returns:
      The result, with the full batch axes in front.
    """
    run_cpu = functools.partial(cpu.grouped_product, call)
    run_cuda = functools.partial(cute.grouped_product, call)
    match call.implementation:
        case None:
            # Left out where it could not run: every branch is traced, and a machine without a GPU need not know.
            on_gpu = {"cuda": run_cuda} if cute.unsupported(call, operands) is None else {}
            run_xla = functools.partial(xla.grouped_product, call)
            return lax.platform_dependent(operands, cpu=run_cpu, default=run_xla, **on_gpu)
        case "cute":
            # The gradients of a call that was found supported may be products that are not: those are plain JAX.
            return lax.platform_dependent(operands, cuda=run_cuda, default=functools.partial(_only_on, "cuda", call))
        case "cpu":
            return lax.platform_dependent(operands, cpu=run_cpu, default=functools.partial(_only_on, "cpu", call))
        case str() as name:
            raise ValueError(f"no custom call for implementation {name!r}")
        case implementation:
            return implementation(call, operands)
