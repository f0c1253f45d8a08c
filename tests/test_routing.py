"""The router against a loop over tokens; its statistics, gradients, faults and errors."""

import re

import jax
import jax.numpy as jnp
import moe_reference as reference
import numpy as np
import pytest
from jax.test_util import check_grads

from jax_ggemm import routing
from jax_ggemm.routing import (
    Renormalize,
    Router,
    identity,
    load_balance_loss,
    normalized_sigmoid,
    renormalize,
    update_selection_bias,
)

cheap_compilation = reference.cheap_compilation

# One compilation a call instead of one an operation.
route = jax.jit(routing.route, static_argnums=1)
routing_stats = jax.jit(routing.routing_stats, static_argnums=2)


def sqrt_softplus(logits):
    return jnp.sqrt(jax.nn.softplus(logits))


def share(chosen):
    return chosen / chosen.sum()


# name: (router, experts, with a selection bias, the reference's score and weigh)
ROUTERS = {
    "qwen3": (Router(8), 128, False, reference.softmax, share),
    "qwen3_no_renormalisation": (Router(4, weigh=identity), 32, False, reference.softmax, lambda c: c),
    "mixtral": (Router(2, score=identity, weigh=jax.nn.softmax), 8, False, lambda r: r, reference.softmax),
    "deepseek_v3": (
        Router(8, score=jax.nn.sigmoid, num_groups=8, top_groups=4, scale=2.5),
        64,
        True,
        reference.sigmoid,
        share,
    ),
    "deepseek_v2": (
        Router(3, weigh=identity, num_groups=4, top_groups=2, group_best=1, scale=16.0),
        16,
        False,
        reference.softmax,
        lambda c: c,
    ),
    "groups_of_one": (Router(3, num_groups=6, top_groups=4), 6, False, reference.softmax, share),
    "glm": (Router(8, score=jax.nn.sigmoid, scale=2.5), 160, True, reference.sigmoid, share),
    "deepseek_v4": (
        Router(6, score=sqrt_softplus, scale=1.5),
        48,
        True,
        lambda r: np.sqrt(np.log1p(np.exp(r))),
        share,
    ),
    "kimi_k3": (Router(16, score=jax.nn.sigmoid), 896, True, reference.sigmoid, share),
    "more_than_1024": (Router(16), 1100, False, reference.softmax, share),
    "top_k_is_all": (Router(5), 5, False, reference.softmax, share),
    "one_expert": (Router(1), 1, False, reference.softmax, share),
}


def make(name, tokens=9, seed=0):
    router, num_experts, biased, _, _ = ROUTERS[name]
    keys = jax.random.split(jax.random.key(seed), 2)
    logits = 2 * jax.random.normal(keys[0], (tokens, num_experts))
    return router, logits, 0.3 * jax.random.normal(keys[1], (num_experts,)) if biased else None


def counts_of(ids, num_experts):
    return np.array([(np.asarray(ids) == e).sum() for e in range(num_experts)], np.int32)


@pytest.mark.parametrize("name", ROUTERS)
def test_ids_and_weights_equal_the_reference(name):
    router, logits, bias = make(name)
    score, weigh = ROUTERS[name][3:]
    ids, weights = route(logits, router, selection_bias=bias)
    groups = {"groups": router.num_groups, "top_groups": router.top_groups, "group_best": router.group_best}
    want_ids, want_weights = reference.route(logits, score, weigh, router.top_k, bias, router.scale, **groups)
    assert ids.dtype == jnp.int32
    assert weights.dtype == jnp.float32
    np.testing.assert_array_equal(ids, want_ids)
    reference.assert_close(weights, want_weights, 1e-5)


def test_tiny_scores_keep_their_ratio_under_a_large_bias():
    """flashinfer#3875: sigmoids near 1e-8 recovered as (score + bias) - bias are 0."""
    logits = jnp.array([[-17.0, -18.0, -20.0, -19.0]])
    bias = jnp.array([12.0, 12.1, 11.9, 12.0])
    ids, weights = route(logits, Router(2, score=jax.nn.sigmoid), selection_bias=bias)
    np.testing.assert_array_equal(ids, [[1, 0]])
    np.testing.assert_allclose(weights, [[0.26894, 0.73106]], rtol=1e-4)


def test_groups_are_masked_by_minus_infinity():
    """With negative biased scores a mask of 0 would prefer the experts of the groups left out."""
    router = Router(2, score=jax.nn.sigmoid, num_groups=3, top_groups=1)
    bias = jnp.array([-5.0, -5.0, -3.0, -3.0, -4.0, -4.0])
    ids, _ = route(jnp.zeros((1, 6)), router, selection_bias=bias)
    np.testing.assert_array_equal(ids, [[2, 3]])


