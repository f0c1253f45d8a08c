"""Says what to do where forward-mode differentiation meets a reverse-mode rule.

`jax.custom_vjp` has no forward mode, and JAX's own error cannot know that another implementation has
one. The operands of a product pass through an identity whose tangent is a second identity; reverse mode
transposes that one away, and forward mode, which has to evaluate or batch it, gets the error.
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

_operand = Primitive("jax_ggemm_reverse_mode_operand")
_tangent = Primitive("jax_ggemm_reverse_mode_tangent")


def _refuse(*_args: object, **_kwargs: object) -> Any:
    raise TypeError(_MESSAGE)


def _operand_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    (tangent,) = tangents
    return _operand.bind(*primals), tangent if isinstance(tangent, ad.Zero) else _tangent.bind(tangent)


_operand.def_abstract_eval(lambda aval: aval)
_operand.def_impl(lambda operand: operand)
mlir.register_lowering(_operand, lambda _context, operand: [operand])
batching.primitive_batchers[_operand] = lambda operands, axes: (_operand.bind(*operands), *axes)
ad.primitive_jvps[_operand] = _operand_jvp

_tangent.def_abstract_eval(lambda aval: aval)
_tangent.def_impl(_refuse)
mlir.register_lowering(_tangent, _refuse)
batching.primitive_batchers[_tangent] = _refuse
ad.deflinear2(_tangent, lambda cotangent, _operand: [cotangent])


def reverse_mode_only(operand: jax.Array) -> jax.Array:
    """The operand itself; differentiating it in forward mode raises a TypeError that says what would do."""
    return _operand.bind(operand)
