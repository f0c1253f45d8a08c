"""shard_map on four devices, or the GPUs there are: types, gradients of replicated weights, expert parallelism."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from test_ragged_dot import normal

import jax_ggemm

D, M, K, N, G = min(4, jax.device_count()), 6, 5, 7, 3
SIZES = np.array([[3, 0, 2], [0, 6, 0], [1, 1, 9], [0, 0, 0]], np.int32)[:D]
"""The group sizes of each device's own rows."""


@pytest.fixture
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:D]), ("x",))


@pytest.fixture
def operands() -> tuple[jax.Array, jax.Array, jax.Array]:
    return normal((D * M, K)), normal((G, K, N)), normal((D * M, N))


def local(function: Any) -> np.ndarray:
    return np.concatenate([function(slice(d * M, (d + 1) * M), SIZES[d]) for d in range(D)])


def check_rows(got: Any, operands: Any) -> None:
    lhs, rhs, _ = operands
    for d in range(D):
        rows = slice(d * M, (d + 1) * M)
        oracle.assert_close(got[rows], oracle.forward(lhs[rows], rhs, SIZES[d]), SIZES[d])


@pytest.mark.parametrize("check_vma", [True, False])
def test_each_device_multiplies_its_own_rows(ragged_dot: Any, mesh: Mesh, operands: Any, check_vma: bool) -> None:
    run = jax.shard_map(ragged_dot, mesh=mesh, in_specs=(P("x"), P(), P("x")), out_specs=P("x"), check_vma=check_vma)
    check_rows(jax.jit(run)(*operands[:2], SIZES.reshape(-1)), operands)


VARYING = [
    (P("x"), P(), P()),
    (P(), P("x"), P()),
    (P(), P(), P("x")),
    (P("x"), P("x"), P("x")),
]