def test_the_lower_index_wins_among_equals():
    tied = jnp.array([[1.0, 3.0, 3.0, 1.0, 3.0, 0.0]])
    np.testing.assert_array_equal(route(tied, Router(4)).ids, [[1, 2, 4, 0]])
    np.testing.assert_array_equal(route(jnp.zeros((1, 6)), Router(4)).ids, [[0, 1, 2, 3]])
    zeros = jnp.array([[-0.0, 0.0, -0.0, 0.0, -1.0]])  # equal as numbers, though lax.top_k orders them
    np.testing.assert_array_equal(route(zeros, Router(3, score=identity, weigh=jax.nn.softmax)).ids, [[0, 1, 2]])
    grouped = Router(2, num_groups=3, top_groups=2)
    np.testing.assert_array_equal(route(jnp.zeros((1, 6)), grouped).ids, [[0, 1]])


@pytest.mark.parametrize("name", ["qwen3", "mixtral", "deepseek_v3", "qwen3_no_renormalisation"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("whole_row", [True, False])
def test_nan_logits_stay_in_their_token(name, sign, whole_row):
    router, logits, bias = make(name)
    num_experts = logits.shape[1]
    nan = jnp.copysign(jnp.nan, sign)
    broken = logits.at[4].set(nan) if whole_row else logits.at[4, num_experts - 1].set(nan)
    clean, got = (route(a, router, selection_bias=bias) for a in (logits, broken))
    others = np.arange(len(logits)) != 4
    np.testing.assert_array_equal(got.ids[others], clean.ids[others])
    np.testing.assert_array_equal(got.weights[others], clean.weights[others])
    assert np.isnan(got.weights[4]).all()
    assert len(set(got.ids[4].tolist())) == router.top_k
    assert ((got.ids[4] >= 0) & (got.ids[4] < num_experts)).all()


def test_masked_tokens_count_nowhere():
    router, logits, bias = make("deepseek_v3", tokens=12)
    mask = jnp.arange(12) % 3 != 1
    logits = jnp.where(mask[:, None], logits, jnp.nan)

    def losses(logits, mask):
        ids, weights = route(logits, router, selection_bias=bias, token_mask=mask)
        stats = routing_stats(logits, counts_of(want.ids, 64), router, token_mask=mask)
        return jnp.sum(weights**2) + stats.z_loss + stats.load_balance_loss, (ids, weights, stats)

    kept = logits[np.asarray(mask)]
    want = route(kept, router, selection_bias=bias)
    want_stats = routing_stats(kept, counts_of(want.ids, 64), router)
    gradient, (ids, weights, stats) = jax.jit(jax.grad(losses, has_aux=True))(logits, mask)
    want_gradient, _ = jax.jit(jax.grad(losses, has_aux=True))(kept, None)
    np.testing.assert_array_equal(ids[~mask], 64)
    np.testing.assert_array_equal(weights[~mask], 0)
    np.testing.assert_array_equal(ids[mask], want.ids)
    np.testing.assert_array_equal(weights[mask], want.weights)
    assert int(stats.num_tokens) == 8
    for got, expected in zip(stats, want_stats, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6)
    np.testing.assert_array_equal(gradient[~mask], 0)
    np.testing.assert_allclose(gradient[mask], want_gradient, rtol=1e-5, atol=1e-8)


def test_a_batch_of_padding_alone_is_finite():
    logits, mask = jnp.full((4, 6), jnp.nan), jnp.zeros(4, bool)

    def total(logits):
        stats = routing_stats(logits, jnp.zeros(6, jnp.int32), Router(2), token_mask=mask)
        return stats.load_balance_loss + stats.z_loss + jnp.sum(route(logits, Router(2), token_mask=mask).weights)

    value, gradient = jax.jit(jax.value_and_grad(total))(logits)
    assert value == 0
    np.testing.assert_array_equal(gradient, 0)


def test_statistics_equal_the_definition():
    router, logits, _ = make("qwen3", tokens=20)
    counts = counts_of(route(logits, router).ids, 128)
    stats = routing_stats(logits, counts, router)
    rows = np.asarray(logits, np.float64)
    probabilities = np.mean([reference.softmax(row) for row in rows], axis=0)
    balance = 128 * sum(c / (20 * 8) * p for c, p in zip(np.asarray(counts), probabilities, strict=True))
    np.testing.assert_allclose(stats.mean_probabilities, probabilities, rtol=1e-5)
    np.testing.assert_allclose(stats.load_balance_loss, balance, rtol=1e-5)
    np.testing.assert_allclose(stats.z_loss, np.mean(np.log(np.exp(rows).sum(1)) ** 2), rtol=1e-5)
    np.testing.assert_array_equal(stats.counts, counts)
    assert int(stats.num_tokens) == 20


def test_load_balance_loss_is_one_when_balanced_and_e_when_collapsed():
    assert load_balance_loss(jnp.full(8, 5), jnp.full(8, 0.125)) == 1
    assert load_balance_loss(jnp.array([40, 0, 0, 0]), jnp.array([1.0, 0, 0, 0])) == 4


def test_sigmoid_probabilities_are_normalised_per_token():
    logits = jax.random.normal(jax.random.key(1), (5, 7))
    np.testing.assert_allclose(jnp.sum(normalized_sigmoid(logits), axis=1), 1, rtol=1e-6)
    router = Router(2, score=jax.nn.sigmoid, probabilities=normalized_sigmoid)
    stats = routing_stats(logits, jnp.ones(7, jnp.int32), router)
    expected = np.mean([share(reference.sigmoid(row)) for row in np.asarray(logits, np.float64)], axis=0)
    np.testing.assert_allclose(stats.mean_probabilities, expected, rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_logits_are_routed_in_float32(dtype):
    router, logits, bias = make("deepseek_v3")
    narrow = logits.astype(dtype)
    got, want = (route(a, router, selection_bias=bias) for a in (narrow, narrow.astype(jnp.float32)))
    np.testing.assert_array_equal(got.ids, want.ids)
    np.testing.assert_array_equal(got.weights, want.weights)
    stats = routing_stats(narrow, counts_of(got.ids, 64), router)
    assert {stats.z_loss.dtype, stats.load_balance_loss.dtype, stats.mean_probabilities.dtype} == {jnp.dtype("float32")}


def test_bias_update_moves_towards_balance():
    bias = jnp.array([0.5, 0.0, -0.5, 0.25])
    new = jax.jit(update_selection_bias)(bias, jnp.array([9, 3, 0, 4]), 0.125)
    np.testing.assert_array_equal(new, [0.375, 0.125, -0.375, 0.25])
    assert update_selection_bias(bias.astype(jnp.bfloat16), jnp.array([9, 3, 0, 4]), 0.125).dtype == jnp.bfloat16


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_gradients_equal_finite_differences(name):
    with jax.enable_x64(True):
        router, logits, bias = make(name, tokens=3)
        logits = logits.astype(jnp.float64)
        counts = counts_of(route(logits, router, selection_bias=bias).ids, logits.shape[1])

        def outputs(logits):
            stats = routing_stats(logits, counts, router)
            return route(logits, router, selection_bias=bias).weights, stats.z_loss, stats.load_balance_loss

        check_grads(jax.jit(outputs), (logits,), order=1, modes=["rev"], atol=1e-4, rtol=1e-4)


def test_selection_bias_gets_no_gradient():
    router, logits, bias = make("deepseek_v3")
    gradient = jax.grad(lambda b: jnp.sum(route(logits, router, selection_bias=b).weights ** 2))(bias)
    np.testing.assert_array_equal(gradient, 0)


def test_gradients_do_not_scatter():
    router, logits, bias = make("deepseek_v3")

    def first(logits):
        stats = routing_stats(logits, jnp.ones(64, jnp.int32), router)
        return jnp.sum(route(logits, router, selection_bias=bias).weights ** 2) + stats.load_balance_loss

    reference.assert_no_scatter_add(jax.grad(first), logits)
    reference.assert_no_scatter_add(jax.grad(lambda a: jnp.sum(jax.grad(first)(a) ** 2)), logits)


def test_vmap_equals_a_loop():
    router, logits, bias = make("deepseek_v3", tokens=12)
    batch = logits.reshape(3, 4, 64)
    got = jax.vmap(lambda a: route(a, router, selection_bias=bias))(batch)
    want = route(logits, router, selection_bias=bias)
    np.testing.assert_array_equal(got.ids.reshape(12, -1), want.ids)
    np.testing.assert_allclose(got.weights.reshape(12, -1), want.weights, rtol=1e-6)


def test_equal_routers_share_a_compilation():
    assert Router(2, weigh=Renormalize(1e-9)) == Router(2, weigh=Renormalize(1e-9))
    assert hash(Router(2)) == hash(Router(2, weigh=renormalize))


LOGITS = jax.ShapeDtypeStruct((4, 6), jnp.float32)


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


@pytest.mark.parametrize(
    ("logits", "router", "options", "error", "message"),
    [
        (LOGITS, Router(7), {}, ValueError, "top_k must be at most 6 .* got 7"),
        (LOGITS, Router(3, num_groups=3, top_groups=1), {}, ValueError, "top_k must be at most 2 .* got 3"),
        (LOGITS, Router(1, num_groups=4), {}, ValueError, "num_groups must divide the 6 experts, got 4"),
        (shape(6), Router(1), {}, TypeError, r"logits must have shape \(tokens, experts\), got \(6,\)"),
        (shape(4, 6, dtype=jnp.int32), Router(1), {}, TypeError, "logits must be floating, got int32"),
        (LOGITS, Router(1), {"selection_bias": shape(5)}, TypeError, r"selection_bias must have shape \(6,\).*\(5,\)"),
        (LOGITS, Router(1), {"token_mask": shape(4)}, TypeError, "token_mask must be bool, got float32"),
        (LOGITS, Router(1), {"token_mask": shape(6, dtype=bool)}, TypeError, r"token_mask must have shape \(4,\)"),
        (LOGITS, Router(1, score=lambda x: x[:, :2]), {}, TypeError, r"router.score must return shape \(4, 6\)"),
    ],
)
def test_errors_come_before_anything_runs(logits, router, options, error, message):
    with pytest.raises(error, match=message):
        jax.eval_shape(lambda a, o: route(a, router, **o), logits, options)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"top_k": 0}, ValueError, "top_k must be at least 1, got 0"),
        ({"top_k": -3}, ValueError, "top_k must be at least 1, got -3"),
        ({"top_k": 2.0}, TypeError, "top_k must be an int, got 2.0"),
        ({"top_k": True}, TypeError, "top_k must be an int, got True"),
        ({"top_k": 1, "num_groups": 2, "top_groups": 3}, ValueError, "top_groups must be at most num_groups=2, got 3"),
        ({"top_k": 1, "group_best": 0}, ValueError, "group_best must be at least 1, got 0"),
        ({"top_k": np.bool_(True)}, TypeError, "top_k must be an int, got"),
        ({"top_k": "2"}, TypeError, "top_k must be an int, got '2'"),
        ({"top_k": 1, "score": "softmax"}, TypeError, "score must be a function, e.g. jax.nn.softmax; got 'softmax'"),
        ({"top_k": 1, "weigh": None}, TypeError, "weigh must be a function"),
        ({"top_k": 1, "probabilities": 1}, TypeError, "probabilities must be a function"),
    ],
)
def test_router_rejects_bad_values(arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        Router(**arguments)


def test_router_takes_numpy_integers():
    router = Router(np.int64(2), num_groups=np.int8(3), top_groups=np.uint8(2))
    assert router == Router(2, num_groups=3, top_groups=2)
    assert type(router.top_k) is int


def test_statistics_and_update_reject_sizes_that_do_not_fit():
    with pytest.raises(TypeError, match=r"counts must have shape \(6,\)"):
        routing_stats(jnp.zeros((4, 6)), jnp.zeros(5, jnp.int32), Router(1))
    with pytest.raises(TypeError, match=r"one shape \(E,\), got \(6,\) and \(5,\)"):
        update_selection_bias(jnp.zeros(6), jnp.zeros(5, jnp.int32), 0.1)


def test_scores_that_underflow_have_a_finite_gradient() -> None:
    """A selection bias may choose experts whose softmax is 0: nothing may then become NaN."""
    logits = jnp.asarray([[0.0, -200.0, -200.0], [0.0, -30.0, -200.0], [1.0, 2.0, 3.0]])

    def weights(logits: jax.Array) -> jax.Array:
        return route(logits, Router(2), selection_bias=jnp.asarray([-10.0, 0.0, 0.0])).weights

    value, vjp = jax.vjp(weights, logits)
    (gradient,) = vjp(jnp.ones_like(value) * jnp.asarray([1.0, 2.0]))
    assert np.isfinite(gradient).all()
    np.testing.assert_array_equal(value[0], 0.0)
    np.testing.assert_allclose(value[1:].sum(axis=1), 1.0, rtol=1e-6)


def test_renormalised_weights_are_differentiable_twice() -> None:
    scores = jnp.asarray([0.2, 0.3, 0.1])

    def plain(s: jax.Array) -> jax.Array:
        return s / (s.sum() + 0.05)

    def ours(s: jax.Array) -> jax.Array:
        return Renormalize(0.05)(s)

    np.testing.assert_allclose(jax.jacrev(ours)(scores), jax.jacrev(plain)(scores), rtol=1e-5)
    twice = jax.jacrev(jax.jacrev(ours))(scores), jax.jacrev(jax.jacrev(plain))(scores)
    np.testing.assert_allclose(*twice, rtol=1e-5)
