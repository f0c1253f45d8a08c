"""The experts on sorted rows: activations, layouts, biases, dtypes, the shared expert."""

import jax
import jax.numpy as jnp
import moe_reference as reference
import numpy as np
import pytest

from jax_ggemm import experts as module
from jax_ggemm.experts import ClampedSwiGLU, ExpertOptions, SharedParams, clamped_swiglu, geglu_tanh, swiglu
from jax_ggemm.layouts import GPT_OSS, HF_LINEAR, INTERLEAVED, ExpertLayout, ExpertParams, convert

cheap_compilation = reference.cheap_compilation

# One compilation a call instead of one an operation.
experts = jax.jit(module.experts, static_argnums=3)
shared_expert = jax.jit(module.shared_expert, static_argnums=2)

SIZES = jnp.array([4, 0, 7, 2], jnp.int32)
E, K, M, N = 4, 6, 10, 16
DEFAULT = ExpertLayout()
LAYOUTS = [DEFAULT, HF_LINEAR, GPT_OSS, ExpertLayout(INTERLEAVED, out_first=True)]
ACTIVATIONS = {
    "swiglu": (swiglu, reference.swiglu),
    "geglu_tanh": (geglu_tanh, reference.geglu_tanh),
    "gpt_oss": (clamped_swiglu, reference.gpt_oss_glu),
    "tight": (ClampedSwiGLU(limit=0.5, alpha=1.0), lambda g, u: reference.gpt_oss_glu(g, u, 0.5, 1.0)),
    "any_callable": (lambda g, u: jnp.tanh(g) - u, lambda g, u: np.tanh(g) - u),
}


def make(dtype=jnp.float32, biases=True, layout=DEFAULT):
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = [(E, K, 2 * M), (E, M, K), (E, 2 * M), (E, K)]
    arrays = [jax.random.normal(k, s).astype(dtype) for k, s in zip(keys[1:], shapes, strict=True)]
    rows = jax.random.normal(keys[0], (N, K)).astype(dtype)
    return rows, convert(ExpertParams(*arrays[: 4 if biases else 2]), DEFAULT, layout)


def loop(rows, params, activation):
    """Row by row, from parameters in the default layout."""
    rows, gate_up, down = (np.asarray(a, np.float64) for a in (rows, *params[:2]))
    biases = [np.zeros((E, 2 * M)) if b is None else np.asarray(b, np.float64) for b in params[2:3]]
    down_bias = np.zeros((E, K)) if params.down_bias is None else np.asarray(params.down_bias, np.float64)
    result, row = np.zeros_like(rows), 0
    for e, size in enumerate(np.asarray(SIZES)):
        for _ in range(size):
            bias = biases[0][e, :M], biases[0][e, M:], down_bias[e]
            result[row] = reference.expert(rows[row], gate_up[e, :, :M], gate_up[e, :, M:], down[e], activation, *bias)
            row += 1
    return result


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_equal_the_reference(name):
    activation, expected = ACTIVATIONS[name]
    rows, params = make()
    got = experts(rows, SIZES, params, ExpertOptions(activation))
    reference.assert_close(got, loop(rows, params, expected))
    np.testing.assert_array_equal(got[13:], 0)  # rows past the last expert, in spite of the biases


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("biases", [True, False])
def test_layouts_equal_the_reference(layout, biases):
    rows, params = make(biases=biases)
    got = experts(rows, SIZES, convert(params, DEFAULT, layout), ExpertOptions(layout=layout))
    reference.assert_close(got, loop(rows, params, reference.swiglu))


def test_clamp_at_its_limits():
    gate = jnp.array([-100.0, -8.0, 6.9, 7.0, 7.1, 100.0])
    for up in (-100.0, -7.1, 0.0, 7.1, 100.0):
        want = reference.gpt_oss_glu(np.asarray(gate, np.float64), np.full(6, up))
        np.testing.assert_allclose(clamped_swiglu(gate, jnp.full(6, up)), want, rtol=1e-5, atol=1e-30)
    slopes = jax.vmap(jax.grad(clamped_swiglu, argnums=(0, 1)))(jnp.array([8.0, 8.0]), jnp.array([1.0, 9.0]))
    np.testing.assert_array_equal(slopes[0], 0)
    assert slopes[1][0] != 0
    assert slopes[1][1] == 0


