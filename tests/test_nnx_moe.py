"""The flax.nnx module: parameters, initialisation, and that nnx's transformations work on it."""

import functools

import jax
import jax.numpy as jnp
import moe_reference as reference
import numpy as np
import pytest
from flax import nnx

from jax_ggemm.experts import clamped_swiglu
from jax_ggemm.layouts import GPT_OSS, HF_LINEAR, INTERLEAVED, ExpertLayout, ExpertParams, convert
from jax_ggemm.moe_layer import MoEParams, moe
from jax_ggemm.nnx_moe import MoE, SelectionBias
from jax_ggemm.routing import Router, identity

cheap_compilation = reference.cheap_compilation

DEFAULT = ExpertLayout()


def small(**options):
    options = {"router": Router(2, score=jax.nn.sigmoid, scale=2.5), "use_selection_bias": True, **options}
    return MoE(6, 4, 8, rngs=nnx.Rngs(0), **options)


X = jax.random.normal(jax.random.key(1), (2, 5, 6))


def loss(layer, x):
    y, stats = layer(x)
    return jnp.sum(jnp.sin(y)) + 0.01 * stats.load_balance_loss + 0.001 * stats.z_loss


def test_parameters_have_the_layouts_shapes():
    options = {"use_bias": True, "use_router_bias": True, "shared_features": 3, "shared_gate": True}
    shapes = {
        "router": (6, 8),
        "router_bias": (8,),
        "gate_up": (8, 6, 8),
        "down": (8, 4, 6),
        "gate_up_bias": (8, 8),
        "down_bias": (8, 6),
        "shared_gate_up": (6, 6),
        "shared_down": (3, 6),
        "shared_gate": (6, 1),
    }
    layer = small(**options)
    state = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    assert {name: value.shape for name, value in state.items()} == shapes
    assert set(nnx.to_pure_dict(nnx.state(layer, SelectionBias))) == {"selection_bias"}
    linear = small(layout=HF_LINEAR, **options)
    assert linear.gate_up.shape == (8, 8, 6)
    assert linear.down.shape == (8, 6, 4)
    assert linear.shared_gate_up.shape == (6, 6)
    assert linear.shared_down.shape == (6, 3)
    assert set(nnx.to_pure_dict(nnx.state(MoE(6, 4, 8, router=Router(2), rngs=nnx.Rngs(0))))) == {
        "router",
        "gate_up",
        "down",
    }


