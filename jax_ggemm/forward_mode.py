"""Says what to do where forward-mode differentiation meets a reverse-mode rule.

`jax.custom_vjp` has no forward mode, and JAX's own error cannot know that another implementation has
one. The operands of a product pass through an identity whose tangent is a second identity; reverse mode
transposes that one away, and forward mode, which has to evaluate it, gets the error.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

_MESSAGE = (
    "this grouped product has no forward-mode derivative (jvp, linearize, jacfwd, hessian): "
    "pass implementation='xla', which is differentiable in every mode, or use reverse mode (grad, vjp, jacrev)"
)

_operand = Primitive("reverse_mode_operand")
_tangent = Primitive("reverse_mode_tangent")


def _refuse(*_args: object, **_kwargs: object) -> Any:
    raise TypeError(_MESSAGE)


for _primitive in (_operand, _tangent):
    _primitive.def_abstract_eval(lambda aval: aval)
    batching.primitive_batchers[_primitive] = lambda args, dims, *, _p=_primitive: (_p.bind(*args), dims[0])
    ad.deflinear2(_primitive, lambda cotangent, _operand: [cotangent])
ad.primitive_jvps[_operand] = lambda primals, tangents: (
    _operand.bind(*primals),
    tangents[0] if isinstance(tangents[0], ad.Zero) else _tangent.bind(*tangents),
)
_operand.def_impl(lambda operand: operand)
_tangent.def_impl(_refuse)
mlir.register_lowering(_operand, lambda _context, operand: [operand])
mlir.register_lowering(_tangent, _refuse)


def reverse_mode_only(operand: jax.Array) -> jax.Array:
    """The operand itself; differentiating it in forward mode raises a TypeError that says what would do."""
    return _operand.bind(operand)