def test_narrow_rows_are_activated_in_float32_and_weights_are_not_copied():
    """Also that the grouped product can be replaced, and gets weights stored (E, N, K) as they are."""
    seen = []

    def product(rows, weights, sizes, *, precision, transpose_rhs, bias, implementation):
        seen.append((rows.dtype, weights, transpose_rhs, precision, implementation))
        width = weights.shape[1] if transpose_rhs else weights.shape[2]
        return jnp.ones((rows.shape[0], width), rows.dtype)

    def activation(gate, up):
        assert gate.dtype == up.dtype == jnp.float32
        return gate * up * (1 + 2.0**-20)

    rows, params = make(jnp.bfloat16, biases=False, layout=HF_LINEAR)
    options = ExpertOptions(activation, HF_LINEAR, jax.lax.Precision.HIGH, "xla", product)
    result = module.experts(rows, SIZES, params, options)
    assert result.dtype == jnp.bfloat16
    assert [s[0] for s in seen] == [jnp.bfloat16] * 2
    assert [s[1] is w for s, w in zip(seen, params[:2], strict=True)] == [True, True]
    assert [s[2:] for s in seen] == [(True, jax.lax.Precision.HIGH, "xla")] * 2


@pytest.mark.parametrize("layout", [DEFAULT, GPT_OSS, HF_LINEAR])
def test_bfloat16(layout):
    rows, params = make(jnp.bfloat16)
    got = experts(rows, SIZES, convert(params, DEFAULT, layout), ExpertOptions(layout=layout))
    assert got.dtype == jnp.bfloat16
    reference.assert_close(got, loop(rows, params, reference.swiglu), 0.03)


def test_gradients_equal_those_of_a_dense_computation():
    rows, params = make()
    ids = jnp.repeat(jnp.arange(E + 1), jnp.array([4, 0, 7, 2, 3]), total_repeat_length=N)[:, None]

    def ours(rows, params):
        return jnp.sum(jnp.sin(module.experts(rows, SIZES, params)))

    def dense(rows, params):
        biases = params.gate_up_bias[:, :M], params.gate_up_bias[:, M:], params.down_bias
        gates, ups = params.gate_up[..., :M], params.gate_up[..., M:]
        return jnp.sum(
            jnp.sin(reference.dense_experts(rows, ids, jnp.ones((N, 1)), gates, ups, params.down, biases=biases))
        )

    got, want = (jax.jit(jax.grad(f, argnums=(0, 1)))(rows, params) for f in (ours, dense))
    jax.tree.map(reference.assert_close, got, want)
    for gradient in got[1]:
        np.testing.assert_array_equal(gradient[1], 0)  # the expert without rows


def test_checkpoint_names_choose_what_is_saved():
    """Named results are not computed again in the backward pass; with no name saved, all are."""
    rows, params = make(biases=False)

    def product(rows, weights, sizes, **_):
        return jnp.einsum("nk,gkm->nm", rows, weights)

    def products(*names):
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        layer = jax.checkpoint(
            lambda r, p: jnp.sum(module.experts(r, SIZES, p, ExpertOptions(ragged_dot=product)) ** 2), policy=policy
        )
        return reference.primitives(jax.make_jaxpr(jax.grad(layer, argnums=(0, 1)))(rows, params).jaxpr).count(
            "dot_general"
        )

    nothing = products()
    assert products(module.GATE_UP_NAME) == nothing - 1
    assert products(module.GATE_UP_NAME, module.HIDDEN_NAME, module.DOWN_NAME) == nothing - 2


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("gated", [True, False])
def test_shared_expert(layout, gated):
    keys = jax.random.split(jax.random.key(3), 4)
    x, gate_up, down, gate = (
        jax.random.normal(k, s) for k, s in zip(keys, [(N, K), (1, K, 2 * M), (1, M, K), (K, 1)], strict=True)
    )
    stored = convert(ExpertParams(gate_up, down), DEFAULT, layout)
    params = SharedParams(stored.gate_up[0], stored.down[0], gate if gated else None)
    got = shared_expert(x, params, ExpertOptions(layout=layout, precision="highest"))
    x, gate_up, down, gate = (np.asarray(a, np.float64) for a in (x, gate_up[0], down[0], gate))
    want = np.stack([reference.expert(r, gate_up[:, :M], gate_up[:, M:], down, reference.swiglu) for r in x])
    reference.assert_close(got, want * reference.sigmoid(x @ gate) if gated else want)


