"""Public bug reports about grouped products, each as its small input; numbers are those of docs and trackers named."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from test_ragged_dot import everything, normal


@pytest.mark.parametrize(
    ("m", "k", "n", "sizes"),
    [(16, 64, 32, [8, 0, 8, 0]), (32, 64, 43, [5, 6, 5, 6, 5, 5] + [0] * 12)],
    ids=["half_empty", "six_of_eighteen"],
)
def test_tokamax_887_weight_gradients_of_empty_groups_are_zero(
    implementation: Any, m: int, k: int, n: int, sizes: list[int]
) -> None:
    lhs, rhs = normal((m, k), jnp.bfloat16), normal((len(sizes), k, n), jnp.bfloat16)
    ct = jnp.ones((m, n), jnp.bfloat16)
    d_rhs = everything(lhs, rhs, jnp.array(sizes), ct, implementation=implementation)[2]
    np.testing.assert_array_equal(np.asarray(d_rhs)[np.array(sizes) == 0], 0)
    oracle.assert_close(d_rhs, oracle.d_rhs(lhs, ct, sizes, len(sizes)))


def test_cutlass_2674_contractions_over_no_rows_write_zeros(implementation: Any) -> None:
    lhs, ct = normal((32, 16), jnp.bfloat16), normal((32, 16), jnp.bfloat16)
    rhs = normal((5, 16, 16), jnp.bfloat16)
    sizes = np.array([0, 8, 8, 0, 16])
    d_rhs = everything(lhs, rhs, sizes, ct, implementation=implementation)[2]
    np.testing.assert_array_equal(np.asarray(d_rhs)[[0, 3]], 0)
    oracle.assert_close(d_rhs, oracle.d_rhs(lhs, ct, sizes, 5))


def test_cutlass_2674_a_large_call_leaves_nothing_behind_for_a_small_one(implementation: Any) -> None:
    large = normal((2048, 64)), normal((8, 64, 96)), np.full(8, 256), normal((2048, 96))
    small = normal((28, 64)), normal((6, 64, 96)), np.array([13, 0, 7, 5, 0, 3]), normal((28, 96))
    for _ in range(3):
        jax.block_until_ready(everything(*large, implementation=implementation))
        result, _, d_rhs = everything(*small, implementation=implementation)
        np.testing.assert_array_equal(np.asarray(d_rhs)[[1, 4]], 0)
        oracle.assert_close(d_rhs, oracle.d_rhs(small[0], small[3], small[2], 6))
        oracle.assert_close(result, oracle.forward(*small[:3]), small[2])


def test_pytorch_154557_rows_past_the_last_group_are_zero_whatever_they_hold(implementation: Any) -> None:
    sizes = np.array([5, 0, 7, 4])
    lhs = normal((24, 32)).at[16:].set(jnp.nan)
    rhs, ct = normal((4, 32, 40)), normal((24, 40)).at[16:].set(jnp.nan)
    poison = [jnp.full((24, 40), jnp.nan) for _ in range(8)]
    jax.block_until_ready(poison)
    del poison
    result, d_lhs, d_rhs = everything(lhs, rhs, sizes, ct, implementation=implementation)
    np.testing.assert_array_equal(result[16:], 0)
    np.testing.assert_array_equal(d_lhs[16:], 0)
    assert np.isfinite(d_rhs).all()
    scattered = jnp.zeros((6, 40)).at[jnp.arange(24) % 6].add(result)  # what torchtitan did with them
    assert np.isfinite(scattered).all()


@pytest.mark.parametrize("shape", [(), (1,)])
def test_jax_34168_group_offset_of_a_sharded_expert_axis(implementation: Any, shape: tuple[int, ...]) -> None:
    sizes = np.array([3, 2, 4, 3])
    lhs, rhs, ct = normal((12, 8)), normal((2, 8, 4)), normal((12, 4))
    result, d_lhs, d_rhs = everything(lhs, rhs, sizes, ct, jnp.full(shape, 2), implementation=implementation)
    np.testing.assert_array_equal(result[:5], 0)
    np.testing.assert_allclose(result[5:9], lhs[5:9] @ rhs[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(result[9:], lhs[9:] @ rhs[1], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(d_lhs[:5], 0)
    oracle.assert_close(d_lhs, oracle.d_lhs(ct, rhs, sizes, 2), sizes)
    assert d_rhs.shape == (2, 8, 4)
    oracle.assert_close(d_rhs, oracle.d_rhs(lhs, ct, sizes, 2, 2))


def test_flashinfer_3103_operands_of_other_strides_are_read_as_they_are(implementation: Any) -> None:
    """swapaxes of weights, a column slice, a transposed lhs and a zero-stride cotangent, in one program."""
    sizes = np.array([4, 0, 7])
    w_enk, w13, x_t = normal((3, 9, 6)), normal((3, 6, 18)), normal((6, 12))

    @jax.jit
    def run(w_enk: Any, w13: Any, x_t: Any, scalar: Any) -> Any:
        ct = jnp.broadcast_to(scalar, (12, 9))
        first = everything(x_t.T, w_enk.swapaxes(1, 2), sizes, ct, implementation=implementation)
        second = everything(x_t.T, w13[..., :9], sizes, ct, implementation=implementation)
        return first, second

    for got, rhs in zip(run(w_enk, w13, x_t, 2.0), (np.swapaxes(w_enk, 1, 2), w13[..., :9]), strict=True):
        lhs, ct = np.asarray(x_t).T, np.full((12, 9), 2.0)
        oracle.assert_close(got[0], oracle.forward(lhs, rhs, sizes), sizes)
        oracle.assert_close(got[1], oracle.d_lhs(ct, rhs, sizes), sizes)
        oracle.assert_close(got[2], oracle.d_rhs(lhs, ct, sizes, 3))


def test_pytorch_159620_cotangents_that_are_halves_of_a_split(ragged_dot: Any) -> None:
    sizes = np.array([4, 0, 7])
    lhs, rhs, ct = normal((12, 6)), normal((3, 6, 16)), normal((12, 8))

    def loss(lhs: Any, rhs: Any) -> jax.Array:
        gate, up = jnp.split(ragged_dot(lhs, rhs, sizes), 2, axis=1)
        return jnp.sum(gate * ct + up * up)

    d_lhs, d_rhs = jax.jit(jax.grad(loss, (0, 1)))(lhs, rhs)
    full = np.concatenate([ct, 2 * oracle.forward(lhs, rhs[..., 8:], sizes).value], axis=1)
    np.testing.assert_allclose(d_lhs, oracle.d_lhs(full, rhs, sizes).value, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(d_rhs, oracle.d_rhs(lhs, full, sizes, 3).value, rtol=1e-4, atol=1e-4)


def test_sonic_moe_60_new_group_sizes_compile_nothing_and_a_new_m_one_program(ragged_dot: Any) -> None:
    rhs = normal((4, 6, 9))
    step = jax.jit(ragged_dot)
    for count, m in enumerate((1000, 1001, 1017), start=1):
        for sizes in ([m, 0, 0, 0], [1, 2, 3, 4], [0, 0, 0, 0], [m // 2, m // 4, 0, 7], [250] * 4):
            step(normal((m, 6)), rhs, np.array(sizes, np.int32))
        assert step._cache_size() == count


def biggest_arrays(text: str) -> list[int]:
    """The element counts of all arrays in an HLO program, largest first."""
    shapes = set(re.findall(r"\b(?:f|bf|s|u|pred)\d*\[([\d,]+)\]", text))
    return sorted((int(np.prod([int(d) for d in shape.split(",")])) for shape in shapes), reverse=True)


def test_marin_5394_no_temporary_of_groups_times_rows_times_columns(ragged_dot: Any) -> None:
    """The dense expansion of lax takes g * m * k elements; compiled only, not run."""
    g, m, k, n = 64, 32768, 1024, 512
    shapes = (
        jax.ShapeDtypeStruct((m, k), jnp.bfloat16),
        jax.ShapeDtypeStruct((g, k, n), jnp.bfloat16),
        jax.ShapeDtypeStruct((g,), jnp.int32),
    )

    def loss(lhs: Any, rhs: Any, sizes: Any) -> jax.Array:
        return jnp.sum(ragged_dot(lhs, rhs, sizes).astype(jnp.float32) ** 2)

    compiled = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*shapes).compile()
    linear = m * (k + n) + g * k * n
    assert biggest_arrays(compiled.as_text())[0] <= 2 * max(m * k, m * n, g * k * n)
    assert compiled.memory_analysis().temp_size_in_bytes <= 24 * linear < g * m * k * 2
