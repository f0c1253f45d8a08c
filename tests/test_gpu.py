"""The GPU kernels on a GPU: every product and configuration over hostile group sizes, gradients, vmap and scan."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_ggemm
from jax_ggemm import cute
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


CANDIDATES = list(dict.fromkeys(candidate for product in Product for candidate in config.candidates(product)))


@pytest.fixture(params=CANDIDATES, ids=lambda c: f"{c.tile_m}x{c.tile_n}x{c.cluster}")
def candidate(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[config.Sm90Config]:
    """A configuration that every call takes whose product has it."""
    pick = config.pick

    def wanted(product: Product, *shapes: int) -> config.Sm90Config:
        return request.param if request.param in config.candidates(product) else pick(product, *shapes)

    monkeypatch.setattr(config, "pick", wanted)
    jax.clear_caches()
    return request.param


def check(
    product: Product, groups: Groups, k: int, n: int, dtypes: tuple[Any, Any] = (BF16, BF16), bias: bool = False
) -> None:
    """One product against the loop, with NaN in every row of no group and in the memory of the result."""
    rng = np.random.default_rng([k, n, *np.abs(groups.sizes[:4])])

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, dtype=np.float32), dtypes[0])

    m, weights = groups.m, groups.num_weights
    last = oracle.bounds(groups.sizes, m)[-1][1]
    lhs = normal(m, n if product is Product.DLHS else k).at[last:].set(np.nan)
    rhs = normal(m, n).at[last:].set(np.nan) if product is Product.DRHS else normal(weights, k, n)
    columns = k if product is Product.DLHS else n
    row = jnp.asarray(rng.standard_normal((weights, columns)), F32) if bias else None
    call = Call(product, np.dtype(dtypes[1]), weights, None, "cute")
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
    oracle.assert_close(got, want, groups.sizes if product.rows_are_ragged else None)


@pytest.mark.usefixtures("candidate")
@pytest.mark.parametrize("product", Product)
def test_hostile_groups(product: Product) -> None:
    for i, groups in enumerate(HOSTILE.values()):
        check(product, groups, *COLUMNS[i % len(COLUMNS)])


@pytest.mark.usefixtures("candidate")
@pytest.mark.parametrize("product", Product)
@pytest.mark.parametrize("dtypes", [(BF16, F32), (F16, F16)])
def test_dtypes(product: Product, dtypes: tuple[Any, Any]) -> None:
    check(product, Groups(700, (300, 1, 0, 399)), 136, 200, dtypes)


@pytest.mark.usefixtures("candidate")
@pytest.mark.parametrize("product", [Product.FORWARD, Product.DLHS])
def test_bias(product: Product) -> None:
    check(product, Groups(700, (300, 1, 0, 200)), 136, 200, bias=True)


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


def test_columns_that_tma_cannot_address_still_have_an_answer() -> None:
    lhs, rhs, sizes = jnp.ones((8, 60), BF16), jnp.ones((2, 60, 64), BF16), jnp.array([3, 5], jnp.int32)
    np.testing.assert_array_equal(np.asarray(jax_ggemm.ragged_dot(lhs, rhs, sizes), np.float32), 60)
    with pytest.raises(NotImplementedError, match="k = 60 is not a multiple of 8"):
        jax_ggemm.ragged_dot(lhs, rhs, sizes, implementation="cute")
