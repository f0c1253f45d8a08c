"""The GPU kernels on a GPU: every product and configuration over hostile group sizes, gradients, vmap and scan."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax import export, lax

import jax_ggemm
from jax_ggemm import cute, native, objects, tuned
from jax_ggemm.kernel import config
from jax_ggemm.products import Call, Operands, Product

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(cute._architecture() is None, reason="no NVIDIA GPU"),
]

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32


@dataclasses.dataclass(frozen=True)
class Groups:
    """Rows, group sizes, the group of the first weight matrix, and the number of weight matrices."""

    m: int
    sizes: tuple[int, ...]
    offset: int = 0
    weights: int | None = None

    @property
    def num_weights(self) -> int:
        return len(self.sizes) if self.weights is None else self.weights


HOSTILE = {
    "even": Groups(256, (64, 64, 64, 64)),
    "empties": Groups(300, (0, 100, 0, 0, 200, 0)),
    "single_rows": Groups(40, (1,) * 40),
    "one_group": Groups(500, (0, 500, 0)),
    "tail_without_group": Groups(400, (50, 70)),
    "past_the_end": Groups(200, (150, 150, 90)),
    "negative": Groups(260, (-5, 100, -1, 128, 7)),
    "all_empty": Groups(64, (0, 0, 0)),
    "overflowing": Groups(128, (2**31 - 1, 2**31 - 1, 5)),
    "one_row": Groups(1, (1,)),
    "hot": Groups(3000, (10, 2000, 0, 700, 5)),
    "offset": Groups(333, (50, 60, 70, 80, 20), 2, 2),
    "offset_past_the_end": Groups(128, (60, 60), 5, 2),
    "offset_negative": Groups(128, (60, 60), -1, 3),
    "many_groups": Groups(1000, tuple(np.random.default_rng(0).multinomial(990, np.ones(100) / 100).tolist())),
}
COLUMNS = [(64, 64), (200, 136), (72, 264), (8, 8), (520, 392)]
"""(k, n): multiples of the tiles, tails of both, less than a tile."""


KNOWN = cute.architecture()
CANDIDATES = list(dict.fromkeys(candidate for product in Product for candidate in KNOWN.candidates(product)))


@pytest.fixture(params=CANDIDATES, ids=lambda c: f"{c.tile_m}x{c.tile_n}x{c.cluster}")
def candidate(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A configuration that every call takes whose product has it."""
    pick = tuned.pick

    def wanted(problem: tuned.Problem, arch: str) -> Any:
        return request.param if request.param in KNOWN.candidates(problem.product) else pick(problem, arch)

    monkeypatch.setattr(tuned, "pick", wanted)
    jax.clear_caches()
    return request.param


def check(
    product: Product,
    groups: Groups,
    k: int,
    n: int,
    dtypes: tuple[Any, Any] = (BF16, BF16),
    *,
    bias: bool = False,
    rhs_dtype: Any = None,
    precision: Any = None,
    lost: float = 0,
) -> None:
    """One product against the loop, with NaN in every row of no group and in the memory of the result.

    `dtypes` are those of lhs and the result, `lost` is the error of each operand relative to its size.
    """
    rng = np.random.default_rng([k, n, *np.abs(groups.sizes[:4])])

    def normal(*shape: int, dtype: Any = dtypes[0]) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, dtype=np.float32), dtype)

    rhs_dtype = rhs_dtype or dtypes[0]

    m, weights = groups.m, groups.num_weights
    last = oracle.bounds(groups.sizes, m)[-1][1]
    lhs = normal(m, n if product is Product.DLHS else k).at[last:].set(np.nan)
    if product is Product.DRHS:
        rhs = normal(m, n, dtype=rhs_dtype).at[last:].set(np.nan)
    else:
        rhs = normal(weights, k, n, dtype=rhs_dtype)
    columns = k if product is Product.DLHS else n
    row = jnp.asarray(rng.standard_normal((weights, columns)), F32) if bias else None
    call = Call(product, np.dtype(dtypes[1]), weights, precision, "cute")
    operands = Operands(lhs, rhs, jnp.asarray(groups.sizes, jnp.int32), jnp.int32(groups.offset), row)
    assert cute.unsupported(call, operands) is None
    poison = jnp.full(operands.out_shape(call), np.nan, dtypes[1])
    poison.block_until_ready()
    del poison
    got = jax.jit(cute.grouped_product, static_argnums=0)(call, operands)
    match product:
        case Product.FORWARD:
            want = oracle.forward(lhs, rhs, groups.sizes, groups.offset, row)
        case Product.DLHS:
            want = oracle.forward(lhs, np.swapaxes(np.asarray(rhs), 1, 2), groups.sizes, groups.offset, row)
        case Product.DRHS:
            want = oracle.d_rhs(lhs, rhs, groups.sizes, weights, groups.offset)
    if lost:
        want = dataclasses.replace(want, scale=want.scale * (1 + lost / np.finfo(np.float32).eps))
    oracle.assert_close(got, want, groups.sizes if product.rows_are_ragged else None)


