"""What a Mixture-of-Experts layer computes, written as loops over tokens and experts, and how results are compared.

Shares no code with the package. The loops are NumPy in float64; `dense_experts` is the same in jax.numpy, every expert
applied to every token, for gradients by `jax.grad`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest


@pytest.fixture(autouse=True)
def cheap_compilation():
    """Halves the time of these tests: they compile much and compute little."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def softmax(values):
    """Softmax of a vector."""
    exponentials = np.exp(values - np.max(values))
    return exponentials / exponentials.sum()


def sigmoid(values):
    """Logistic function."""
    return 1 / (1 + np.exp(-values))


def swiglu(gate, up):
    """silu(gate) * up."""
    return gate * sigmoid(gate) * up


def geglu_tanh(gate, up):
    """gelu(gate) * up, tanh form."""
    return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up


def gpt_oss_glu(gate, up, limit=7.0, alpha=1.702):
    """The clamped SwiGLU of gpt-oss, value by value."""
    result = np.empty_like(gate)
    for i, (g, u) in enumerate(zip(gate, up, strict=True)):
        low, clipped = min(g, limit), max(-limit, min(u, limit))
        result[i] = low / (1 + np.exp(-alpha * low)) * (clipped + 1)
    return result


def choose(scores, top_k, groups=1, top_groups=1, group_best=2):
    """The experts of one token, best first, lower index first among equals."""
    size = len(scores) // groups
    ranks = [sum(sorted(scores[g * size : (g + 1) * size])[-group_best:]) for g in range(groups)]
    kept = sorted(range(groups), key=lambda g: (-ranks[g], g))[:top_groups]
    offered = [e for e in range(len(scores)) if e // size in kept]
    return sorted(offered, key=lambda e: (-scores[e], e))[:top_k]


def route(logits, score, weigh, top_k, bias=None, scale=1.0, **groups):
    """Ids and weights, token by token."""
    logits = np.asarray(logits, np.float64)
    ids, weights = [], []
    for row in logits:
        scores = score(row)
        chosen = choose(scores if bias is None else scores + np.asarray(bias, np.float64), top_k, **groups)
        ids.append(chosen)
        weights.append(weigh(scores[chosen]) * scale)
    return np.array(ids, np.int32), np.array(weights)


def sort_by_expert(ids, num_experts):
    """(order, inverse, counts) by walking through the slots once per expert."""
    flat = [int(i) for i in np.asarray(ids).reshape(-1)]
    order = [slot for expert in range(num_experts) for slot, i in enumerate(flat) if i == expert]
    counts = [sum(i == expert for i in flat) for expert in range(num_experts)]
    order += [slot for slot, i in enumerate(flat) if not 0 <= i < num_experts]
    inverse = np.empty(len(flat), np.int32)
    for row, slot in enumerate(order):
        inverse[slot] = row
    return np.array(order, np.int32), inverse.reshape(np.shape(ids)), np.array(counts, np.int32)


def expert(row, gate, up, down, activation, gate_bias=0.0, up_bias=0.0, down_bias=0.0):
    """One expert on one row: gate and up (K, M), down (M, K)."""
    return activation(row @ gate + gate_bias, row @ up + up_bias) @ down + down_bias


def moe(x, ids, weights, gates, ups, downs, activation=swiglu, biases=None):
    """The weighted sum of each token's experts. biases: (gate (E, M), up (E, M), down (E, K)) or None."""
    x, gates, ups, downs = (np.asarray(a, np.float64) for a in (x, gates, ups, downs))
    result = np.zeros_like(x)
    for t, row in enumerate(x):
        for e, weight in zip(np.asarray(ids)[t], np.asarray(weights, np.float64)[t], strict=True):
            if 0 <= e < len(gates):
                bias = [np.asarray(b, np.float64)[e] for b in biases] if biases else []
                result[t] += weight * expert(row, gates[e], ups[e], downs[e], activation, *bias)
    return result


def dense_experts(x, ids, weights, gates, ups, downs, activation=lambda g, u: jax.nn.silu(g) * u, biases=None):
    """`moe` in jax.numpy: every expert on every token, weighted by a dense (T, E) matrix."""
    gate, up = (jnp.einsum("td,edm->tem", x, w, precision="highest") for w in (gates, ups))
    if biases is not None:
        gate, up = gate + biases[0], up + biases[1]
    y = jnp.einsum("tem,emd->ted", activation(gate, up), downs, precision="highest")
    if biases is not None:
        y = y + biases[2]
    mine = ids[:, :, None] == jnp.arange(gates.shape[0])
    return jnp.einsum("te,ted->td", jnp.where(mine, weights[:, :, None], 0).sum(1), y, precision="highest")


def assert_close(actual, expected, tolerance=2e-5):
    """Compares row by row (last axis), each error relative to the RMS of the expected row.

    A row that should be zero must be zero exactly. A fixed absolute tolerance would pass errors in small rows.
    """
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    rms = np.sqrt(np.mean(expected**2, axis=-1, keepdims=True))
    error = np.abs(actual - expected)
    bad = ~(error <= tolerance * rms)
    assert not bad.any(), (
        f"{bad.sum()} of {bad.size} values differ, first at {np.argwhere(bad)[0]}: {error[bad][0]:.3g}"
    )


def primitives(jaxpr):
    """The names of all primitives in a jaxpr, those of inner jaxprs included."""
    names = []
    for equation in jaxpr.eqns:
        names.append(str(equation.primitive))
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                names += primitives(inner)
    return names


def assert_no_scatter_add(function, *arguments):
    """Fails if the traced function adds by scattering, or scatters with indices that may coincide."""
    names = primitives(jax.make_jaxpr(function)(*arguments).jaxpr)
    assert len(names) > 5
    assert not [n for n in names if n.startswith("scatter") and n != "scatter"], sorted(set(names))
