"""Conversions between layouts: each against explicit indexing, and bit for bit there and back."""

import itertools
import re
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_ggemm import layouts
from jax_ggemm.layouts import (
    CONCATENATED,
    GPT_OSS,
    HF_LINEAR,
    INTERLEAVED,
    ExpertLayout,
    ExpertParams,
    convert,
    stack_experts,
    unstack_experts,
)
from jax_ggemm.nnx_moe import MoE
from jax_ggemm.routing import Router

E, K, M = 3, 5, 4
DEFAULT = ExpertLayout()
LAYOUTS = [DEFAULT, HF_LINEAR, GPT_OSS, ExpertLayout(INTERLEAVED, out_first=True)]


def bits(array):
    """The bytes of an array, so that NaN payloads and the sign of zero count."""
    return np.ascontiguousarray(np.asarray(array)).view(np.uint8)


def make(layout, module=np, dtype="float32", biases=True):
    """Parameters of random bits: any NaN and any denormal."""
    raw = np.random.default_rng(0)
    dtype = jnp.dtype(dtype)

    def array(*shape):
        values = raw.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]
        if module is jnp:  # XLA's CPU backend quiets signalling NaNs in bfloat16
            with np.errstate(invalid="ignore"):
                values = np.where(np.isnan(values), dtype.type(1), values)
        return module.asarray(values)

    gate_up, down = ((E, 2 * M, K), (E, K, M)) if layout.out_first else ((E, K, 2 * M), (E, M, K))
    return ExpertParams(
        array(*gate_up), array(*down), array(E, 2 * M) if biases else None, array(E, K) if biases else None
    )


@pytest.mark.parametrize("module", [np, jnp])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_round_trip_is_exact(module, dtype):
    kind = type(module.zeros(()) if module is jnp else np.zeros(1))
    for source, target in itertools.product(LAYOUTS, LAYOUTS):
        params = make(source, module, dtype)
        there = convert(params, source, target)
        assert there.check(target) == (E, K, M)
        back = convert(there, target, source)
        for before, middle, after in zip(params, there, back, strict=True):
            assert isinstance(middle, kind)
            assert middle.dtype == before.dtype
            np.testing.assert_array_equal(bits(after), bits(before))


@pytest.mark.parametrize("biases", [True, False])
def test_linear_to_default_and_gpt_oss(biases):
    """What Hugging Face's and gpt-oss's own layouts mean, index by index."""
    linear = make(HF_LINEAR, biases=biases)
    default, interleaved = convert(linear, HF_LINEAR, DEFAULT), convert(linear, HF_LINEAR, GPT_OSS)
    for e, k, i in np.ndindex(E, K, M):
        gate, up = linear.gate_up[e, i, k], linear.gate_up[e, M + i, k]
        pairs = [
            (default.gate_up[e, k, i], gate),
            (default.gate_up[e, k, M + i], up),
            (interleaved.gate_up[e, k, 2 * i], gate),
            (interleaved.gate_up[e, k, 2 * i + 1], up),
            (default.down[e, i, k], linear.down[e, k, i]),
            (interleaved.down[e, i, k], linear.down[e, k, i]),
        ]
        if biases:
            pairs += [
                (interleaved.gate_up_bias[e, 2 * i], linear.gate_up_bias[e, i]),
                (interleaved.gate_up_bias[e, 2 * i + 1], linear.gate_up_bias[e, M + i]),
            ]
        for got, want in pairs:
            np.testing.assert_array_equal(bits(got), bits(want))
    if biases:
        np.testing.assert_array_equal(bits(interleaved.down_bias), bits(linear.down_bias))
        np.testing.assert_array_equal(bits(default.gate_up_bias), bits(linear.gate_up_bias))
    else:
        assert interleaved.gate_up_bias is interleaved.down_bias is None


