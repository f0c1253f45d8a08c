"""The bare op under jit over a mesh, with operands split in every way: right, and nothing large is gathered."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from collective_count import collectives
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_ragged_dot import normal

import jax_ggemm

M, K, N, G = 16, 8, 12, 4
SIZES = [np.array(s, np.int32) for s in ([3, 0, 7, 4], [0, 0, 0, 0], [-5, 9, 2, 30], [16, 0, 0, 0], [0, 0, 0, 16])]

# lhs, rhs, bias, and result (and its cotangent)
SPLITS = {
    "rows": (P("x"), P(), P(), P("x")),
    "rows over two axes": (P(("x", "y")), P(), P(), P(("x", "y"))),
    "groups": (P(), P("x"), P("x"), P()),
    "groups over two axes": (P(), P(("y", "x")), P(("y", "x")), P()),
    "rows and groups": (P("x"), P("y"), P("y"), P("x")),
    "n": (P(), P(None, None, "x"), P(None, "x"), P(None, "x")),
    "k": (P(None, "x"), P(None, "x"), P(), P()),
    "rows and k": (P("x", "y"), P(None, "y"), P(), P("x")),
    "rows, with groups and n on the other axis": (P("x"), P("y"), P("y"), P("x", "y")),
    "tokens over data and experts, experts": (P(("x", "y")), P("y"), P("y"), P(("x", "y"))),
    "weights stored over the axes of rows": (P(("x", "y")), P(None, ("x", "y")), P(), P(("x", "y"))),
}
SENT = {
    "rows, with groups and n on the other axis": {"all-gather": {(M // 2, N // 2)}},
    "tokens over data and experts, experts": {
        "all-gather": {(M // 4, K), (M // 4, N)},
        "all-reduce": {(G // 2, K, N), (G // 2, 1, N)},  # the gradients of weights and biases, over data
        "reduce-scatter": {(M // 2, N), (M // 2, K)},
    },
    "weights stored over the axes of rows": {  # FSDP
        "all-gather": {(G, K // 4, N)},
        "all-reduce": {(G, 1, N)},
        "reduce-scatter": {(G, K, N)},
    },
}
"""The parts that are sent, where something is gathered."""


@pytest.fixture
def mesh() -> Any:
    return jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])


def everything(lhs: Any, rhs: Any, bias: Any, cotangent: Any, sizes: Any) -> Any:
    """The result and the gradients of lhs, rhs and bias."""
    y, pull = jax.vjp(lambda *operands: jax_ggemm.ragged_dot(*operands[:2], sizes, bias=operands[2]), lhs, rhs, bias)
    return (y, *pull(cotangent))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("split", SPLITS)
def test_split_operands_give_the_right_results_without_gathering(mesh: Any, split: str, dtype: Any) -> None:
    lhs, rhs, bias, cotangent = (normal(shape).astype(dtype) for shape in ((M, K), (G, K, N), (G, N), (M, N)))
    specs = SPLITS[split]
    arrays = [
        jax.device_put(a, NamedSharding(mesh, spec))
        for a, spec in zip((lhs, rhs, bias, cotangent), (*specs[:3], specs[3]), strict=True)
    ]
    wanted = tuple(NamedSharding(mesh, spec) for spec in (specs[3], *specs[:3]))
    program = jax.jit(everything, out_shardings=wanted).lower(*arrays, SIZES[0]).compile()
    for sizes in SIZES:
        y, d_lhs, d_rhs, d_bias = program(*arrays, sizes)
        oracle.assert_close(y, oracle.forward(lhs, rhs, sizes, bias=bias), sizes)
        oracle.assert_close(d_lhs, oracle.d_lhs(cotangent, rhs, sizes), sizes)
        oracle.assert_close(d_rhs, oracle.d_rhs(lhs, cotangent, sizes, G))
        oracle.assert_close(d_bias, oracle.d_bias(cotangent, sizes, G))
    found = collectives(program.as_text())
    assert "jax_ggemm" in program.as_text()
    for name, shapes in SENT.get(split, {"all-gather": set()}).items():
        assert {shape for c in found if c.name == name for shape in c.shapes} == shapes
    assert {c.name for c in found} <= {"all-gather", "all-reduce", "reduce-scatter"}


def test_weights_and_rows_on_one_axis_gather_rows_and_scatter_results(mesh: Any) -> None:
    split = NamedSharding(mesh, P("x"))
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=split) for shape in ((M, K), (G, K, N))]
    run = jax.jit(lambda lhs, rhs: jax_ggemm.ragged_dot(lhs, rhs, jnp.asarray(SIZES[0])), out_shardings=split)
    found = collectives(run.lower(*shapes).compile().as_text())
    assert sorted((c.name, c.shapes) for c in found) == [("all-gather", ((M // 2, K),)), ("reduce-scatter", ((M, N),))]


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_a_group_offset_with_split_groups(mesh: Any, offset: int) -> None:
    """rhs holds two of the groups, one on each device of an axis."""
    lhs, rhs, sizes = normal((M, K)), normal((2, K, N)), SIZES[0]
    held = jax.device_put(rhs, NamedSharding(mesh, P("y")))
    rows = jax.device_put(lhs, NamedSharding(mesh, P("x")))
    got = jax.jit(jax_ggemm.ragged_dot)(rows, held, sizes, group_offset=offset)
    oracle.assert_close(got, oracle.forward(lhs, rhs, sizes, offset), sizes)


@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P(None, None, "x"), P("x", "y")], ids=str)
def test_split_under_vmap(mesh: Any, spec: Any) -> None:
    lhs, rhs, sizes = normal((4, M, K)), normal((G, K, N)), np.stack(SIZES[:4])
    run = jax.jit(jax.vmap(jax_ggemm.ragged_dot, (0, None, 0)))
    got = run(jax.device_put(lhs, NamedSharding(mesh, spec)), rhs, sizes)
    for i in range(4):
        oracle.assert_close(got[i], oracle.forward(lhs[i], rhs, sizes[i]), sizes[i])


@pytest.mark.parametrize("shape", [(15, K, N, G), (M, 7, 5, 3)])
def test_dimensions_that_a_mesh_axis_does_not_divide(mesh: Any, shape: Any) -> None:
    m, k, n, g = shape
    lhs, rhs, sizes = normal((m, k)), normal((g, k, n)), SIZES[0][:g]

    def padded(lhs: Any, rhs: Any) -> Any:
        lhs = jax.lax.with_sharding_constraint(lhs, NamedSharding(mesh, P("x", "y")))
        rhs = jax.lax.with_sharding_constraint(rhs, NamedSharding(mesh, P("x", "y")))
        return jax_ggemm.ragged_dot(lhs, rhs, sizes)

    oracle.assert_close(jax.jit(padded)(lhs, rhs), oracle.forward(lhs, rhs, sizes), sizes)


def test_a_program_for_one_device_holds_no_partitioning() -> None:
    """JAX's persistent compilation cache does not keep programs with custom partitioning."""
    text = jax.jit(jax_ggemm.ragged_dot).lower(normal((M, K)), normal((G, K, N)), SIZES[0]).as_text()
    assert "CustomSPMDPartitioning" not in text
    assert "jax_ggemm" in text
