"""Sorting by expert, dispatch and combine, and their gradients, against loops."""

import functools

import jax
import jax.numpy as jnp
import moe_reference as reference
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from jax.test_util import check_grads

from jax_ggemm import permute

cheap_compilation = reference.cheap_compilation

# One compilation a call instead of one an operation.
sort_by_expert = jax.jit(permute.sort_by_expert, static_argnums=1)
dispatch = jax.jit(permute.dispatch)
combine = jax.jit(permute.combine, static_argnums=3)


def random_ids(tokens, k, num_experts, seed=0, foreign=True):
    """Ids of which some are outside [0, num_experts), and token 1 with none inside."""
    ids = np.random.default_rng(seed).integers(-1 if foreign else 0, num_experts + foreign, (tokens, k))
    if foreign and tokens > 1:
        ids[1] = -1
    return ids.astype(np.int32)


@pytest.mark.parametrize(
    ("tokens", "k", "num_experts"), [(7, 2, 3), (40, 4, 16), (5, 16, 1100), (1, 1, 1), (6, 3, 0), (0, 2, 4), (3, 5, 2)]
)
def test_sort_equals_the_reference(tokens, k, num_experts):
    ids = random_ids(tokens, k, num_experts)
    got = sort_by_expert(ids, num_experts)
    order, inverse, counts = reference.sort_by_expert(ids, num_experts)
    np.testing.assert_array_equal(got.order, order)
    np.testing.assert_array_equal(got.inverse, inverse)
    np.testing.assert_array_equal(got.group_sizes, counts)
    assert int(got.num_rows) == counts.sum()
    assert {a.dtype for a in got} == {jnp.dtype("int32")}


def test_foreign_ids_belong_to_no_expert():
    """Reports of unfiltered -1 ids (triton#7150): bincount would put them into bin 0."""
    got = sort_by_expert(jnp.array([[0, -1], [1, 2], [-1, -1], [2, 0]]), 3)
    np.testing.assert_array_equal(got.group_sizes, [2, 1, 2])
    local = sort_by_expert(jnp.array([[0, 1, 2, 3, 3, 5]]) - 2, 2)
    np.testing.assert_array_equal(local.group_sizes, [1, 2])


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "uint32", "int64", "uint64"])
def test_ids_of_any_integer_dtype(dtype):
    values = [[0, 3, 2], [1, 127, 3]] if dtype.startswith("u") else [[0, 3, -1], [1, 127, -128]]
    with jax.enable_x64(dtype.endswith("64")):
        ids = jnp.array(values, dtype)
        for num_experts in (3, 300):
            got = sort_by_expert(ids, num_experts)
            np.testing.assert_array_equal(got.group_sizes, reference.sort_by_expert(values, num_experts)[2])
            assert {a.dtype for a in got} == {jnp.dtype("int32")}
        if dtype.endswith("64"):  # would be expert 1 if it were narrowed before the comparison
            far = sort_by_expert(jnp.array([[2**32 + 1, 1]], dtype), 3)
            np.testing.assert_array_equal(far.group_sizes, [0, 1, 0])


def make(tokens=9, k=3, num_experts=4, width=5, dtype=jnp.float32):
    ids = random_ids(tokens, k, num_experts)
    permutation = sort_by_expert(jnp.asarray(ids), num_experts)
    keys = jax.random.split(jax.random.key(1), 3)
    x = jax.random.normal(keys[0], (tokens, width)).astype(dtype)
    y = jax.random.normal(keys[1], (tokens * k, width)).astype(dtype)
    weights = jax.random.normal(keys[2], (tokens, k)).astype(jnp.promote_types(jnp.float32, dtype))
    return ids, permutation, x, y, weights