@pytest.mark.parametrize("module", [np, jnp])
def test_one_matrix_per_expert(module):
    linear = make(HF_LINEAR, module, biases=False)
    gates, ups, downs = unstack_experts(linear)
    assert [m.shape for m in (gates[2], ups[2], downs[2])] == [(M, K), (M, K), (K, M)]
    np.testing.assert_array_equal(bits(ups[1]), bits(linear.gate_up[1, M:]))
    np.testing.assert_array_equal(bits(gates[1]), bits(linear.gate_up[1, :M]))
    for layout in LAYOUTS:
        stacked = stack_experts(gates, ups, downs, layout)
        for got, want in zip(stacked[:2], convert(linear, HF_LINEAR, layout)[:2], strict=True):
            np.testing.assert_array_equal(bits(got), bits(want))
        for got, want in zip(unstack_experts(stacked, layout), (gates, ups, downs), strict=True):
            np.testing.assert_array_equal(bits(np.stack(got)), bits(np.stack(want)))


@pytest.mark.parametrize("form", [CONCATENATED, INTERLEAVED])
@pytest.mark.parametrize("axis", [0, 1, -1, -2])
def test_join_is_the_inverse_of_split(form, axis):
    fused = np.arange(4 * 6 * 8).reshape(4, 6, 8)
    gate, up = form.split(fused, axis)
    assert gate.shape[axis] == up.shape[axis] == fused.shape[axis] // 2
    np.testing.assert_array_equal(form.join(gate, up, axis), fused)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate_up": np.zeros((K, 2 * M))}, r"params.gate_up must be an array of rank 3, got \(5, 8\)"),
        ({"gate_up": np.zeros((E, K, 7))}, "params.gate_up .* 7 output features .* even"),
        ({"down": np.zeros((E, K, M))}, r"params.down has shape \(3, 5, 4\).* needs \(3, 4, 5\)"),
        ({"down": np.zeros((E + 1, M, K))}, r"params.down has shape \(4, 4, 5\)"),
        ({"gate_up_bias": np.zeros((E, M))}, r"params.gate_up_bias has shape \(3, 4\).* needs \(3, 8\)"),
        ({"down_bias": np.zeros(K)}, r"params.down_bias must be an array of rank 2, got \(5,\)"),
        ({"down": [1.0]}, "params.down must be an array of rank 3, got list"),
    ],
)
def test_wrong_parameters(change, message):
    with pytest.raises(TypeError, match=message):
        convert(make(DEFAULT)._replace(**change), DEFAULT, HF_LINEAR)


def test_wrong_matrices():
    gates, ups, downs = unstack_experts(make(HF_LINEAR, biases=False))
    with pytest.raises(TypeError, match="one matrix per expert each, got 3, 2 and 3"):
        stack_experts(gates, ups[:2], downs)
    with pytest.raises(TypeError, match=r"downs\[0\] has shape \(4, 5\).* needs \(5, 4\)"):
        stack_experts(gates, ups, gates)
    with pytest.raises(ValueError, match="at least one expert"):
        stack_experts([], [], [])
    with pytest.raises(ValueError, match="biases"):
        unstack_experts(make(HF_LINEAR))
    with pytest.raises(TypeError, match="even length on axis -1"):
        INTERLEAVED.split(np.zeros((2, 3)))


def test_the_documented_loading_of_a_checkpoint():
    """The lines of the module's docstring, run on a checkpoint, against the layer computed by hand."""
    code = "\n".join(re.findall(r"^    .*$", layouts.__doc__, re.MULTILINE))
    rng = np.random.default_rng(0)
    gates, ups = rng.normal(size=(2, E, M, K)).astype(np.float32)
    downs = rng.normal(size=(E, K, M)).astype(np.float32)
    w = {"gate.weight": rng.normal(size=(E, K)).astype(np.float32)}
    layer = MoE(K, M, E, router=Router(E), shared_features=M, rngs=nnx.Rngs(0))
    shared = {"shared_gate": gates[0], "shared_up": ups[0], "shared_down": downs[0]}
    names = {"w": w, "layer": layer, "gates": list(gates), "ups": list(ups), "downs": list(downs), **shared}
    exec(textwrap.dedent(code), {**vars(layouts), **names})
    x = rng.normal(size=(7, K)).astype(np.float32)
    got = nnx.jit(layer)(x)[0]
    each = [(np.asarray(jax.nn.silu(x @ g.T)) * (x @ u.T)) @ d.T for g, u, d in zip(gates, ups, downs, strict=True)]
    weights = np.asarray(jax.nn.softmax(x @ w["gate.weight"].T))
    want = each[0] + sum(weights[:, e, None] * each[e] for e in range(E))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
