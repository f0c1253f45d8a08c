"""Programs for a GPU, as far as a machine without one can tell: which calls take the kernels, and what is lowered."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax import export, lax
from test_ragged_dot import normal
from wide_cute import CpuStandIn

import jax_ggemm
from jax_ggemm import cute, objects, pieces
from jax_ggemm.products import Call, Operands, Product

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32


def call_of(**changes: Any) -> tuple[Call, Operands]:
    dtype, k, n = changes.get("dtype", BF16), changes.get("k", 64), changes.get("n", 128)
    lhs, rhs = changes.get("lhs", dtype), changes.get("rhs", dtype)
    operands = Operands(
        jnp.zeros((changes.get("m", 32), k), lhs), jnp.zeros((2, k, n), rhs), jnp.ones(2, jnp.int32), jnp.int32(0)
    )
    out_dtype = np.dtype(changes.get("out_dtype", dtype))
    return Call(Product.FORWARD, out_dtype, 2, changes.get("precision"), "cute"), operands


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Programs can be lowered for a GPU, though not run."""
    monkeypatch.setattr(cute, "_architecture", lambda: "sm_90a")
    monkeypatch.setattr(objects, "unavailable", lambda spec, arch, runs_here: None)
    monkeypatch.setattr(objects, "ensure", objects.key)
    monkeypatch.setattr(objects, "load", lambda spec, arch: (objects.key(spec, arch), b"\x7fELF\0object\xff"))
    jax.clear_caches()
    with jax.default_matmul_precision(None):  # it is "highest" on a machine with a GPU: see conftest.py
        yield


@pytest.mark.usefixtures("pretended_gpu")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": F32}, "lhs is float32"),
        ({"lhs": jnp.int8}, "lhs is int8"),
        ({"rhs": jnp.float8_e4m3fn}, "rhs is float8_e4m3fn"),
        ({"out_dtype": jnp.float8_e4m3fn}, "the result is float8_e4m3fn"),
        ({"precision": lax.DotAlgorithmPreset.F32_F32_F32}, "names an algorithm"),
    ],
)
def test_what_the_kernels_do_not_take_is_said(changes: dict[str, Any], reason: str) -> None:
    message = cute.unsupported(*call_of(**changes))
    assert message is not None
    assert reason in message


@pytest.mark.usefixtures("pretended_gpu")
@pytest.mark.parametrize(
    "changes",
    [
        {"k": 60},
        {"n": 1},
        {"m": 0},
        {"k": 0},
        {"out_dtype": F32},
        {"out_dtype": F16},
        {"dtype": F16, "out_dtype": BF16},
        {"lhs": F32},
        {"lhs": F16},
        {"lhs": F32, "rhs": F32},
        {"lhs": F32, "out_dtype": F32},
        {"precision": lax.Precision.HIGHEST},
    ],
    ids=str,
)
def test_what_they_take(changes: dict[str, Any]) -> None:
    assert cute.unsupported(*call_of(**changes)) is None


def test_the_missing_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cute, "_architecture", lambda: None)
    assert "no NVIDIA GPU" in str(cute.unsupported(*call_of()))


def lowered(function: Any, *args: Any) -> str:
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def kernels(text: str) -> list[str]:
    """(product, operands -> result) of each custom call."""
    calls = re.findall(r"custom_call @jax_ggemm\(.*?product = \"(\w+)\".*? : (\(.*)", text)
    return [f"{product} {types}" for product, types in calls]


def arrays(k: int = 64, n: int = 128, dtype: Any = BF16, rhs: Any = None) -> tuple[jax.Array, ...]:
    return jnp.zeros((32, k), dtype), jnp.zeros((2, k, n), rhs or dtype), jnp.ones(2, jnp.int32)


forced = functools.partial(jax_ggemm.ragged_dot, implementation="cute")


@pytest.mark.usefixtures("pretended_gpu")
def test_a_training_step_is_three_kernels() -> None:
    step = jax.value_and_grad(lambda *args: forced(*args).astype(F32).sum(), (0, 1))
    text = lowered(step, *arrays())
    assert [line.split()[0] for line in kernels(text)] == ["forward", "dlhs", "drhs"]
    assert "pad" not in text
    assert 'keys = {sm_90a = "' in text
    assert "objects" not in text