def test_equal_options_are_equal():
    assert ExpertOptions(ClampedSwiGLU(5.0)) == ExpertOptions(ClampedSwiGLU(5.0))
    assert hash(ExpertOptions(ClampedSwiGLU(5.0))) == hash(ExpertOptions(ClampedSwiGLU(5.0)))


@pytest.mark.parametrize("limit", [0.0, -7.0, float("nan")])
def test_limit_must_be_positive(limit):
    with pytest.raises(ValueError, match="limit must be positive, got"):
        ClampedSwiGLU(limit=limit)
    with pytest.raises(ValueError, match="alpha must be finite, got nan"):
        ClampedSwiGLU(alpha=float("nan"))


@pytest.mark.parametrize(
    ("make_options", "message"),
    [
        (lambda: ClampedSwiGLU(limit="7"), "limit must be a number, got '7'"),
        (lambda: ClampedSwiGLU(limit=True), "limit must be a number, got True"),
        (lambda: ClampedSwiGLU(alpha=None), "alpha must be a number, got None"),
        (lambda: ExpertOptions("swiglu"), "activation must be a function of gate and up, .* got 'swiglu'"),
        (
            lambda: ExpertOptions(layout="hf"),
            "layout must be an ExpertLayout, e.g. DEFAULT, HF_LINEAR or GPT_OSS .*'hf'",
        ),
        (lambda: ExpertOptions(ragged_dot="xla"), "ragged_dot must be a function, .* got 'xla'"),
    ],
)
def test_options_of_a_wrong_type(make_options, message):
    with pytest.raises(TypeError, match=message):
        make_options()
    assert ClampedSwiGLU(limit=np.float32(5), alpha=1) == ClampedSwiGLU(5.0, 1.0)


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


@pytest.mark.parametrize(
    ("rows", "sizes", "options", "message"),
    [
        (shape(N, K + 1), shape(E), ExpertOptions(), r"rows must have shape \(rows, 6\).*got \(16, 7\)"),
        (shape(K), shape(E), ExpertOptions(), r"rows must have shape \(rows, 6\).*got \(6,\)"),
        (shape(N, K, dtype=jnp.int32), shape(E), ExpertOptions(), "rows must be floating, got int32"),
        (shape(N, K, dtype=jnp.bfloat16), shape(E), ExpertOptions(), "params.gate_up has dtype float32 .* bfloat16"),
        (shape(N, K), shape(E + 1), ExpertOptions(), r"group_sizes must have shape \(4,\).*got \(5,\)"),
        (shape(N, K), shape(E), ExpertOptions(layout=HF_LINEAR), "params.down has shape"),
        (shape(N, K), shape(E), ExpertOptions(lambda g, u: g[:1]), r"activation must return shape \(16, 10\)"),
    ],
)
def test_errors_come_before_anything_runs(rows, sizes, options, message):
    params = make()[1]
    sizes = jax.ShapeDtypeStruct(sizes.shape, jnp.int32)
    with pytest.raises(TypeError, match=message):
        jax.eval_shape(lambda r, s: module.experts(r, s, params, options), rows, sizes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate_up": jnp.zeros((K + 1, 2 * M))}, r"params.gate_up of the shared expert has shape \(7, 20\)"),
        ({"gate_up": jnp.zeros((1, K, 2 * M))}, r"params.gate_up of the shared expert has shape \(1, 6, 20\)"),
        ({"down": jnp.zeros((K, M))}, r"params.down of the shared expert has shape \(6, 10\).*\(10, 6\)"),
        ({"gate": jnp.zeros((K,))}, r"params.gate of the shared expert has shape \(6,\).*\(6, 1\)"),
        ({"gate": jnp.zeros((K, 1), jnp.bfloat16)}, "params.gate has dtype bfloat16"),
    ],
)
def test_shared_expert_errors(change, message):
    params = SharedParams(jnp.zeros((K, 2 * M)), jnp.zeros((M, K)))._replace(**change)
    with pytest.raises(TypeError, match=message):
        module.shared_expert(jnp.zeros((N, K)), params)