@pytest.mark.parametrize("specs", VARYING, ids=str)
def test_a_varying_result_may_not_leave_as_a_replicated_one(ragged_dot: Any, mesh: Mesh, specs: Any) -> None:
    shapes = [(D * M, K), (D * G, K, N), (D * G,)]
    arrays = [
        jnp.zeros(shape if spec else (shape[0] // D, *shape[1:]), jnp.int32 if len(shape) == 1 else jnp.float32)
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    run = functools.partial(jax.shard_map, ragged_dot, mesh=mesh, in_specs=specs)
    with pytest.raises(ValueError, match=r"replicat|vary|out_specs"):
        jax.eval_shape(run(out_specs=P()), *arrays)
    jax.eval_shape(run(out_specs=P("x")), *arrays)


def test_a_replicated_result_leaves_as_one(ragged_dot: Any, mesh: Mesh, operands: Any) -> None:
    lhs, rhs, _ = operands
    run = jax.shard_map(ragged_dot, mesh=mesh, in_specs=P(), out_specs=P())
    oracle.assert_close(jax.jit(run)(lhs, rhs, SIZES[0]), oracle.forward(lhs, rhs, SIZES[0]), SIZES[0])


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("grad_inside", [True, False])
def test_gradients_of_replicated_weights_are_summed_once(
    ragged_dot: Any, mesh: Mesh, operands: Any, check_vma: bool, grad_inside: bool
) -> None:
    lhs, rhs, ct = operands
    bias = normal((G, N))

    def loss(lhs: Any, rhs: Any, bias: Any, sizes: Any, ct: Any) -> jax.Array:
        return jnp.sum(ragged_dot(lhs, rhs, sizes, bias=bias) * ct)

    specs = (P("x"), P(), P(), P("x"), P("x"))
    shard = functools.partial(jax.shard_map, mesh=mesh, in_specs=specs, check_vma=check_vma)
    if grad_inside:

        def inside(*arrays: Any) -> Any:
            d_lhs, d_rhs, d_bias = jax.grad(loss, (0, 1, 2))(*arrays)
            # With check_vma, JAX sums gradients of replicated arrays; without, that is up to the user.
            return (d_lhs, d_rhs, d_bias) if check_vma else (d_lhs, *jax.lax.psum((d_rhs, d_bias), "x"))

        run = shard(inside, out_specs=(P("x"), P(), P()))
    else:
        total = shard(lambda *arrays: jax.lax.psum(loss(*arrays), "x"), out_specs=P())
        run = jax.grad(total, (0, 1, 2))
    d_lhs, d_rhs, d_bias = jax.jit(run)(lhs, rhs, bias, SIZES.reshape(-1), ct)
    want_rhs, want_bias = 0.0, 0.0
    for d in range(D):
        rows = slice(d * M, (d + 1) * M)
        oracle.assert_close(d_lhs[rows], oracle.d_lhs(ct[rows], rhs, SIZES[d]), SIZES[d])
        want_rhs += oracle.d_rhs(lhs[rows], ct[rows], SIZES[d], G).value
        want_bias += oracle.d_bias(ct[rows], SIZES[d], G).value
    np.testing.assert_allclose(d_rhs, want_rhs, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(d_bias, want_bias, rtol=1e-5, atol=1e-5)


def test_sharded_weights_and_replicated_rows_get_their_gradients(ragged_dot: Any, mesh: Mesh) -> None:
    lhs, rhs, sizes = normal((M, K)), normal((D * G, K, N)), np.array([2, 1, 2], np.int32)
    run = jax.shard_map(
        lambda x, w, s: ragged_dot(x, w, s)[None], mesh=mesh, in_specs=(P(), P("x"), P()), out_specs=P("x")
    )
    ct = normal((D, M, N))
    d_lhs, d_rhs = jax.jit(jax.grad(lambda x, w: jnp.sum(run(x, w, sizes) * ct), (0, 1)))(lhs, rhs)
    parts = [(rhs[d * G : (d + 1) * G], ct[d]) for d in range(D)]
    np.testing.assert_allclose(d_lhs, sum(oracle.d_lhs(c, r, sizes).value for r, c in parts), rtol=1e-4, atol=1e-4)
    for d, (_, c) in enumerate(parts):
        oracle.assert_close(d_rhs[d * G : (d + 1) * G], oracle.d_rhs(lhs, c, sizes, G))


@pytest.mark.parametrize("check_vma", [True, False])
def test_expert_parallel_by_hand_with_a_group_offset_from_axis_index(
    ragged_dot: Any, mesh: Mesh, check_vma: bool
) -> None:
    """Each device holds two of eight experts and sees all rows; the results are summed over devices."""
    sizes = np.array([3, 0, 5, 1, 4, 0, 0, 6], np.int32)  # 8 experts, 2 to each of 4 devices
    lhs, rhs, ct = normal((22, K)), normal((8, K, N)), normal((22, N))

    def layer(lhs: Any, rhs: Any, sizes: Any) -> jax.Array:
        offset = jax.lax.axis_index("x") * rhs.shape[0]
        return jax.lax.psum(ragged_dot(lhs, rhs, sizes, group_offset=offset), "x")

    run = jax.shard_map(layer, mesh=mesh, in_specs=(P(), P("x"), P()), out_specs=P(), check_vma=check_vma)
    oracle.assert_close(jax.jit(run)(lhs, rhs, sizes), oracle.forward(lhs, rhs, sizes), sizes)
    d_lhs, d_rhs = jax.jit(jax.grad(lambda x, w: jnp.sum(run(x, w, sizes) * ct), (0, 1)))(lhs, rhs)
    oracle.assert_close(d_lhs, oracle.d_lhs(ct, rhs, sizes), sizes)
    oracle.assert_close(d_rhs, oracle.d_rhs(lhs, ct, sizes, 8))


def test_vmap_inside_shard_map(ragged_dot: Any, mesh: Mesh, operands: Any) -> None:
    lhs, rhs, _ = operands
    run = jax.shard_map(jax.vmap(ragged_dot, (0, None, 0)), mesh=mesh, in_specs=(P("x"), P(), P("x")), out_specs=P("x"))
    got = jax.jit(run)(lhs.reshape(D, M, K), rhs, SIZES)
    check_rows(got.reshape(D * M, N), operands)


def test_second_derivatives_inside_shard_map(ragged_dot: Any, mesh: Mesh, operands: Any) -> None:
    lhs, rhs, _ = operands

    def penalty(op: Any) -> Any:
        first = jax.grad(lambda x, w, s: jnp.sum(jnp.sin(op(x, w, s))), 0)
        return lambda x, w, s: jnp.sum(first(x, w, s) ** 2)

    sharded = jax.shard_map(
        lambda *a: jax.lax.psum(penalty(ragged_dot)(*a), "x"),
        mesh=mesh,
        in_specs=(P("x"), P(), P("x")),
        out_specs=P(),
    )
    got = jax.jit(jax.grad(sharded, 1))(lhs, rhs, SIZES.reshape(-1))
    one = jax.jit(jax.grad(penalty(ragged_dot), 1))
    want = sum(one(lhs[d * M : (d + 1) * M], rhs, SIZES[d]) for d in range(D))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_a_local_call_needs_no_collective(ragged_dot: Any, mesh: Mesh, operands: Any) -> None:
    lhs, rhs, _ = operands
    run = jax.jit(jax.shard_map(ragged_dot, mesh=mesh, in_specs=(P("x"), P(), P("x")), out_specs=P("x")))
    text = run.lower(lhs, rhs, SIZES.reshape(-1)).compile().as_text()
    assert not any(name in text for name in ("all-gather", "all-reduce", "all-to-all", "collective-permute"))


def test_operands_sharded_under_plain_jit_give_the_right_result(ragged_dot: Any, mesh: Mesh, operands: Any) -> None:
    lhs, rhs, _ = operands
    sizes = np.array([3, 10, 9], np.int32)
    sharded = jax.device_put(lhs, NamedSharding(mesh, P("x"))), jax.device_put(rhs, NamedSharding(mesh, P(None, None)))
    got = jax.jit(ragged_dot)(*sharded, sizes)
    oracle.assert_close(got, oracle.forward(lhs, rhs, sizes), sizes)


def test_vmap_over_a_mesh_axis_by_name(ragged_dot: Any, mesh: Mesh, operands: Any) -> None:
    """MaxText's pipeline maps its stages with `spmd_axis_name`."""
    lhs, rhs, _ = operands
    with jax.set_mesh(jax.make_mesh((D,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))):
        run = jax.jit(jax.vmap(ragged_dot, (0, None, 0), spmd_axis_name="x"))
        got = run(lhs.reshape(D, M, K), rhs, SIZES)
    check_rows(got.reshape(D * M, N), operands)


def test_arrays_on_explicit_mesh_axes_are_refused_by_name(mesh: Mesh) -> None:
    explicit = jax.make_mesh((D,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(explicit):
        lhs = jax.device_put(jnp.ones((8, 3)), NamedSharding(explicit, P("x")))
        with pytest.raises(NotImplementedError, match=r"lhs.*shard_map"):
            jax_ggemm.ragged_dot(lhs, jnp.ones((2, 3, 4)), jnp.array([4, 4]))


@pytest.mark.parametrize("implementation", [None, "cpu", "xla"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_devices_without_rows(mesh: Mesh, implementation: Any, with_bias: bool) -> None:
    """No rows at all: results and gradients have the types of those with rows.

    Traced only: the compiler of jaxlib 0.11.2 fails on any shard_map over an array without rows.
    """

    def layer(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, bias: jax.Array) -> jax.Array:
        op = functools.partial(jax_ggemm.ragged_dot, implementation=implementation)
        return op(lhs, rhs, sizes, bias=bias if with_bias else None)

    run = jax.shard_map(layer, mesh=mesh, in_specs=(P("x"), P(), P("x"), P()), out_specs=P("x"))
    lhs, rhs, bias = jnp.zeros((0, K)), normal((G, K, N)), normal((G, N))
    sizes = jnp.ones(D * G, jnp.int32)
    gradient = jax.grad(lambda lhs, rhs, bias: jnp.sum(run(lhs, rhs, sizes, bias)), (0, 1, 2))
    shapes = [like.shape for like in jax.eval_shape(gradient, lhs, rhs, bias)]
    assert shapes == [lhs.shape, rhs.shape, bias.shape]
