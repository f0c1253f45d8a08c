"""Wrong arguments: a clear error before anything runs, naming the argument."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_ggemm

LHS, RHS, SIZES = np.ones((6, 3), np.float32), np.ones((2, 3, 4), np.float32), np.array([2, 3], np.int32)

WRONG: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("lhs_rank_1", {"lhs": LHS[0]}, TypeError, r"lhs.*rank 2.*\(3,\)"),
    ("lhs_rank_3", {"lhs": LHS[None]}, TypeError, r"lhs.*rank 2.*\(1, 6, 3\)"),
    ("rhs_rank_2", {"rhs": RHS[0]}, TypeError, r"rhs.*rank 3.*\(3, 4\)"),
    ("rhs_rank_4", {"rhs": RHS[None]}, TypeError, r"rhs.*rank 3"),
    ("sizes_scalar", {"group_sizes": np.int32(6)}, TypeError, r"group_sizes.*rank 1"),
    ("sizes_rank_2", {"group_sizes": SIZES[None]}, TypeError, r"group_sizes.*rank 1.*\(1, 2\)"),
    ("sizes_float", {"group_sizes": SIZES.astype(np.float32)}, TypeError, r"group_sizes.*integer.*float32"),
    ("sizes_bool", {"group_sizes": SIZES > 2}, TypeError, r"group_sizes.*integer.*bool"),
    ("sizes_list", {"group_sizes": [2, 3]}, TypeError, r"group_sizes.*array.*list"),
    ("sizes_tuple", {"group_sizes": (2, 3)}, TypeError, r"group_sizes.*array.*tuple"),
    ("sizes_none", {"group_sizes": None}, TypeError, r"group_sizes.*array.*NoneType"),
    ("lhs_list", {"lhs": [[1.0] * 3]}, TypeError, r"lhs.*array.*list"),
    ("rhs_str", {"rhs": "weights"}, TypeError, r"rhs.*array.*str"),
    ("k", {"lhs": LHS[:, :2]}, TypeError, r"lhs.*k = 2.*rhs.*k = 3"),
    ("k_transposed", {"transpose_rhs": True}, TypeError, r"k = 3.*k = 4.*transpose_rhs"),
    ("g", {"group_sizes": np.array([2, 3, 1])}, TypeError, r"group_sizes.*3.*rhs.*2.*group_offset"),
    ("offset_float", {"group_offset": np.float32(0)}, TypeError, r"group_offset.*integer.*float32"),
    ("offset_python_float", {"group_offset": 1.0}, TypeError, r"group_offset"),
    ("offset_bool", {"group_offset": True}, TypeError, r"group_offset.*integer.*bool"),
    ("offset_shape", {"group_offset": np.array([0, 1])}, TypeError, r"group_offset.*\(1,\).*\(2,\)"),
    ("offset_list", {"group_offset": [0]}, TypeError, r"group_offset.*array.*list"),
    ("bias_shape", {"bias": np.ones((2, 3), np.float32)}, TypeError, r"bias.*\(2, 4\).*\(2, 3\)"),
    ("bias_rank", {"bias": np.ones(4, np.float32)}, TypeError, r"bias.*\(2, 4\).*\(4,\)"),
    ("bias_int", {"bias": np.ones((2, 4), np.int32)}, TypeError, r"bias.*float.*int32"),
    ("implementation", {"implementation": "cuda"}, ValueError, r"implementation.*'cuda'"),
    ("implementation_list", {"implementation": ["cpu"]}, ValueError, r"implementation"),
    ("cute", {"implementation": "cute"}, NotImplementedError, r"cute"),
    ("out_sharding", {"out_sharding": "x"}, NotImplementedError, r"out_sharding.*shard_map"),
    ("pet_64", {"preferred_element_type": np.float64}, ValueError, r"preferred_element_type.*float64.*x64"),
    ("precision", {"precision": "bogus"}, ValueError, r"bogus"),
]


@pytest.mark.parametrize(("change", "error", "match"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_wrong_arguments_are_named_before_anything_runs(
    change: dict[str, Any], error: type[Exception], match: str
) -> None:
    arguments: dict[str, Any] = {"lhs": LHS, "rhs": RHS, "group_sizes": SIZES, **change}
    with pytest.raises(error, match=match):
        jax_ggemm.ragged_dot(**arguments)
    # Abstract values give the same error: nothing has to run for it.
    static = {n: v for n, v in arguments.items() if not isinstance(v, np.ndarray)}
    arrays = {n: v for n, v in arguments.items() if isinstance(v, np.ndarray)}
    with pytest.raises(error, match=match):
        jax.eval_shape(functools.partial(jax_ggemm.ragged_dot, **static), **arrays)


@pytest.mark.parametrize("precision", ["bogus", ("default", "bogus")], ids=str)
def test_an_unknown_precision_is_refused_even_where_nothing_is_multiplied(precision: Any) -> None:
    with pytest.raises(ValueError, match="bogus"):
        jax_ggemm.ragged_dot(np.ones((0, 3), np.float32), RHS, SIZES, precision=precision)


def dims(
    contract: Any = (((1,), (1,)), ((), ())), ragged: Any = (0,), group: Any = (0,)
) -> lax.RaggedDotDimensionNumbers:
    return lax.RaggedDotDimensionNumbers(contract, ragged, group)


WRONG_GENERAL: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("two_ragged", {"numbers": dims(ragged=(0, 1))}, TypeError, r"one ragged"),
    ("no_ragged", {"numbers": dims(ragged=())}, TypeError, r"one ragged"),
    ("ragged_range", {"numbers": dims(ragged=(2,))}, TypeError, r"lhs ragged.*\[0, 2\)"),
    ("no_group", {"numbers": dims(group=())}, TypeError, r"group dimension"),
    ("two_groups", {"numbers": dims(group=(0, 2))}, TypeError, r"group dimension"),
    ("group_contracts", {"numbers": dims(group=(1,))}, TypeError, r"rhs contracting.*group dimensions"),
    ("contract_size", {"numbers": dims((((1,), (2,)), ((), ())))}, TypeError, r"contracting.*lhs.*3.*rhs.*4"),
    ("batch_size", {"numbers": dims((((), ()), ((1,), (2,))))}, TypeError, r"batch.*lhs.*3.*rhs.*4"),
    ("overlap", {"numbers": dims((((1,), (1,)), ((1,), (1,))))}, TypeError, r"lhs contracting.*batch.*distinct"),
    ("duplicate", {"numbers": dims((((1, 1), (1, 1)), ((), ())))}, TypeError, r"distinct"),
    ("uneven", {"numbers": dims((((0, 1), (1,)), ((), ())), group=())}, TypeError, r"contracting"),
    ("g", {"sizes": np.array([1, 2, 3])}, TypeError, r"group_sizes.*3.*2"),
    ("prefix", {"sizes": np.ones((2, 2), np.int32)}, TypeError, r"group_sizes.*\(2, 2\)"),
    ("sizes_float", {"sizes": np.ones(2, np.float32)}, TypeError, r"group_sizes.*float32"),
    ("sizes_scalar", {"sizes": np.int32(2)}, TypeError, r"group_sizes"),
]


@pytest.mark.parametrize(
    ("change", "error", "match"), [w[1:] for w in WRONG_GENERAL], ids=[w[0] for w in WRONG_GENERAL]
)
def test_wrong_arguments_of_the_general_form_are_named(
    change: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        jax_ggemm.ragged_dot_general(LHS, RHS, change.get("sizes", SIZES), change.get("numbers", dims()))


def test_group_offset_of_a_contracting_ragged_dimension_is_refused_by_name() -> None:
    numbers = dims((((0,), (0,)), ((), ())), group=())
    with pytest.raises(NotImplementedError, match="group_offset"):
        jax_ggemm.ragged_dot_general(LHS, np.ones((6, 4), np.float32), SIZES, numbers, group_offset=np.int32(0))


FORWARD_MODE: dict[str, Any] = {
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
    "jit_of_jvp": lambda f, x: jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(x),
    "jvp_of_jit": lambda f, x: jax.jvp(jax.jit(f), (x,), (x,)),
    "jacfwd": lambda f, x: jax.jacfwd(f)(x),
    "hessian": lambda f, x: jax.hessian(lambda x: f(x).sum())(x),
    "linearize": lambda f, x: jax.linearize(f, x)[1](x),
    "jvp_of_vmap": lambda f, x: jax.jvp(jax.vmap(f), (x[None],), (x[None],)),
    "vmap_of_jvp": lambda f, x: jax.vmap(lambda x: jax.jvp(f, (x,), (x,)))(x[None]),
    "jvp_of_grad": lambda f, x: jax.jvp(jax.grad(lambda x: (f(x) ** 2).sum()), (x,), (x,)),
    "jvp_of_scan": lambda f, x: jax.jvp(lambda x: lax.scan(lambda c, _: (c, f(c)), x, None, length=2), (x,), (x,)),
    "jvp_of_remat": lambda f, x: jax.jvp(jax.checkpoint(f), (x,), (x,)),
}


@pytest.mark.parametrize("transform", FORWARD_MODE.values(), ids=FORWARD_MODE.keys())
@pytest.mark.parametrize("operand", ["lhs", "rhs", "bias"])
@pytest.mark.parametrize("implementation", [None, "cpu"])
def test_forward_mode_says_what_would_do(transform: Any, operand: str, implementation: Any) -> None:
    arrays = {"lhs": jnp.asarray(LHS), "rhs": jnp.asarray(RHS), "bias": jnp.ones((2, 4))}
    value = arrays.pop(operand)

    def run(x: jax.Array) -> jax.Array:
        return jax_ggemm.ragged_dot(group_sizes=SIZES, **arrays, **{operand: x}, implementation=implementation)

    with pytest.raises(TypeError, match=r"forward-mode.*implementation='xla'"):
        transform(run, value)


def test_a_tangent_that_is_zero_is_no_forward_mode() -> None:
    """jvp in another variable of a function that also calls the op."""

    def run(x: jax.Array) -> jax.Array:
        return jax_ggemm.ragged_dot(LHS, RHS, SIZES, implementation="cpu").sum() * x

    value, tangent = jax.jvp(jax.jit(run), (2.0,), (1.0,))
    assert (float(value), float(tangent)) == (2 * 60, 60)