@pytest.mark.usefixtures("pretended_gpu")
def test_columns_are_padded_once_and_cut_off_again() -> None:
    step = jax.value_and_grad(lambda *args: forced(*args).astype(F32).sum(), (0, 1))
    assert kernels(lowered(step, *arrays(5, 9))) == [
        "forward (tensor<1x32x8xbf16>, tensor<1x2x8x16xbf16>, tensor<1x2xi32>, tensor<1xi32>) -> tensor<1x32x16xbf16>",
        "dlhs (tensor<1x32x16xbf16>, tensor<1x2x8x16xbf16>, tensor<1x2xi32>, tensor<1xi32>) -> tensor<1x32x8xbf16>",
        "drhs (tensor<1x32x8xbf16>, tensor<1x32x16xbf16>, tensor<1x2xi32>, tensor<1xi32>) -> tensor<1x2x8x16xbf16>",
    ]
    assert lowered(forced, *arrays(5, 16)).count("stablehlo.pad") == 2


@pytest.mark.usefixtures("pretended_gpu")
@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, 0), (0, None, None), (None, 0, None), (None, None, 0)])
def test_a_batch_is_one_kernel_and_copies_no_weights(axes: tuple[int | None, ...]) -> None:
    args = [jnp.stack([array] * 5) if axis == 0 else array for axis, array in zip(axes, arrays(), strict=True)]
    (call,) = kernels(lowered(jax.vmap(forced, axes), *args))
    batch = [5 if axis == 0 else 1 for axis in axes]
    operands = f"(tensor<{batch[0]}x32x64xbf16>, tensor<{batch[1]}x2x64x128xbf16>, tensor<5x2xi32>, tensor<5xi32>)"
    assert call == f"forward {operands} -> tensor<5x32x128xbf16>"


@pytest.mark.usefixtures("pretended_gpu")
def test_nested_batches_repeat_rows_but_never_weights() -> None:
    lhs, rhs, sizes = arrays()
    rows = jax.vmap(jax.vmap(forced, (0, None, None)), (None, None, 0))
    (call,) = kernels(lowered(rows, jnp.stack([lhs] * 3), rhs, jnp.stack([sizes] * 5)))
    assert call.startswith("forward (tensor<15x32x64xbf16>, tensor<1x2x64x128xbf16>,")
    weights = jax.vmap(jax.vmap(forced, (0, None, None)), (None, 0, None))
    text = lowered(weights, jnp.stack([lhs] * 3), jnp.stack([rhs] * 5), sizes)
    (call,) = kernels(text)  # in a loop over the weights
    assert call.startswith("forward (tensor<3x32x64xbf16>, tensor<1x2x64x128xbf16>,")
    assert "15x2x64x128" not in text
    assert "while" in text


@pytest.mark.usefixtures("pretended_gpu")
@pytest.mark.parametrize(
    ("lhs", "rhs", "out", "precision", "count"),
    [
        (BF16, BF16, F32, None, 1),
        (BF16, BF16, F16, None, 1),
        (F16, F16, F16, "highest", 1),
        (F32, BF16, BF16, None, 2),
        (F32, BF16, F32, "highest", 3),
        (BF16, F32, BF16, ("default", "highest"), 3),
        (F16, BF16, F32, None, 2),
        (F32, F16, F32, None, 3),
        (F32, F32, BF16, None, 3),
        (F32, F32, BF16, "highest", 6),
    ],
)
def test_wide_operands_are_sums_of_bfloat16(lhs: Any, rhs: Any, out: Any, precision: Any, count: int) -> None:
    run = functools.partial(forced, precision=precision, preferred_element_type=out)
    calls = kernels(lowered(run, *arrays(dtype=lhs, rhs=rhs)))
    assert len(calls) == count
    narrow = "f16" if (lhs, rhs) == (F16, F16) else "bf16"
    assert all(re.match(rf"forward \(tensor<1x32x64x{narrow}>, tensor<1x2x64x128x{narrow}>", call) for call in calls)


@pytest.mark.usefixtures("pretended_gpu")
def test_gradients_of_wide_results_take_kernels_too() -> None:
    """A float32 cotangent of bfloat16 operands, and of a bias."""

    def loss(lhs: Any, rhs: Any, bias: Any) -> jax.Array:
        return forced(lhs, rhs, jnp.ones(2, jnp.int32), bias=bias, preferred_element_type=F32).sum()

    lhs, rhs, _ = arrays()
    text = lowered(jax.grad(loss, (0, 1, 2)), lhs, rhs, jnp.zeros((2, 128)))
    # Two pieces for each gradient of the operands, and three for the sums of the bias, which lose nothing.
    assert sorted(line.split()[0] for line in kernels(text)) == ["dlhs"] * 2 + ["drhs"] * 5
    assert sum("tensor<1x32x8xbf16>" in line for line in kernels(text)) == 3


