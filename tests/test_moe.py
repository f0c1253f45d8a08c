"""The functional layer against the loops of `moe_reference`: models, padding, faults, gradients, transformations."""

import functools

import jax
import jax.numpy as jnp
import moe_reference as reference
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from jax.test_util import check_grads

from jax_ggemm import moe_layer as module
from jax_ggemm.experts import ExpertOptions, SharedParams, clamped_swiglu, geglu_tanh
from jax_ggemm.layouts import GPT_OSS, HF_LINEAR, ExpertLayout, ExpertParams, convert
from jax_ggemm.moe_layer import MoEOptions, MoEParams
from jax_ggemm.routing import Router, identity

cheap_compilation = reference.cheap_compilation

# One compilation a call instead of one an operation.
moe = jax.jit(module.moe, static_argnums=2)
moe_experts = jax.jit(module.moe_experts, static_argnums=4)

DEFAULT = ExpertLayout()
K, M, S = 6, 4, 5


def share(chosen):
    return chosen / chosen.sum()


DEEPSEEK = Router(4, score=jax.nn.sigmoid, num_groups=4, top_groups=2, scale=2.5)

# name: (router, experts options, number of experts, parameters wanted, the reference's score, weigh and activation)
MODELS = {
    "qwen3": (Router(3), ExpertOptions(layout=HF_LINEAR), 8, "", reference.softmax, share, reference.swiglu),
    "qwen3.5": (Router(3), ExpertOptions(), 8, "shared gate", reference.softmax, share, reference.swiglu),
    "gpt_oss": (
        Router(4, score=identity, weigh=jax.nn.softmax),
        ExpertOptions(clamped_swiglu, GPT_OSS),
        8,
        "bias router_bias",
        lambda r: r,
        reference.softmax,
        reference.gpt_oss_glu,
    ),
    "deepseek_v3": (
        DEEPSEEK,
        ExpertOptions(layout=HF_LINEAR),
        16,
        "selection shared",
        reference.sigmoid,
        share,
        reference.swiglu,
    ),
    "gemma": (Router(2), ExpertOptions(geglu_tanh), 5, "", reference.softmax, share, reference.geglu_tanh),
    "large": (Router(16), ExpertOptions(), 1030, "", reference.softmax, share, reference.swiglu),
}


def make(name, tokens=(11,), seed=0):
    """(x, options, parameters in the default layout, parameters in the layer's layout)."""
    router, experts, num_experts, wanted, *_ = MODELS[name]
    keys = iter(jax.random.split(jax.random.key(seed), 12))

    def normal(*shape):
        return jax.random.normal(next(keys), shape)

    x = normal(*tokens, K)
    weights = ExpertParams(normal(num_experts, K, 2 * M), normal(num_experts, M, K))
    if "bias" in wanted.split():
        weights = weights._replace(gate_up_bias=normal(num_experts, 2 * M), down_bias=normal(num_experts, K))
    shared = None
    if "shared" in wanted:
        shared = SharedParams(normal(K, 2 * S), normal(S, K), normal(K, 1) if "gate" in wanted else None)
    plain = MoEParams(
        normal(K, num_experts),
        weights,
        normal(num_experts) if "router_bias" in wanted else None,
        0.3 * normal(num_experts) if "selection" in wanted else None,
        shared,
    )
    stored = plain._replace(experts=convert(weights, DEFAULT, experts.layout))
    if shared is not None:
        one = convert(ExpertParams(shared.gate_up[None], shared.down[None]), DEFAULT, experts.layout)
        stored = stored._replace(shared=shared._replace(gate_up=one.gate_up[0], down=one.down[0]))
    return x, MoEOptions(router, experts), plain, stored


