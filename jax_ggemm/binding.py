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


_impossible = Primitive("jax_ggemm_impossible")
_impossible.def_abstract_eval(lambda lhs, *, result, message: lhs.update(weak_type=False, **dict(result)))


@functools.partial(mlir.register_lowering, _impossible)
def _refuse(_context: mlir.LoweringRuleContext, *_operands: Any, result: Any, message: str) -> Any:
    del result
    raise NotImplementedError(message)


def _refused(message: str, call: Call, operands: Operands) -> jax.Array:
    """Stands where a product cannot be had; refuses to be lowered, so that one which is not used does no harm."""
    result = (("shape", operands.out_shape(call)), ("dtype", call.out_dtype))
    return _impossible.bind(operands.lhs, result=result, message=message)


def _only_on(platform: str, call: Call, operands: Operands) -> jax.Array:
    """A product by name, in a program for another platform."""
    message = (
        f"implementation={call.implementation!r} runs on the {platform} platform, and this program is for another "
        "one; implementation=None takes what each platform has"
    )
    return _refused(message, call, operands)


def _unsupported(reason: str, call: Call, operands: Operands) -> jax.Array:
    """A product that the implementation named for another one cannot take: a gradient of it, or a vmap."""
    message = (
        f"implementation={call.implementation!r} cannot take the {call.product.value} product of this program, a "
        f"gradient or a vmap of the call that named it: {reason}; implementation=None takes what can"
    )
    return _refused(message, call, operands)


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
            # `choose` saw the call itself, and not its gradients and batches.
            reason = cute.unsupported(call, operands)
            if reason is not None:
                return _unsupported(reason, call, operands)
            return lax.platform_dependent(operands, cuda=run_cuda, default=functools.partial(_only_on, "cuda", call))
        case "cpu":
            return lax.platform_dependent(operands, cpu=run_cpu, default=functools.partial(_only_on, "cpu", call))
        case str() as name:
            raise ValueError(f"no custom call for implementation {name!r}")
        case implementation:
            reason = implementation.unsupported(call, operands)
            return implementation(call, operands) if reason is None else _unsupported(reason, call, operands)