@pytest.mark.parametrize("layout", [HF_LINEAR, GPT_OSS, ExpertLayout(INTERLEAVED, out_first=True)])
def test_initial_values_and_results_do_not_depend_on_the_layout(layout):
    default, other = small(shared_features=3), small(shared_features=3, layout=layout)
    stored = convert(ExpertParams(other.gate_up[...], other.down[...]), layout, DEFAULT)
    np.testing.assert_array_equal(stored.gate_up, default.gate_up[...])
    np.testing.assert_array_equal(stored.down, default.down[...])
    np.testing.assert_allclose(nnx.jit(other)(X)[0], nnx.jit(default)(X)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", [DEFAULT, HF_LINEAR])
def test_fan_in_is_that_of_one_expert(layout):
    layer = MoE(64, 16, 32, router=Router(2), layout=layout, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(jnp.std(layer.gate_up[...]), 64**-0.5, rtol=0.03)
    np.testing.assert_allclose(jnp.std(layer.down[...]), 16**-0.5, rtol=0.03)
    assert len(np.unique(np.asarray(layer.gate_up[...]))) > 0.9 * layer.gate_up.size  # no two experts alike


def test_calls_the_functional_core():
    options = {"use_bias": True, "use_router_bias": True, "activation": clamped_swiglu, "layout": GPT_OSS}
    layer = small(
        router=Router(2, score=identity, weigh=jax.nn.softmax), bias_init=nnx.initializers.normal(), **options
    )
    experts = ExpertParams(layer.gate_up[...], layer.down[...], layer.gate_up_bias[...], layer.down_bias[...])
    params = MoEParams(layer.router[...], experts, layer.router_bias[...], layer.selection_bias[...])
    mask = jnp.arange(10).reshape(2, 5) != 3
    got = nnx.jit(lambda m: m(X, token_mask=mask))(layer)
    want = jax.jit(lambda p: moe(X, p, layer.options, token_mask=mask))(params)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, want)
    np.testing.assert_array_equal(got[0][0, 3], 0)


def test_training_step():
    layer = small(shared_features=3, shared_gate=True)

    @nnx.jit
    def step(layer, x):
        value, gradient = nnx.value_and_grad(loss)(layer, x)
        params = nnx.state(layer, nnx.Param)
        nnx.update(layer, jax.tree.map(lambda p, g: p - 0.05 * g, params, gradient))
        layer.update_selection_bias(layer(x)[1].counts, 0.25)
        return value, gradient

    values = []
    for _ in range(3):
        value, gradient = step(layer, X)
        values.append(float(value))
    assert values[-1] < values[0]
    assert "selection_bias" not in nnx.to_pure_dict(gradient)
    assert all((np.asarray(g) != 0).any() for g in jax.tree.leaves(gradient))
    bias = np.asarray(layer.selection_bias[...])
    assert (bias != 0).any()
    assert np.array_equal(bias, np.round(bias * 4) / 4)


def test_selection_bias_moves_the_choice():
    layer = small()
    before = layer(X)[1].counts
    layer.update_selection_bias(before, 0.5)
    np.testing.assert_array_equal(layer.selection_bias[...], 0.5 * np.sign(before.mean() - np.asarray(before)))
    after = layer(X)[1].counts
    assert np.std(after) != np.std(before)
    with pytest.raises(ValueError, match="use_selection_bias=True"):
        small(use_selection_bias=False).update_selection_bias(before, 0.5)


def test_split_merge_and_jax_transformations():
    layer = small()
    graph, state = nnx.split(layer)

    @jax.jit
    def value(state, x):
        return loss(nnx.merge(graph, state), x)

    want = nnx.jit(loss)(layer, X)
    np.testing.assert_allclose(value(state, X), want, rtol=1e-6)
    again = nnx.jit(nnx.value_and_grad(nnx.remat(loss)))(layer, X)
    plain = nnx.jit(nnx.value_and_grad(loss))(layer, X)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), again, plain)