def loops(name, x, plain):
    """The layer by loops: (y, counts)."""
    router, _, num_experts, _, score, weigh, activation = MODELS[name]
    tokens = np.asarray(x, np.float64).reshape(-1, K)
    logits = tokens @ np.asarray(plain.router, np.float64)
    if plain.router_bias is not None:
        logits = logits + np.asarray(plain.router_bias)
    groups = {"groups": router.num_groups, "top_groups": router.top_groups, "group_best": router.group_best}
    ids, weights = reference.route(logits, score, weigh, router.top_k, plain.selection_bias, router.scale, **groups)
    gate_up, down, gate_up_bias, down_bias = (None if a is None else np.asarray(a, np.float64) for a in plain.experts)
    biases = None if gate_up_bias is None else (gate_up_bias[:, :M], gate_up_bias[:, M:], down_bias)
    y = reference.moe(tokens, ids, weights, gate_up[..., :M], gate_up[..., M:], down, activation, biases)
    if plain.shared is not None:
        gate_up, down = (np.asarray(a, np.float64) for a in plain.shared[:2])
        shared = np.stack([reference.expert(t, gate_up[:, :S], gate_up[:, S:], down, activation) for t in tokens])
        if plain.shared.gate is not None:
            shared *= reference.sigmoid(tokens @ np.asarray(plain.shared.gate, np.float64))
        y = y + shared
    return y.reshape(x.shape), reference.sort_by_expert(ids, num_experts)[2]


@pytest.mark.parametrize("name", MODELS)
def test_models_equal_the_reference(name):
    x, options, plain, stored = make(name, (2, 5))
    y, stats = moe(x, stored, options)
    want, counts = loops(name, x, plain)
    assert y.dtype == x.dtype
    reference.assert_close(y, want)
    np.testing.assert_array_equal(stats.counts, counts)
    assert int(stats.num_tokens) == 10
    assert np.isfinite(stats.load_balance_loss)
    assert np.isfinite(stats.z_loss)


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss", "deepseek_v3"])
def test_bfloat16(name):
    x, options, plain, stored = make(name)

    def narrow(tree):  # the router stays in float32
        return jax.tree.map(lambda a: a.astype(jnp.bfloat16), tree)

    x, stored = narrow(x), stored._replace(experts=narrow(stored.experts), shared=narrow(stored.shared))
    y, stats = moe(x, stored, options)
    assert y.dtype == jnp.bfloat16
    assert stats.z_loss.dtype == jnp.float32
    want, counts = loops(name, x, plain._replace(experts=narrow(plain.experts), shared=narrow(plain.shared)))
    np.testing.assert_array_equal(stats.counts, counts)
    reference.assert_close(y, want, 0.04)


def dense_loss(name, x, plain, ids):
    """The layer's loss in jax.numpy with every expert on every token; ids come from the reference."""
    router, experts, *_ = MODELS[name]
    logits = jnp.dot(x, plain.router, precision="highest")
    if plain.router_bias is not None:
        logits = logits + plain.router_bias
    weights = router.weigh(jnp.take_along_axis(router.score(logits), ids, 1)) * router.scale
    gate_up, down, gate_up_bias, down_bias = plain.experts
    biases = None if gate_up_bias is None else (gate_up_bias[:, :M], gate_up_bias[:, M:], down_bias)
    split = gate_up[..., :M], gate_up[..., M:]
    y = reference.dense_experts(x, ids, weights, *split, down, experts.activation, biases)
    if plain.shared is not None:
        gate, up = jnp.split(jnp.dot(x, plain.shared.gate_up, precision="highest"), 2, axis=1)
        shared = jnp.dot(experts.activation(gate, up), plain.shared.down, precision="highest")
        if plain.shared.gate is not None:
            shared = shared * jax.nn.sigmoid(jnp.dot(x, plain.shared.gate, precision="highest"))
        y = y + shared
    probabilities = jax.nn.softmax(logits).mean(0)
    share = jnp.mean(ids[:, :, None] == jnp.arange(logits.shape[1]), (0, 1))
    balance = logits.shape[1] * jnp.sum(share * probabilities)
    return 0.01 * jnp.sum(y**2) + balance + jnp.mean(jax.nn.logsumexp(logits, 1) ** 2)


def loss(options, x, stored, token_mask=None):
    y, stats = module.moe(x, stored, options, token_mask=token_mask)
    return 0.01 * jnp.sum(y**2) + stats.load_balance_loss + stats.z_loss