@pytest.mark.usefixtures("candidate")
@pytest.mark.parametrize("product", Product)
def test_hostile_groups(product: Product) -> None:
    for i, groups in enumerate(HOSTILE.values()):
        check(product, groups, *COLUMNS[i % len(COLUMNS)])


SWEEP = [
    (Groups(700, (300, 1, 0, 399)), 136, 200),
    (Groups(129, (129,)), 1024, 8),
    (Groups(513, (64, 65, 63, 128, 129)), 8, 1032),
    (Groups(64, (1, 0, 2, 61)), 264, 256),
]
DTYPES = [(BF16, BF16), (BF16, F32), (F16, F16), (F16, F32)]


@pytest.mark.usefixtures("candidate")
@pytest.mark.parametrize("product", Product)
@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: f"{jnp.dtype(d[0]).name}-{jnp.dtype(d[1]).name}")
def test_dtypes_and_shapes(product: Product, dtypes: tuple[Any, Any]) -> None:
    for groups, k, n in SWEEP:
        check(product, groups, k, n, dtypes)


@pytest.mark.usefixtures("candidate")
@pytest.mark.parametrize("product", [Product.FORWARD, Product.DLHS])
@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: f"{jnp.dtype(d[0]).name}-{jnp.dtype(d[1]).name}")
def test_bias(product: Product, dtypes: tuple[Any, Any]) -> None:
    check(product, Groups(700, (300, 1, 0, 200)), 136, 200, dtypes, bias=True)


MIXES = [(F32, BF16, BF16), (BF16, F32, F32), (F32, F32, BF16), (F16, F32, F16), (BF16, F16, BF16), (BF16, BF16, F16)]


@pytest.mark.parametrize("product", Product)
@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: "-".join(jnp.dtype(dtype).name for dtype in mix))
def test_mixed_dtypes_and_columns_that_tma_cannot_address(product: Product, mix: tuple[Any, ...]) -> None:
    """Of the highest precision: as exact as float32. By default, 16 bits of each operand count."""
    groups, k, n = Groups(300, (70, 0, 129, 60)), 61, 130
    for precision, lost in ((lax.Precision.HIGHEST, 0), (None, 2.0**-16)):
        check(product, groups, k, n, (mix[0], mix[2]), rhs_dtype=mix[1], precision=precision, lost=lost)


@pytest.mark.parametrize("product", Product)
def test_a_larger_problem_with_the_pick(product: Product) -> None:
    sizes = np.random.default_rng(1).multinomial(4096, np.ones(16) / 16)
    check(product, Groups(4096, tuple(sizes.tolist())), 1024, 768)


def _loss(implementation: str) -> Any:
    def loss(lhs: Any, rhs: Any, sizes: Any) -> jax.Array:
        result = jax_ggemm.ragged_dot(lhs, rhs, sizes, implementation=implementation)
        return (result.astype(F32) * jnp.arange(rhs.shape[-1])).sum() / 1000

    return loss


def _assert_alike(got: Any, want: Any) -> None:
    for leaves in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = (np.asarray(leaf, np.float64) for leaf in leaves)
        assert np.linalg.norm(a - b) <= 6e-3 * np.linalg.norm(b)