@pytest.mark.usefixtures("pretended_gpu")
def test_without_a_name_each_platform_gets_its_own() -> None:
    traced = jax.jit(jax_ggemm.ragged_dot).trace(*arrays())
    assert "keys = " in traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "keys = " not in traced.lower(lowering_platforms=("cpu",)).as_text()


@pytest.mark.usefixtures("pretended_gpu")
def test_float32_goes_to_plain_jax_and_is_refused_by_name() -> None:
    text = lowered(jax_ggemm.ragged_dot, *arrays(dtype=F32))
    assert not kernels(text)
    with pytest.raises(NotImplementedError, match="lhs is float32, rhs and the result too"):
        lowered(forced, *arrays(dtype=F32))


@pytest.mark.usefixtures("pretended_gpu")
def test_a_product_that_was_not_named_but_comes_of_it_is_refused_where_it_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By name, nothing falls back silently; what is not used does no harm."""
    supported = cute.unsupported
    monkeypatch.setattr(cute, "unsupported", lambda c, o: "too hot" if c.product is Product.DRHS else supported(c, o))
    loss = lambda *args: forced(*args).astype(F32).sum()  # noqa: E731
    assert [line.split()[0] for line in kernels(lowered(jax.grad(loss, 0), *arrays()))] == ["dlhs"]
    with pytest.raises(NotImplementedError, match=r"implementation='cute'.*drhs.*gradient.*too hot"):
        lowered(jax.grad(loss, 1), *arrays())
    default = lambda *args: jax_ggemm.ragged_dot(*args).astype(F32).sum()  # noqa: E731
    assert [line.split()[0] for line in kernels(lowered(jax.grad(default, (0, 1)), *arrays()))] == ["dlhs"]


@pytest.mark.usefixtures("pretended_gpu")
@pytest.mark.parametrize("shape", [(0, 8, 8, 2), (4, 0, 8, 2), (4, 8, 0, 2), (4, 8, 8, 0)])
def test_empty_operands_are_answered_without_a_kernel(shape: tuple[int, ...]) -> None:
    m, k, n, g = shape
    text = lowered(forced, jnp.zeros((m, k), BF16), jnp.zeros((g, k, n), BF16), jnp.ones(g, jnp.int32))
    assert not kernels(text)


@pytest.mark.usefixtures("pretended_gpu")
@pytest.mark.parametrize("symbolic", ["lhs rows", "groups", "both"])
def test_the_kernels_take_symbolic_rows_and_groups(symbolic: str) -> None:
    m, g = export.symbolic_shape("m, g")
    m, g = (m if symbolic != "groups" else 32), (g if symbolic != "lhs rows" else 2)
    shapes = [jax.ShapeDtypeStruct(*of) for of in (((m, 60), BF16), ((g, 60, 128), BF16), ((g,), jnp.int32))]
    step = jax.jit(jax.grad(lambda *args: forced(*args).astype(F32).sum(), (0, 1)))
    exported = export.export(step, platforms=["cuda"], disabled_checks=jax_ggemm.export_checks)(*shapes)
    assert exported.mlir_module().count("@jax_ggemm(") == 2


def test_symbolic_columns_are_refused() -> None:
    (k,) = export.symbolic_shape("k")
    shapes = [jax.ShapeDtypeStruct(*of) for of in (((32, k), BF16), ((2, k, 128), BF16), ((2,), jnp.int32))]
    with pytest.raises(NotImplementedError, match="k = k is symbolic"):
        export.export(jax.jit(forced), platforms=["cuda"], disabled_checks=jax_ggemm.export_checks)(*shapes)


def test_a_program_for_named_architectures_needs_no_gpu_and_holds_its_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "unavailable", lambda spec, arch, runs_here: None)
    monkeypatch.setattr(objects, "load", lambda spec, arch: (objects.key(spec, arch), b"\x7fELF\0object\xff"))
    kernels_of_hopper = jax_ggemm.GpuKernels(("sm_90a",))
    step = jax.jit(
        jax.grad(lambda *a: jax_ggemm.ragged_dot(*a, implementation=kernels_of_hopper).astype(F32).sum(), (0, 1))
    )
    exported = export.export(step, platforms=["cuda", "cpu"], disabled_checks=jax_ggemm.export_checks)(*arrays())
    blob = exported.serialize()
    assert b"\x7fELF\0object\xff" in blob
    loaded = export.deserialize(blob)
    lhs, rhs, sizes = normal((32, 64), BF16), normal((2, 64, 128), BF16), np.array([20, 5], np.int32)
    d_lhs, d_rhs = loaded.call(lhs, rhs, sizes)  # on this machine's CPU
    oracle.assert_close(d_lhs, oracle.d_lhs(np.ones((32, 128)), rhs, sizes), sizes)
    oracle.assert_close(d_rhs, oracle.d_rhs(lhs, np.ones((32, 128)), sizes, 2))


@pytest.mark.parametrize("architectures", [(), ("sm_80",), ("sm_90a", "hopper")])
def test_unknown_architectures_are_refused(architectures: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="architectures must be some of"):
        jax_ggemm.GpuKernels(architectures)


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_pieces_add_up_to_the_whole(dtype: Any) -> None:
    values = np.random.default_rng(0).standard_normal(4000) * 10.0 ** np.random.default_rng(1).uniform(-20, 30, 4000)
    with np.errstate(over="ignore"):
        whole = np.concatenate([values, [0, -0.0, 3.4e38, -3.4e38, 1 + 2.0**-23, 65504]]).astype(dtype)
    whole = whole[np.isfinite(whole)]
    parts = jax.jit(pieces.split, static_argnums=1)(
        jnp.asarray(whole), pieces.count(np.dtype(dtype), lax.Precision.HIGHEST)
    )
    assert all(np.isfinite(np.asarray(part, np.float32)).all() for part in parts)
    np.testing.assert_array_equal(sum(np.asarray(part, np.float64) for part in parts), whole.astype(np.float64))
    if dtype == F32:
        two = jax.jit(pieces.split, static_argnums=1)(jnp.asarray(whole), pieces.count(np.dtype(dtype), None))
        error = np.abs(sum(np.asarray(part, np.float64) for part in two) - whole.astype(np.float64))
        assert (error <= 2.0**-16 * np.abs(whole.astype(np.float64))).all()


def test_what_is_not_finite_is_in_the_first_piece() -> None:
    first, *rest = pieces.split(jnp.array([np.nan, np.inf, -np.inf, 1.0], F32), 3)
    np.testing.assert_array_equal(np.asarray(first, np.float32), [np.nan, np.inf, -np.inf, 1])
    assert not any(np.asarray(part, np.float32).any() for part in rest)


@pytest.mark.parametrize("precision", [None, "highest"])
def test_infinite_weights_meet_pieces_of_zero(precision: Any) -> None:
    """1.0 has no second piece: times infinity that would be NaN."""
    lhs, rhs = jnp.ones((4, 8), F32), jnp.ones((1, 8, 8), BF16).at[0, 3, 5].set(jnp.inf)
    call = Call(Product.FORWARD, np.dtype(F32), 1, lax.Precision(precision) if precision else None, None)
    got = cute.grouped_product(call, Operands(lhs, rhs, jnp.array([4]), jnp.int32(0)), CpuStandIn())
    np.testing.assert_array_equal(got, np.where(np.arange(8) == 5, np.inf, 8)[None].repeat(4, 0))


def test_default_precision_of_a_mixed_product_keeps_16_bits() -> None:
    lhs, rhs, sizes = normal((200, 96), F32), normal((3, 96, 40), BF16), np.array([100, 0, 60], np.int32)
    call = Call(Product.FORWARD, np.dtype(F32), 3, None, None)
    got = cute.grouped_product(call, Operands(lhs, rhs, jnp.asarray(sizes), jnp.int32(0)), CpuStandIn())
    want = oracle.forward(lhs, rhs, sizes)
    limit = dataclasses.replace(want, scale=want.scale * 2.0**7)  # 2^-16 in place of 2^-23
    oracle.assert_close(got, limit, sizes)


def test_a_program_for_hopper_is_exported_without_a_gpu(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With kernels that the compiler of this machine makes."""
    pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (m,) = export.symbolic_shape("m")
    shapes = [jax.ShapeDtypeStruct(*of) for of in (((m, 60), BF16), ((3, 60, 96), BF16), ((3,), jnp.int32))]
    run = jax.jit(functools.partial(jax_ggemm.ragged_dot, implementation=jax_ggemm.GpuKernels(("sm_90a",))))
    exported = export.export(run, platforms=["cuda"], disabled_checks=jax_ggemm.export_checks)(*shapes)
    (made,) = objects.cache_directory().glob("*.o")
    data = objects.read(made)
    assert data is not None
    blob = exported.serialize()
    assert blob.count(data) == 1
    assert made.stem.encode() in blob