@pytest.mark.parametrize("name", ["qwen3.5", "gpt_oss", "deepseek_v3"])
def test_gradients_equal_those_of_a_dense_computation(name):
    x, options, plain, stored = make(name)
    router, _, _, _, score, weigh, _ = MODELS[name]
    logits = np.asarray(x, np.float64) @ np.asarray(plain.router, np.float64)
    logits = logits if plain.router_bias is None else logits + np.asarray(plain.router_bias)
    groups = {"groups": router.num_groups, "top_groups": router.top_groups}
    ids = reference.route(logits, score, weigh, router.top_k, plain.selection_bias, **groups)[0]
    value, (dx, got) = jax.jit(jax.value_and_grad(functools.partial(loss, options), argnums=(0, 1)))(x, stored)
    dense = functools.partial(dense_loss, name, ids=jnp.asarray(ids))
    want_value, (want_dx, want) = jax.jit(jax.value_and_grad(dense, argnums=(0, 1)))(x, plain)
    np.testing.assert_allclose(value, want_value, rtol=1e-5)
    reference.assert_close(dx, want_dx)
    linear = convert(got.experts, options.experts.layout, DEFAULT)
    jax.tree.map(functools.partial(reference.assert_close, tolerance=5e-5), linear, want.experts)
    reference.assert_close(got.router, want.router, 5e-5)
    if plain.router_bias is not None:
        reference.assert_close(got.router_bias, want.router_bias, 5e-5)
    if plain.selection_bias is not None:
        np.testing.assert_array_equal(got.selection_bias, 0)
    if plain.shared is not None:
        shared = convert(ExpertParams(got.shared.gate_up[None], got.shared.down[None]), options.experts.layout, DEFAULT)
        reference.assert_close(shared.gate_up[0], want.shared.gate_up)
        reference.assert_close(shared.down[0], want.shared.down)
        if plain.shared.gate is not None:
            reference.assert_close(got.shared.gate[:, 0], want.shared.gate[:, 0])


def test_gradients_equal_finite_differences():
    with jax.enable_x64(True):
        x, options, _, stored = make("qwen3.5", (3,))
        x, stored = jax.tree.map(lambda a: a.astype(jnp.float64), (x, stored))
        check_grads(jax.jit(functools.partial(loss, options)), (x, stored), order=1, modes=["rev"], rtol=1e-5)


def test_padding_counts_nowhere():
    x, options, _, stored = make("qwen3.5", (3, 4))
    mask = jnp.array([[1, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 0]], bool)
    padded = jnp.where(mask[..., None], x, jnp.nan)
    y, stats = moe(padded, stored, options, token_mask=mask)
    want, want_stats = moe(x[np.asarray(mask)], stored, options)
    np.testing.assert_array_equal(y[~mask], 0)
    reference.assert_close(y[mask], want, 1e-6)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), stats, want_stats)

    gradient = jax.jit(jax.grad(functools.partial(loss, options), argnums=(0, 1)))
    dx, dp = gradient(padded, stored, mask)
    want_dx, want_dp = gradient(x[np.asarray(mask)], stored)
    np.testing.assert_array_equal(dx[~mask], 0)
    reference.assert_close(dx[mask], want_dx)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5), dp, want_dp)


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3"])
def test_nan_stays_visible_in_its_token_and_reaches_no_other(name):
    x, options, _, stored = make(name)
    clean, _ = moe(x, stored, options)
    y, stats = moe(x.at[3].set(jnp.nan), stored, options)
    others = np.arange(11) != 3
    np.testing.assert_array_equal(y[others], clean[others])
    assert np.isnan(y[3]).all()
    assert int(stats.counts.sum()) == 11 * options.router.top_k
    assert np.isnan(stats.z_loss)


def test_chosen_elsewhere_with_foreign_ids():
    """An expert-parallel shard: ids of other devices, -1, and tokens without any expert, next to good ones."""
    x, options, plain, _ = make("gemma", (2, 3))
    ids = jnp.array([[[0, -1], [5, 9], [4, 4]], [[1, 5], [2, 3], [-7, 100]]], jnp.int8)
    weights = jax.random.normal(jax.random.key(5), (2, 3, 2))
    gate_up, down, *_ = plain.experts
    y, counts = moe_experts(x, ids, weights, plain.experts, options.experts)
    want = reference.moe(
        x.reshape(6, K), ids.reshape(6, 2), weights.reshape(6, 2), gate_up[..., :M], gate_up[..., M:], down,
        reference.geglu_tanh,
    )  # fmt: skip
    reference.assert_close(y.reshape(6, K), want)
    np.testing.assert_array_equal(counts, [1, 1, 1, 1, 2])
    np.testing.assert_array_equal(y[0, 1], 0)

    def total(x, weights):
        return jnp.sum(module.moe_experts(x, ids, weights, plain.experts, options.experts)[0] ** 2)

    dx, dw = jax.jit(jax.grad(total, argnums=(0, 1)))(x, weights)
    foreign = np.asarray((ids < 0) | (ids >= 5))
    np.testing.assert_array_equal(dw[foreign], 0)
    assert (np.asarray(dw)[~foreign] != 0).all()
    np.testing.assert_array_equal(dx[0, 1], 0)
    np.testing.assert_array_equal(dx[1, 2], 0)