@pytest.mark.parametrize(
    "axes", [None, (0, 0, 0), (0, None, 0), (0, None, None), (None, 0, 0), (None, 0, None), (None, None, 0)]
)
def test_gradients_alone_and_under_vmap(axes: Any) -> None:
    rng = np.random.default_rng(3)
    batch = [(3,) if axes and axis == 0 else () for axis in axes or (None,) * 3]
    lhs = jnp.asarray(rng.standard_normal((*batch[0], 512, 128)), BF16)
    rhs = jnp.asarray(rng.standard_normal((*batch[1], 6, 128, 256)), BF16)
    sizes = jnp.asarray(rng.multinomial(400, np.ones(6) / 6, size=batch[2] or None), jnp.int32)

    def run(implementation: str) -> Any:
        step = jax.value_and_grad(_loss(implementation), (0, 1))
        return jax.jit(jax.vmap(step, axes) if axes else step)(lhs, rhs, sizes)

    _assert_alike(run("cute"), run("xla"))


def test_new_group_sizes_compile_nothing() -> None:
    traces = []

    @jax.jit
    def run(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        traces.append(1)
        return jax_ggemm.ragged_dot(lhs, rhs, sizes, implementation="cute")

    lhs, rhs = jnp.ones((256, 64), BF16), jnp.ones((4, 64, 128), BF16)
    for sizes in ([64] * 4, [0, 256, 0, 0], [1, 2, 3, 4]):
        result = np.asarray(run(lhs, rhs, jnp.array(sizes, jnp.int32)), np.float32)
        np.testing.assert_array_equal(result[:, 0], 64 * (np.arange(256) < sum(sizes)))
    assert len(traces) == 1


def test_in_a_scan_and_donated() -> None:
    weights = jnp.asarray(np.random.default_rng(5).standard_normal((3, 4, 64, 64)) / 8, BF16)
    sizes = jnp.array([100, 0, 28, 60], jnp.int32)

    @functools.partial(jax.jit, donate_argnums=0, static_argnums=2)
    def run(x: jax.Array, weights: jax.Array, implementation: str) -> jax.Array:
        layer = functools.partial(jax_ggemm.ragged_dot, implementation=implementation)
        return jax.lax.scan(lambda x, w: (layer(x, w, sizes), None), x, weights)[0]

    x = np.random.default_rng(6).standard_normal((200, 64))
    _assert_alike(run(jnp.asarray(x, BF16), weights, "cute"), run(jnp.asarray(x, BF16), weights, "xla"))


def test_without_a_name_a_call_takes_the_kernel() -> None:
    lowered = jax.jit(jax_ggemm.ragged_dot).lower(
        jnp.ones((8, 64), BF16), jnp.ones((2, 64, 64), BF16), jnp.ones(2, int)
    )
    assert "jax_ggemm" in lowered.compile().as_text()


def _relative_errors(got: Any, want: np.ndarray, blocks: list[tuple[slice, slice]]) -> np.ndarray:
    """The error of each block of a matrix, relative to the size of its rows."""
    difference = np.asarray(got, np.float64) - want
    return np.array([np.sqrt(np.mean(difference[b] ** 2)) / np.sqrt(np.mean(want[b[0]] ** 2)) for b in blocks])


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_the_error_is_no_larger_than_a_dense_products(dtype: Any) -> None:
    """Of each expert and each 16 columns, relative to the root mean square of the rows; forward, dX and dW."""
    m, k, n, g = 2048, 512, 384, 8
    rng = np.random.default_rng(7)
    sizes = np.array([700, 16, 500, 0, 100, 600, 32, 100])
    ends = np.cumsum(sizes)
    lhs, ct, rhs = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((m, k), (m, n), (g, k, n)))

    @functools.partial(jax.jit, static_argnums=0)
    def ours(implementation: str, lhs: Any, rhs: Any, ct: Any) -> Any:
        op = functools.partial(jax_ggemm.ragged_dot, group_sizes=jnp.asarray(sizes), implementation=implementation)
        result, vjp = jax.vjp(op, lhs, rhs)
        return result, *vjp(ct)

    result, d_lhs, d_rhs = ours("cute", lhs, rhs, ct)
    for i in np.flatnonzero(sizes):
        rows = slice(ends[i] - sizes[i], ends[i])
        x, w, c = (np.asarray(a, np.float64) for a in (lhs[rows], rhs[i], ct[rows]))
        of_group = [
            (result[rows], lhs[rows] @ rhs[i], x @ w),
            (d_lhs[rows], ct[rows] @ rhs[i].T, c @ w.T),
            (d_rhs[i], lhs[rows].T @ ct[rows], x.T @ c),
        ]
        for got, dense, want in of_group:
            blocks = [(slice(None), slice(column, column + 16)) for column in range(0, want.shape[1], 16)]
            error, limit = _relative_errors(got, want, blocks), _relative_errors(dense, want, blocks)
            # The same roundings of the same sums, but for the order of their terms.
            assert (error <= 1.03 * limit).all(), (i, np.max(error / limit))


