"""The choice of implementation: names, objects with the interface, and the program that comes of it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax import export, lax
from test_ragged_dot import everything, normal

import jax_ggemm
from jax_ggemm import binding, xla

LHS, RHS, SIZES = normal((14, 5)), normal((3, 5, 7)), np.array([4, 0, 8], np.int32)


@dataclasses.dataclass(frozen=True)
class Recorder:
    """An implementation that computes in plain JAX and takes only so many columns."""

    name: str = "recorder"
    limit: int = 100
    calls: list[Any] = dataclasses.field(default_factory=list, compare=False)

    def unsupported(self, call: Any, operands: Any) -> str | None:
        return f"more than {self.limit} columns" if operands.lhs.shape[1] > self.limit else None

    def __call__(self, call: Any, operands: Any) -> jax.Array:
        self.calls.append((call.product.value, operands.batch_rank))
        return xla.grouped_product(call, operands)


def test_an_object_with_the_interface_runs_all_three_products() -> None:
    recorder = Recorder()
    assert isinstance(recorder, binding.Implementation)
    ct = normal((14, 7))
    result, d_lhs, d_rhs = everything(LHS, RHS, SIZES, ct, implementation=recorder)
    oracle.assert_close(result, oracle.forward(LHS, RHS, SIZES), SIZES)
    oracle.assert_close(d_lhs, oracle.d_lhs(ct, RHS, SIZES), SIZES)
    oracle.assert_close(d_rhs, oracle.d_rhs(LHS, ct, SIZES, 3))
    assert set(recorder.calls) == {("dlhs", 0), ("drhs", 0), ("forward", 0)}


class Precisions(Recorder):
    """Records what precision each product is asked for."""

    def __call__(self, call: Any, operands: Any) -> jax.Array:
        self.calls.append(call.precision)
        return xla.grouped_product(call, operands)


@pytest.mark.parametrize(
    ("default", "given", "seen"),
    [
        (None, None, None),
        ("highest", None, lax.Precision.HIGHEST),
        ("tensorfloat32", None, lax.Precision.HIGH),
        ("F32_F32_F32", None, lax.DotAlgorithmPreset.F32_F32_F32),
        ("highest", "default", lax.Precision.DEFAULT),
    ],
)
def test_a_call_without_precision_takes_the_default_one(default: str | None, given: str | None, seen: Any) -> None:
    """As in `jax.lax`; and its gradients have it, though they are formed elsewhere."""
    recorder = Precisions()
    product = functools.partial(jax_ggemm.ragged_dot, precision=given, implementation=recorder)
    with jax.default_matmul_precision(default):
        _, pullback = jax.vjp(lambda lhs, rhs: product(lhs, rhs, jnp.asarray(SIZES)), LHS, RHS)
    with jax.default_matmul_precision("high"):
        pullback(jnp.ones((14, 7)))
    assert set(recorder.calls) == {seen}
    assert len(recorder.calls) >= 3


def test_an_object_sees_a_vmap_as_batch_axes() -> None:
    recorder = Recorder(name="batched")
    run = jax.vmap(functools.partial(jax_ggemm.ragged_dot, implementation=recorder), (0, None, None))
    jax.jit(run)(LHS[None], RHS, SIZES)
    assert recorder.calls[-1] == ("forward", 1)


def test_the_reason_of_an_object_that_cannot_is_told() -> None:
    with pytest.raises(NotImplementedError, match="more than 3 columns"):
        jax_ggemm.ragged_dot(LHS, RHS, SIZES, implementation=Recorder(limit=3))


def test_the_default_on_a_cpu_is_the_native_handler() -> None:
    text = jax.jit(jax_ggemm.ragged_dot).lower(LHS, RHS, SIZES).as_text()
    assert "custom_call @jax_ggemm" in text


def test_the_default_falls_back_to_plain_jax_for_other_dtypes() -> None:
    lhs, rhs = LHS.astype(jnp.int8), RHS.astype(jnp.int8)
    text = jax.jit(jax_ggemm.ragged_dot).lower(lhs, rhs, SIZES).as_text()
    assert "custom_call @jax_ggemm" not in text


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_programs_for_several_platforms_export_and_run_on_this_one(implementation: Any) -> None:
    run = jax.jit(functools.partial(jax_ggemm.ragged_dot, implementation=implementation))
    exported = export.export(run, platforms=["cpu", "cuda"], disabled_checks=jax_ggemm.export_checks)(LHS, RHS, SIZES)
    oracle.assert_close(exported.call(LHS, RHS, SIZES), oracle.forward(LHS, RHS, SIZES), SIZES)


def test_the_cpu_implementation_is_refused_for_another_platform() -> None:
    run = jax.jit(functools.partial(jax_ggemm.ragged_dot, implementation="cpu"))
    with pytest.raises(NotImplementedError, match="cpu"):
        export.export(run, platforms=["cuda"], disabled_checks=jax_ggemm.export_checks)(LHS, RHS, SIZES)


CONTEXTS = {
    "strict_dtype_promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "no_rank_promotion": lambda: jax.numpy_rank_promotion("raise"),
    "tracer_leak_checks": lambda: jax.check_tracer_leaks(True),
    "nan_checks": lambda: jax.debug_nans(True),
    "no_jit": jax.disable_jit,
}


@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS.keys())
def test_strict_settings_of_jax_are_met(ragged_dot: Any, context: Any) -> None:
    bias = jnp.ones((3, 7))

    def loss(lhs: Any, rhs: Any, bias: Any) -> jax.Array:
        return jnp.sum(ragged_dot(lhs, rhs, SIZES, bias=bias) ** 2)

    with context():
        got = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(LHS, RHS, bias)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(got))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.float8_e4m3fn], ids=str)
def test_a_bias_of_any_float_has_a_gradient_of_its_dtype(ragged_dot: Any, dtype: Any) -> None:
    bias = (normal((3, 7)) / 4).astype(dtype)
    run = jax.jit(jax.value_and_grad(lambda b: jnp.sum(ragged_dot(LHS, RHS, SIZES, bias=b))))
    value, gradient = run(bias)
    np.testing.assert_allclose(value, oracle.forward(LHS, RHS, SIZES, bias=bias).value.sum(), rtol=1e-4)
    assert gradient.dtype == dtype
    np.testing.assert_array_equal(np.asarray(gradient, np.float32), np.repeat([[4.0], [0.0], [8.0]], 7, axis=1))


def test_no_implicit_transfer_from_or_to_the_host(ragged_dot: Any) -> None:
    """Sizes stay on the device."""
    run = jax.jit(jax.value_and_grad(lambda x, w, s: jnp.sum(ragged_dot(x, w, s))))
    arrays = jax.device_put((LHS, RHS, SIZES))
    run(*arrays)
    with jax.transfer_guard("disallow"):
        run(*arrays)


def test_no_implicit_transfer_outside_jit_either(ragged_dot: Any) -> None:
    """As with lax: the offset that is not given is no host constant."""
    arrays = jax.device_put((LHS, RHS, SIZES))
    ragged_dot(*arrays)
    with jax.transfer_guard("disallow"):
        ragged_dot(*arrays)