def test_new_group_sizes_compile_nothing():
    x, options, _, stored = make("deepseek_v3")
    compilations, seen = [], set()

    @jax.jit
    def step(x, stored, bias):
        compilations.append(1)
        y, stats = module.moe(x, stored._replace(selection_bias=bias), options)
        return y, stats.counts

    for i in range(5):
        bias = jnp.zeros(16).at[3 * i].set(10.0)
        seen.add(tuple(step(x, stored, bias)[1].tolist()))
    assert len(seen) == 5
    assert len(compilations) == 1


def test_nothing_leaves_the_device_and_gradients_do_not_scatter():
    """Of the layer itself: the grouped product is replaced."""
    x, options, _, stored = make("gpt_oss")

    def product(rows, weights, sizes, *, bias, **_):
        return jnp.einsum("nk,gkm->nm", rows, weights) + jnp.sum(bias, 0)

    options = MoEOptions(options.router, ExpertOptions(clamped_swiglu, GPT_OSS, ragged_dot=product))
    first = jax.grad(functools.partial(loss, options), argnums=(0, 1))
    reference.assert_no_scatter_add(first, x, stored)
    names = reference.primitives(jax.make_jaxpr(first)(x, stored).jaxpr)
    assert not [n for n in names if "callback" in n or "infeed" in n or "outfeed" in n]
    assert names.count("sort") == 1


def test_vmap_remat_and_scan():
    x, options, _, stored = make("deepseek_v3", (3, 4))
    step = jax.value_and_grad(functools.partial(loss, options), argnums=(0, 1))
    again = jax.value_and_grad(jax.checkpoint(functools.partial(loss, options)), argnums=(0, 1))
    singly = jax.jit(step)
    want = jax.tree.map(lambda *a: np.stack(a), *[singly(row, stored) for row in x])
    mapped = jax.jit(jax.vmap(step, in_axes=(0, None)))(x, stored)
    scanned = jax.lax.scan(lambda c, row: (c, again(row, stored)), 0, x)[1]
    for got in (mapped, scanned):
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4), got, want)


def test_second_derivatives():
    """A gradient penalty, as reverse over reverse."""
    with jax.enable_x64(True):
        x, options, _, stored = make("gemma", (3,))
        x, stored = jax.tree.map(lambda a: a.astype(jnp.float64), (x, stored))
        slope = jax.grad(functools.partial(loss, options), argnums=1)
        check_grads(jax.jit(lambda p: slope(x, p).experts.down), (stored,), order=1, modes=["rev"], rtol=1e-5)