def loop_dispatch(x, ids, num_experts):
    order, _, counts = reference.sort_by_expert(ids, num_experts)
    rows = np.zeros((ids.size, x.shape[1]))
    for i in range(counts.sum()):
        rows[i] = np.asarray(x, np.float64)[order[i] // ids.shape[1]]
    return rows


def loop_combine(y, weights, ids, num_experts):
    _, inverse, _ = reference.sort_by_expert(ids, num_experts)
    result = np.zeros((ids.shape[0], y.shape[1]))
    for t, j in np.ndindex(ids.shape):
        if 0 <= ids[t, j] < num_experts:
            result[t] += float(weights[t, j]) * np.asarray(y, np.float64)[inverse[t, j]]
    return result


def test_dispatch_and_combine_equal_loops():
    ids, permutation, x, y, weights = make()
    np.testing.assert_array_equal(dispatch(x, permutation), loop_dispatch(x, ids, 4))
    reference.assert_close(combine(y, weights, permutation), loop_combine(y, weights, ids, 4), 1e-6)


def test_the_way_there_and_back_is_the_identity():
    ids = random_ids(8, 4, 6, foreign=False)
    permutation = sort_by_expert(jnp.asarray(ids), 6)
    x = jax.random.normal(jax.random.key(0), (8, 3))
    np.testing.assert_array_equal(combine(dispatch(x, permutation), jnp.full((8, 4), 0.25), permutation), x)


def test_sums_are_in_float32_and_rounded_once():
    ids, permutation, x, y, weights = make(k=16, dtype=jnp.bfloat16)
    want = loop_combine(y, weights, ids, 4)
    reference.assert_close(combine(y, weights, permutation, jnp.dtype("float32")), want, 1e-5)
    result = combine(y, weights, permutation)
    assert result.dtype == jnp.bfloat16
    rounded = combine(y, weights, permutation, jnp.dtype("float32")).astype(jnp.bfloat16)
    np.testing.assert_array_equal(result.astype(jnp.float32), rounded.astype(jnp.float32))

    rows = y  # as a cotangent of dispatch
    dx = jax.vjp(lambda x: dispatch(x, permutation), x)[1](rows)[0]
    assert dx.dtype == jnp.bfloat16
    exact = loop_combine(rows, np.ones((9, 16)), ids, 4)  # sums of 16 bf16 values: exact in float32 too
    np.testing.assert_array_equal(np.asarray(dx, np.float64), np.asarray(exact.astype(jnp.bfloat16), np.float64))


def test_slots_without_an_expert_are_exactly_zero():
    """transformers#48687: such slots gave the router a gradient. Neither NaN nor Inf may get through."""
    ids, permutation, x, y, weights = make()
    valid = (ids >= 0) & (ids < 4)
    assert valid.any(1).sum() < 9
    assert (valid.any(1) & ~valid.all(1)).any()
    number = int(permutation.num_rows)
    y = y.at[number:].set(jnp.nan)
    weights = jnp.where(valid, weights, jnp.inf)
    result, pullback = jax.vjp(lambda y, w: combine(y, w, permutation), y, weights)
    assert np.isfinite(result).all()
    np.testing.assert_array_equal(result[1], 0)
    dy, dw = pullback(jnp.full_like(result, jnp.inf))
    np.testing.assert_array_equal(dy[number:], 0)
    np.testing.assert_array_equal(dw[~valid], 0)
    assert not np.isfinite(dw[valid]).all()

    x = x.at[1].set(jnp.nan)
    rows, pullback = jax.vjp(lambda x: dispatch(x, permutation), x)
    assert np.isfinite(rows).all()
    dx = pullback(jnp.ones_like(rows).at[number:].set(jnp.nan))[0]
    np.testing.assert_array_equal(dx, np.tile(valid.sum(1, keepdims=True), (1, 5)))


def test_gradients_of_combine_equal_loops():
    ids, permutation, _, y, weights = make()
    ct = jax.random.normal(jax.random.key(7), (9, 5))
    dy, dw = jax.vjp(lambda y, w: combine(y, w, permutation), y, weights)[1](ct)
    _, inverse, _ = reference.sort_by_expert(ids, 4)
    want_dy, want_dw = np.zeros((27, 5)), np.zeros((9, 3))
    for t, j in np.ndindex(9, 3):
        if 0 <= ids[t, j] < 4:
            want_dy[inverse[t, j]] = float(weights[t, j]) * np.asarray(ct, np.float64)[t]
            want_dw[t, j] = np.asarray(ct, np.float64)[t] @ np.asarray(y, np.float64)[inverse[t, j]]
    reference.assert_close(dy, want_dy, 1e-6)
    np.testing.assert_allclose(dw, want_dw, rtol=1e-5, atol=1e-6)


def layer(permutation, x, weights):
    """Something nonlinear in every argument, so that derivatives of every order use every rule."""
    return jnp.sum(combine(jnp.sin(dispatch(x, permutation)), weights**2, permutation) ** 2)


def test_first_and_second_gradients_equal_finite_differences():
    with jax.enable_x64(True):
        _, permutation, x, _, weights = make(tokens=4, k=2, num_experts=3, width=2, dtype=jnp.float64)
        check_grads(jax.jit(functools.partial(layer, permutation)), (x, weights), order=2, modes=["rev"])


def test_gradients_do_not_scatter():
    _, permutation, x, _, weights = make()
    first = jax.grad(functools.partial(layer, permutation), argnums=(0, 1))
    reference.assert_no_scatter_add(first, x, weights)
    second = jax.grad(lambda *a: sum(jnp.sum(g**2) for g in first(*a)), argnums=(0, 1))
    reference.assert_no_scatter_add(second, x, weights)
    reference.assert_no_scatter_add(lambda ids: sort_by_expert(ids, 4), jnp.zeros((6, 2), jnp.int32))


def test_the_check_for_scatters_sees_one():
    with pytest.raises(AssertionError):
        reference.assert_no_scatter_add(jax.grad(lambda x: jnp.sum(jnp.sin(x)[jnp.array([0, 0, 1])] ** 2)), jnp.ones(5))


def test_vmap_remat_and_scan():
    batch = 3
    ids = jnp.asarray(random_ids(batch * 6, 2, 4).reshape(batch, 6, 2))
    x = jax.random.normal(jax.random.key(0), (batch, 6, 5))
    weights = jax.random.normal(jax.random.key(1), (batch, 6, 2))

    def one(ids, x, weights):
        return jax.value_and_grad(functools.partial(layer, sort_by_expert(ids, 4)), argnums=(0, 1))(x, weights)

    def rematerialised(ids, x, weights):
        function = jax.checkpoint(lambda x, w: layer(sort_by_expert(ids, 4), x, w))
        return jax.value_and_grad(function, argnums=(0, 1))(x, weights)

    singly = jax.jit(one)
    want = jax.tree.map(lambda *a: np.stack(a), *[singly(*a) for a in zip(ids, x, weights, strict=True)])
    scanned = jax.lax.scan(lambda c, a: (c, rematerialised(*a)), 0, (ids, x, weights))[1]
    for got in (jax.jit(jax.vmap(one))(ids, x, weights), scanned):
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6), got, want)
    shared = jax.jit(jax.vmap(one, in_axes=(None, 0, None)))(ids[0], x, weights[0])
    np.testing.assert_allclose(shared[0][1], singly(ids[0], x[1], weights[0])[0], rtol=1e-5)