def test_scan_over_layers():
    @nnx.split_rngs(splits=2)
    @nnx.vmap(in_axes=0, out_axes=0)
    def create(rngs):
        return MoE(6, 4, 8, router=Router(2), rngs=rngs)

    layers = create(nnx.Rngs(0))
    assert layers.gate_up.shape == (2, 8, 6, 8)

    def scanned(layers, x):
        forward = nnx.scan(lambda x, layer: x + layer(x)[0], in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return jnp.sum(forward(x, layers) ** 2)

    def unrolled(layers, x):
        graph, state = nnx.split(layers)
        for i in range(2):
            x = x + nnx.merge(graph, jax.tree.map(lambda a, i=i: a[i], state))(x)[0]
        return jnp.sum(x**2)

    np.testing.assert_allclose(nnx.jit(scanned)(layers, X), nnx.jit(unrolled)(layers, X), rtol=1e-5)
    gradient = nnx.jit(nnx.grad(scanned))(layers, X)
    assert all((np.asarray(g) != 0).any(axis=(1, 2, *range(3, g.ndim))).all() for g in jax.tree.leaves(gradient))


def test_one_compilation_for_all_group_sizes():
    layer = small()
    compilations, seen = [], set()

    @nnx.jit
    def forward(layer, x):
        compilations.append(1)
        return layer(x)[1].counts

    for i in range(5):
        layer.selection_bias[...] = jnp.zeros(8).at[i].set(10.0)
        seen.add(tuple(forward(layer, X).tolist()))
    assert len(seen) == 5
    assert len(compilations) == 1


def test_dtypes():
    layer = small(dtype=jnp.bfloat16, shared_features=3)
    assert layer.gate_up.dtype == jnp.float32
    y, stats = nnx.jit(layer)(X)
    assert y.dtype == jnp.bfloat16
    assert stats.z_loss.dtype == jnp.float32
    full = nnx.jit(small(shared_features=3))(X)[0]
    error = jnp.abs(y.astype(jnp.float32) - full)
    assert jnp.sqrt(jnp.mean(error**2)) < 0.02 * jnp.sqrt(jnp.mean(full**2))
    narrow = small(param_dtype=jnp.bfloat16, use_bias=True)
    assert {narrow.gate_up.dtype, narrow.down_bias.dtype} == {jnp.dtype("bfloat16")}
    assert narrow.router.dtype == narrow.selection_bias.dtype == jnp.float32
    assert jax.eval_shape(narrow, X.astype(jnp.bfloat16))[0].dtype == jnp.bfloat16
    assert jax.eval_shape(narrow, X)[0].dtype == jnp.float32


def test_metadata_reaches_the_variables():
    layer = small(
        use_bias=True,
        gate_up_metadata={"note": "gate_up"},
        down_bias_metadata={"note": "down_bias"},
        router_metadata={"note": "router"},
    )
    notes = [layer.gate_up.get_metadata()["note"], layer.down_bias.get_metadata()["note"]]
    assert [*notes, layer.router.get_metadata()["note"]] == ["gate_up", "down_bias", "router"]
    assert "note" not in layer.down.get_metadata()


def test_sharding_metadata():
    mesh = jax.make_mesh((1, 1), ("expert", "mlp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        layer = small(
            gate_up_metadata={"out_sharding": ("expert", None, "mlp")},
            down_metadata={"out_sharding": ("expert", "mlp", None)},
        )
        assert layer.gate_up[...].sharding.spec == jax.sharding.PartitionSpec("expert", None, "mlp")
        assert nnx.jit(layer)(X)[0].shape == X.shape


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"router": Router(9)}, "top_k must be at most 8"),
        ({"shared_features": -1}, "shared_features must not be negative, got -1"),
        ({"shared_gate": True}, "shared_gate=True needs a shared expert"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        small(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"router": 2}, r"router must be a Router, e.g. Router\(top_k=2\); got 2"),
        ({"layout": "hf"}, "layout must be an ExpertLayout, e.g. DEFAULT, HF_LINEAR or GPT_OSS .* got 'hf'"),
        ({"activation": "swiglu"}, "activation must be a function of gate and up"),
        ({"shared_features": 2.0}, "shared_features must be an int, got 2.0"),
        ({"features": 6.0}, "features must be an int, got 6.0"),
        ({"num_experts": True}, "num_experts must be an int, got True"),
    ],
)
def test_options_of_a_wrong_type(options, message):
    sizes = {"features": 6, "hidden_features": 4, "num_experts": 8, "router": Router(2)}
    with pytest.raises(TypeError, match=message):
        MoE(**{**sizes, **options}, rngs=nnx.Rngs(0))


def test_numpy_sizes_and_arguments_that_are_no_arrays():
    layer = MoE(np.int64(6), np.int32(4), np.int64(8), router=Router(np.int64(2)), rngs=nnx.Rngs(0))
    assert type(layer.features) is int
    with pytest.raises(TypeError, match="inputs must be an array, got list"):
        layer([[1.0] * 6])
    with pytest.raises(TypeError, match="token_mask must be an array, got list"):
        layer(X, token_mask=[[True] * 5] * 2)


def test_bad_sizes_and_inputs():
    with pytest.raises(ValueError, match="num_experts must be at least 1, got 0"):
        MoE(6, 4, 0, router=Router(1), rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"inputs must have shape \(\.\.\., 6\), got \(3, 7\)"):
        small()(jnp.zeros((3, 7)))