def test_shard_map_over_tokens():
    """Data parallelism: tokens by device, parameters replicated, gradients summed once."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    x, options, _, stored = make("deepseek_v3", (10,))

    def local(x, stored):
        return jax.lax.psum(loss(options, x, stored), "data")

    def both(x, stored):
        return loss(options, x[:5], stored) + loss(options, x[5:], stored)

    replicated, split = PartitionSpec(), PartitionSpec("data")
    sharded = jax.shard_map(local, mesh=mesh, in_specs=(split, replicated), out_specs=replicated)
    got = jax.jit(jax.value_and_grad(sharded, argnums=(0, 1)))(x, stored)
    want = jax.jit(jax.value_and_grad(both, argnums=(0, 1)))(x, stored)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, want)


@pytest.mark.parametrize("tokens", [(), (2, 0, 3), (1, 2, 1, 2)])
def test_any_leading_dimensions(tokens):
    x, options, plain, stored = make("deepseek_v3", tokens)
    y, stats = moe(x, stored, options)
    if not x.size:
        gradient = jax.jit(jax.grad(functools.partial(loss, options), argnums=1))(x, stored)
        jax.tree.map(functools.partial(np.testing.assert_array_equal, desired=0), gradient)
    assert y.shape == x.shape
    if x.size:
        want, counts = loops("deepseek_v3", x, plain)
        reference.assert_close(y, want)
        np.testing.assert_array_equal(stats.counts, counts)
    else:
        assert int(stats.counts.sum()) == int(stats.num_tokens) == 0


def test_numpy_arguments():
    x, options, _, stored = make("qwen3")
    x, stored = np.asarray(x), jax.tree.map(np.asarray, stored)
    mask, ids, weights = np.ones(11, bool), np.zeros((11, 1), np.int64), np.ones((11, 1), np.float32)
    y, _ = jax.jit(lambda: module.moe(x, stored, options, token_mask=mask))()
    reference.assert_close(y, moe(x, stored, options)[0], 1e-6)
    _, counts = jax.jit(lambda: module.moe_experts(x, ids, weights, stored.experts, options.experts))()
    np.testing.assert_array_equal(counts, [11, 0, 0, 0, 0, 0, 0, 0])


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": shape(11, K + 1)}, TypeError, r"x must have shape \(\.\.\., 6\).*got \(11, 7\)"),
        ({"x": shape(11, K, dtype=jnp.int32)}, TypeError, "x must be floating, got int32"),
        ({"x": shape(11, K, dtype=jnp.bfloat16)}, TypeError, "params.experts.gate_up has dtype float32 and x bfloat16"),
        ({"router": shape(8, K)}, TypeError, r"params.router must have shape \(6, 8\), got \(8, 6\)"),
        ({"router_bias": shape(6)}, TypeError, r"params.router_bias must have shape \(8,\), got \(6,\)"),
        ({"selection_bias": shape(6)}, TypeError, r"params.selection_bias must have shape \(8,\)"),
        ({"mask": shape(11)}, TypeError, r"token_mask must be bool of shape \(11,\), got float32"),
        ({"mask": shape(11, 1, dtype=bool)}, TypeError, r"token_mask must be bool of shape \(11,\)"),
        ({"options": MoEOptions(Router(9), ExpertOptions(layout=HF_LINEAR))}, ValueError, "top_k must be at most 8"),
        ({"options": MoEOptions(Router(2))}, TypeError, "params.experts.down has shape"),
        (
            {"options": Router(2)},
            TypeError,
            r"options must be MoEOptions, e.g. MoEOptions\(Router\(top_k=2\)\); got Router",
        ),
        (
            {"shared": SharedParams(shape(K, 2 * S), shape(S, K, dtype=jnp.float16))},
            TypeError,
            "params.shared.down has dtype float16 and x float32",
        ),
        (
            {"shared": SharedParams(shape(K, 2 * S), shape(S, K))},
            TypeError,
            r"params.shared.gate_up of the shared expert has shape \(6, 10\)",
        ),
    ],
)
def test_errors_come_before_anything_runs(change, error, message):
    x, options, _, stored = make("qwen3")
    x = change.get("x", x)
    options = change.get("options", options)
    stored = stored._replace(**{k: v for k, v in change.items() if k in MoEParams._fields})
    with pytest.raises(error, match=message):
        jax.eval_shape(lambda x, p, m: module.moe(x, p, options, token_mask=m), x, stored, change.get("mask"))


@pytest.mark.parametrize(
    ("ids", "weights", "message"),
    [
        (shape(10, 2, dtype=jnp.int32), shape(11, 2), r"ids must have shape \(11, 'k'\), got \(10, 2\)"),
        (shape(11, dtype=jnp.int32), shape(11, 2), r"ids must have shape \(11, 'k'\), got \(11,\)"),
        (shape(11, 2, dtype=jnp.int32), shape(11, 3), r"weights must have shape \(11, 2\), that of ids, got \(11, 3\)"),
        (shape(11, 2, dtype=jnp.int32), shape(11, 2, dtype=jnp.int32), "weights must be floating, got int32"),
        (shape(11, 2), shape(11, 2), "ids must have an integer dtype, got float32"),
        (shape(3, 4, 2, dtype=jnp.int32), shape(3, 4, 1), r"weights must have shape \(3, 4, 2\), .* got \(3, 4, 1\)"),
    ],
)
def test_errors_of_choices_made_elsewhere(ids, weights, message):
    x, options, _, stored = make("qwen3", ids.shape[:-1] if len(ids.shape) == 3 else (11,))
    with pytest.raises(TypeError, match=message):
        jax.eval_shape(lambda i, w: module.moe_experts(x, i, w, stored.experts, options.experts), ids, weights)


X, IDS, WEIGHTS = np.ones((2, K), np.float32), np.zeros((2, 1), np.int32), np.ones((2, 1), np.float32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p, o: module.moe([[1.0] * K], p, o), "x must be an array, got list"),
        (lambda p, o: module.moe(X, p, o, token_mask=[True, True]), "token_mask must be an array, got list"),
        (lambda p, o: module.moe(X, p._replace(router=[1.0]), o), "params.router must be an array, got list"),
        (lambda p, o: module.moe(X, p._replace(router=None), o), "params.router must be an array, got NoneType"),
        (lambda p, o: module.moe(X, p._replace(router_bias="b"), o), "params.router_bias must be an array, got str"),
        (
            lambda p, o: module.moe(X, p._replace(experts=p.experts._replace(down=[1.0])), o),
            "params.experts.down must be an array, got list",
        ),
        (
            lambda p, o: module.moe(X, p._replace(shared=p.shared._replace(gate=[1.0])), o),
            "params.shared.gate must be an array, got list",
        ),
        (lambda p, o: module.moe(X, {"router": 1}, o), "params must be MoEParams, got dict"),
        (lambda p, o: module.moe(X, p._replace(experts=tuple(p.experts)), o), "params.experts must be ExpertParams"),
        (lambda p, o: module.moe(X, p._replace(shared=(1, 2)), o), "params.shared must be SharedParams or None"),
        (lambda p, o: module.moe_experts(X, [[0], [0]], WEIGHTS, p.experts), "ids must be an array, got list"),
        (lambda p, o: module.moe_experts(X, IDS, [[1.0], [1.0]], p.experts), "weights must be an array, got list"),
        (lambda p, o: module.moe_experts(X, IDS, WEIGHTS, p), "params must be ExpertParams, got MoEParams"),
        (
            lambda p, o: module.moe_experts(X, IDS, WEIGHTS, p.experts._replace(down=1j), o.experts),
            "params.down must be an array, got complex",
        ),
        (
            lambda p, o: module.moe_experts(X, IDS, WEIGHTS, p.experts, o),
            "options must be ExpertOptions, .* got MoEOptions",
        ),
        (lambda p, o: MoEOptions(2), r"router must be a Router, e.g. Router\(top_k=2\); got 2"),
        (lambda p, o: MoEOptions(Router(2), Router(2)), "experts must be ExpertOptions"),
    ],
)
def test_arguments_of_a_wrong_type(call, message):
    _, options, _, stored = make("qwen3.5")
    with pytest.raises(TypeError, match=message):
        call(stored, options)


@pytest.mark.parametrize("name", ["x", "params.router", "params.experts.gate_up"])
def test_arrays_over_explicit_mesh_axes_are_refused_by_name(name):
    x, options, _, stored = make("qwen3", (8,))
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    sharding = jax.sharding.NamedSharding(mesh, PartitionSpec("data"))
    if name == "x":
        x = jax.device_put(x, sharding)
    elif name == "params.router":
        stored = stored._replace(router=jax.device_put(stored.router, sharding))
    else:
        gate_up = jax.device_put(stored.experts.gate_up, sharding)
        stored = stored._replace(experts=stored.experts._replace(gate_up=gate_up))
    with jax.set_mesh(mesh), pytest.raises(NotImplementedError, match=rf"^{name} is sharded .*jax\.shard_map"):
        module.moe(x, stored, options)


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_forward_mode_is_refused(implementation):
    x, options, _, stored = make("qwen3")
    options = MoEOptions(options.router, ExpertOptions(layout=HF_LINEAR, implementation=implementation))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jit(lambda x: jax.jvp(lambda x: module.moe(x, stored, options)[0], (x,), (x,)))(x)