@pytest.mark.parametrize("inner", [(0, None), (None, 0)], ids=str)
def test_nested_vmaps_over_rows_and_weights(inner: tuple[int | None, int | None]) -> None:
    rng = np.random.default_rng(8)
    lhs = jnp.asarray(rng.standard_normal((3, 64, 24)), BF16)
    rhs = jnp.asarray(rng.standard_normal((2, 4, 24, 40)), BF16)
    sizes = jnp.array([20, 0, 30, 10], jnp.int32)
    outer = tuple(0 if axis is None else None for axis in inner)

    def run(implementation: str) -> Any:
        step = jax.value_and_grad(_loss(implementation), (0, 1))
        return jax.jit(jax.vmap(jax.vmap(step, (*inner, None)), (*outer, None)))(lhs, rhs, sizes)

    _assert_alike(run("cute"), run("xla"))


def test_a_wide_cotangent_and_a_bias() -> None:
    rng = np.random.default_rng(9)
    sizes = np.array([100, 0, 28, 60])
    lhs, rhs = (jnp.asarray(rng.standard_normal(shape), BF16) for shape in ((200, 72), (4, 72, 90)))
    bias, ct = (jnp.asarray(rng.standard_normal(shape), F32) for shape in ((4, 90), (200, 90)))

    @jax.jit
    def run(lhs: Any, rhs: Any, bias: Any, ct: Any) -> Any:
        op = functools.partial(jax_ggemm.ragged_dot, group_sizes=jnp.asarray(sizes), implementation="cute")
        result, vjp = jax.vjp(lambda x, w, b: op(x, w, bias=b, preferred_element_type=F32), lhs, rhs, bias)
        return result, *vjp(ct)

    result, d_lhs, d_rhs, d_bias = run(lhs, rhs, bias, ct)
    oracle.assert_close(result, oracle.forward(lhs, rhs, sizes, bias=bias), sizes)
    oracle.assert_close(d_lhs, _with_bits(oracle.d_lhs(ct, rhs, sizes)), sizes)
    oracle.assert_close(d_rhs, _with_bits(oracle.d_rhs(lhs, ct, sizes, 4)))
    oracle.assert_close(d_bias, oracle.d_bias(ct, sizes, 4))


def _with_bits(want: oracle.Expected) -> oracle.Expected:
    """For operands of which 16 bits count."""
    return dataclasses.replace(want, scale=want.scale * 2.0**8)


def test_a_profile_shows_one_kernel_for_each_product_and_no_copy_to_the_host(tmp_path: Path) -> None:
    lhs, rhs = jnp.ones((512, 128), BF16), jnp.ones((6, 128, 256), BF16)
    sizes = jnp.array([100, 0, 200, 1, 11, 200], jnp.int32)
    op = functools.partial(jax_ggemm.ragged_dot, implementation="cute")

    @jax.jit
    def step(lhs: Any, rhs: Any, sizes: Any) -> Any:
        result, vjp = jax.vjp(lambda x, w: op(x, w, sizes), lhs, rhs)
        return result, *vjp(result)

    jax.block_until_ready(step(lhs, rhs, sizes))
    steps = 3
    with jax.profiler.trace(str(tmp_path)):
        for _ in range(steps):
            jax.block_until_ready(step(lhs, rhs, sizes))
    (profile,) = tmp_path.rglob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(profile)).planes
    names = [
        event.name
        for plane in planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]
    kernels = [name for name in names if "kernel_cutlass" in name]
    assert len(kernels) == 3 * steps, names
    assert len(names) == len(kernels), names
    assert not [name for name in names if "d2h" in name.lower() or "dtoh" in name.lower()]