def test_shard_map_with_replicated_tokens():
    """Expert parallelism on replicated tokens: ids differ by device, tokens and weights do not."""
    mesh = jax.make_mesh((2,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    ids, _, x, _, weights = make()

    def local(ids, x, weights):
        ids = ids - 2 * jax.lax.axis_index("expert")
        return jax.lax.psum(layer(sort_by_expert(ids, 2), x, weights), "expert")

    def both(x, weights):
        return sum(layer(sort_by_expert(jnp.asarray(ids) - 2 * i, 2), x, weights) for i in range(2))

    replicated = PartitionSpec()
    sharded = jax.shard_map(local, mesh=mesh, in_specs=(replicated,) * 3, out_specs=replicated)
    got = jax.jit(jax.value_and_grad(sharded, argnums=(1, 2)))(jnp.asarray(ids), x, weights)
    want = jax.jit(jax.value_and_grad(both, argnums=(0, 1)))(x, weights)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, want)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda p: sort_by_expert(jnp.zeros(4, jnp.int32), 2), TypeError, r"ids must be integers .* shape \(4,\)"),
        (lambda p: sort_by_expert(jnp.zeros((4, 1)), 2), TypeError, "ids must be integers .* got float32"),
        (lambda p: sort_by_expert(jnp.zeros((4, 1), bool), 2), TypeError, "ids must be integers .* got bool"),
        (lambda p: sort_by_expert(jnp.zeros((4, 1), int), -1), ValueError, "num_experts must not be negative, got -1"),
        (lambda p: dispatch(jnp.zeros((8, 5)), p), TypeError, r"x must have shape \(9, features\).*\(8, 5\)"),
        (lambda p: dispatch(jnp.zeros((9, 5), int), p), TypeError, "x must be floating, got int"),
        (lambda p: combine(jnp.zeros((9, 5)), jnp.zeros((9, 3)), p), TypeError, r"y must have shape \(27, features\)"),
        (lambda p: combine(jnp.zeros((27, 5)), jnp.zeros((9, 2)), p), TypeError, r"weights must be .*\(9, 3\)"),
        (lambda p: combine(jnp.zeros((27, 5)), jnp.zeros((9, 3), int), p), TypeError, "weights must be floating"),
    ],
)
def test_errors(call, error, message):
    permutation = make()[1]
    with pytest.raises(error, match=message):
        call(permutation)