def _run(program: str, *arguments: str, prefix: tuple[str, ...] = (), **environment: str) -> str:
    """Runs a program in a process of its own, and returns what it says."""
    done = subprocess.run(
        [*prefix, sys.executable, "-c", program, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


REPLAYED = """
import jax, jax.numpy as jnp, numpy as np, jax_ggemm

@jax.jit
def run(lhs, rhs, sizes):
    for _ in range(4):
        lhs = jax_ggemm.ragged_dot(lhs * 2, rhs, sizes, implementation="cute")
    return lhs

lhs, rhs = jnp.ones((256, 64), jnp.bfloat16), jnp.broadcast_to(jnp.eye(64, dtype=jnp.bfloat16), (4, 64, 64))
rng = np.random.default_rng(0)
for i in range(20):
    sizes = rng.multinomial(rng.integers(0, 256), np.ones(4) / 4)
    got = np.asarray(run(lhs, rhs, jnp.asarray(sizes, jnp.int32)), np.float32)
    np.testing.assert_array_equal(got, np.where(np.arange(256) < sizes.sum(), 16, 0)[:, None].repeat(64, 1))
"""


def test_replay_from_command_buffers_with_new_sizes() -> None:
    flags = "--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL --xla_gpu_graph_min_graph_size=1"
    _run(REPLAYED, XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} {flags}")


LOADED = """
import sys, pathlib
import jax, numpy as np, jax.numpy as jnp
from jax import export
import jax_ggemm

jax_ggemm.register()
step = export.deserialize(bytearray(pathlib.Path(sys.argv[1]).read_bytes()))
for rows in (1, 300):  # a symbolic dimension is 1 or more
    lhs = jnp.asarray(np.random.default_rng(rows).standard_normal((rows, 60)), jnp.bfloat16)
    rhs = jnp.asarray(np.random.default_rng(1).standard_normal((3, 60, 96)), jnp.bfloat16)
    sizes = np.array([rows // 2, 0, rows // 3], np.int32)
    result, d_rhs = step.call(lhs, rhs, sizes)
    ends = np.cumsum(sizes)
    wide = [np.asarray(a, np.float64) for a in (lhs, rhs)]
    for g in range(3):
        rows_of_g = slice(ends[g] - sizes[g], ends[g])
        x, w = wide[0][rows_of_g], wide[1][g]
        np.testing.assert_allclose(np.asarray(result[rows_of_g], np.float64), x @ w, rtol=0.01, atol=0.05)
        d_w = x.T @ np.ones((len(x), 96))
        np.testing.assert_allclose(np.asarray(d_rhs[g], np.float64), d_w, rtol=0.01, atol=0.05)
    assert not np.asarray(result[ends[-1]:], np.float32).any()
"""


@pytest.mark.parametrize("implementation", ["cute", "embedded"])
def test_an_exported_program_holds_its_kernels(tmp_path: Path, implementation: str) -> None:
    """Loaded where no object is to be found; by name alone, a program needs the process that traced it."""
    (m,) = export.symbolic_shape("m")
    shapes = [jax.ShapeDtypeStruct(*of) for of in (((m, 60), BF16), ((3, 60, 96), BF16), ((3,), jnp.int32))]
    which = jax_ggemm.GpuKernels(("sm_90a",)) if implementation == "embedded" else implementation

    @jax.jit
    def step(lhs: Any, rhs: Any, sizes: Any) -> Any:
        result, vjp = jax.vjp(lambda w: jax_ggemm.ragged_dot(lhs, w, sizes, implementation=which), rhs)
        return result, *vjp(jnp.ones_like(result))

    exported = export.export(step, platforms=["cuda"], disabled_checks=jax_ggemm.export_checks)(*shapes)
    path = tmp_path / "program"
    path.write_bytes(exported.serialize())
    if implementation == "embedded":
        _run(LOADED, str(path), XDG_CACHE_HOME=str(tmp_path))
    else:
        with pytest.raises(AssertionError, match="object is not known"):
            _run(LOADED, str(path), XDG_CACHE_HOME=str(tmp_path))


def test_several_gpus_in_one_process() -> None:
    devices = jax.devices()
    if len(devices) < 2:
        pytest.skip("one GPU")
    rng = np.random.default_rng(10)
    sizes = np.array([100, 0, 28, 60], np.int32)
    lhs, rhs = rng.standard_normal((len(devices), 200, 72)), rng.standard_normal((4, 72, 96))
    step = jax.jit(jax.value_and_grad(_loss("cute"), (0, 1)))

    def on(i: int) -> Any:
        operands = jax.device_put((jnp.asarray(lhs[i], BF16), jnp.asarray(rhs, BF16), sizes), devices[i])
        for _ in range(20):
            got = step(*operands)
        assert jax.tree.leaves(got)[0].devices() == {devices[i]}
        return jax.device_get(got)

    with concurrent.futures.ThreadPoolExecutor(2 * len(devices)) as pool:
        results = list(pool.map(on, list(range(len(devices))) * 2))
    for i, got in enumerate(results):
        want = jax.value_and_grad(_loss("xla"), (0, 1))(
            jnp.asarray(lhs[i % len(devices)], BF16), jnp.asarray(rhs, BF16), sizes
        )
        _assert_alike(got, want)


def test_errors_name_the_product_the_kernel_and_the_shapes() -> None:
    spec = config.KernelSpec(
        Product.FORWARD, np.dtype(BF16), np.dtype(BF16), False, KNOWN.pick(Product.FORWARD, 8, 64, 64, 1)
    )
    architecture = cute._architecture()
    assert architecture is not None
    key = objects.ensure(spec, architecture)
    call = jax.ffi.ffi_call(native.TARGET, jax.ShapeDtypeStruct((8, 64), BF16))
    wrong = jnp.ones((8, 64), BF16), jnp.ones((1, 64, 64), BF16), jnp.ones(1, jnp.int32), jnp.int32(0)
    run = functools.partial(call, *wrong, product="forward")
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"lhs \[8,64\], rhs \[1,64,64\].*forward, kernel {key}"):
        jax.block_until_ready(run(keys={architecture: key}))
    with pytest.raises(jax.errors.JaxRuntimeError, match="kernels for sm_100a, and CUDA device 0 is sm_90"):
        jax.block_until_ready(run(keys={"sm_100a": key}))
    with pytest.raises(jax.errors.JaxRuntimeError, match="object is not known"):
        jax.block_until_ready(run(keys={architecture: "no such key"}))


SANITIZED = """
import itertools
import jax, jax.numpy as jnp, numpy as np
from jax_ggemm import cute, tuned
from jax_ggemm.products import Call, Operands, Product

SHAPES = [((40, 3, 0, 130), 200, 72, 136), ((0, 1, 300), 260, 8, 264)]
for product, out in itertools.product(Product, (jnp.bfloat16, jnp.float32)):
    for picked in cute.architecture().candidates(product):
        tuned.pick = lambda problem, arch, picked=picked: picked
        for sizes, m, k, n in SHAPES:
            w = len(sizes)
            lhs = jnp.ones((m, n if product is Product.DLHS else k), jnp.bfloat16)
            rhs = jnp.ones((m, n) if product is Product.DRHS else (w, k, n), jnp.bfloat16)
            bias = jnp.ones((w, k if product is Product.DLHS else n)) if product.rows_are_ragged else None
            call = Call(product, np.dtype(out), w, None, None)
            operands = Operands(lhs, rhs, jnp.asarray(sizes, jnp.int32), jnp.int32(0), bias)
            result = np.asarray(jax.jit(cute.grouped_product, static_argnums=0)(call, operands), np.float32)
            ends = np.minimum(np.cumsum(sizes), m)
            rows = np.diff(ends, prepend=0)
            if product is Product.DRHS:
                want = rows[:, None, None] * np.ones((k, n))
            else:
                depth = (n if product is Product.DLHS else k) + 1
                want = np.where(np.arange(m) < ends[-1], depth, 0)[:, None] * np.ones(result.shape[1])
            np.testing.assert_allclose(result, want, rtol=4e-3)
            jax.clear_caches()
print("all right")
"""


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_compute_sanitizer_finds_nothing(tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if sanitizer is None:
        pytest.skip("compute-sanitizer, of the CUDA toolkit, is not installed")
    # Every buffer is an allocation of its own, so that memcheck knows where it ends.
    prefix = (sanitizer, "--tool", tool, "--error-exitcode", "9")
    said = _run(SANITIZED, prefix=prefix, XLA_PYTHON_CLIENT_ALLOCATOR="platform")
    assert "all right" in said
    assert re.search(r"SUMMARY: 0 (errors|hazards)", said), said[-2000:]
