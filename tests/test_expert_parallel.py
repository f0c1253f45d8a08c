"""Expert parallelism on eight CPU devices equals the layer on one: every exchange, every mesh, gradients too."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import ep_layer
import jax
import jax.numpy as jnp
import moe_reference
import numpy as np
import pytest
from ep_layer import FULL, MESHES, ROUTINGS, E, K, M, assert_same, inputs, options, parallel_on, routed, run, some
from jax.sharding import PartitionSpec as P

from jax_ggemm import AllToAll, ExpertParallel, Gather, Replicated, Ring
from jax_ggemm.layouts import DEFAULT, HF_LINEAR, INTERLEAVED, ExpertLayout

cheap_compilation = moe_reference.cheap_compilation

EXCHANGES = [AllToAll(), AllToAll(100.0), Gather(), Ring(), Replicated()]


@functools.cache
def on_one_device(routing: str, layout: ExpertLayout = DEFAULT) -> Any:
    return jax.device_get(run(options(None, layout), routed(inputs(layout), routing)))


EVERYWHERE = [(mesh, exchange) for mesh in MESHES for exchange in EXCHANGES]


@pytest.mark.parametrize(("mesh", "exchange"), some(EVERYWHERE, 0, 8, 12, 19), ids=str)
def test_outputs_losses_and_gradients_are_those_of_one_device(mesh: str, exchange: Any) -> None:
    parallel = options(parallel_on(mesh, exchange))
    given = inputs()
    for routing in ROUTINGS:
        got = run(parallel, routed(given, routing))
        assert_same(got, on_one_device(routing))
        assert int(got[0][1][1].dropped) == 0


@dataclasses.dataclass(frozen=True)
class InRounds(AllToAll):
    """Sends two rows of a chunk at a time."""

    def round_rows(self, tokens: int, k: int, ranks: int) -> int:
        """See `AllToAll`."""
        return min(2, self.chunk_rows(tokens, k, ranks))


@pytest.mark.parametrize("mesh", some(list(MESHES), 1))
def test_as_many_rounds_as_the_routing_needs(mesh: str) -> None:
    parallel, given = options(parallel_on(mesh, InRounds())), inputs()
    for routing in ROUTINGS:
        assert_same(run(parallel, routed(given, routing)), on_one_device(routing))


def test_a_round_holds_balanced_routing() -> None:
    for tokens, k, ranks in [(8192, 8, 64), (4096, 8, 1024), (64, 4, 32), (8192, 2, 16)]:
        rows, draws = AllToAll().round_rows(tokens, k, ranks), np.random.default_rng(0)
        owners = draws.integers(ranks, size=(tokens, k))
        counts = [np.any(owners == rank, axis=1).sum() for rank in range(ranks)]
        assert max(counts) <= rows <= tokens // 2
    assert AllToAll().round_rows(8192, 8, 4) == 8192  # nearly all tokens go everywhere
    assert AllToAll(1.25).round_rows(8192, 8, 64) == AllToAll(1.25).chunk_rows(8192, 8, 64)
    assert AllToAll().round_rows(1, 1, 8) == 1


def test_the_routings_are_what_they_say() -> None:
    counts = {name: on_one_device(name)[0][1][1].counts for name in ROUTINGS}
    chosen = counts["any"].sum()
    assert (counts["any"] > 0).sum() > 10
    assert counts["first rank gets all"][:3].sum() == chosen
    assert counts["one rank gets none"][8:10].sum() == 0
    assert (counts["half of all experts are empty"][1::2] == 0).all()
    assert counts["last experts get all"][E - K :].sum() == chosen


LAYOUTS = [HF_LINEAR, ExpertLayout(INTERLEAVED), ExpertLayout(INTERLEAVED, out_first=True)]


@pytest.mark.parametrize("layout", some(LAYOUTS, 2))
def test_every_layout_over_a_tensor_axis(layout: ExpertLayout) -> None:
    got = run(options(parallel_on("2x2x2", AllToAll()), layout), inputs(layout))
    assert_same(got, on_one_device("any", layout))


SPLITS = [
    ("2x2x2", P("expert", "data"), AllToAll()),  # data is a sequence axis here
    ("4x2", P("data", "expert"), Ring()),
    ("2x4", P(("data", "expert")), Gather()),
    ("4x2", P(None, "data"), Replicated()),
]


@pytest.mark.parametrize(("mesh", "tokens", "exchange"), some(SPLITS, 1), ids=str)
def test_batch_and_sequence_split_in_any_way(mesh: str, tokens: Any, exchange: Any) -> None:
    given = jax.tree.map(lambda a: a[:, :4] if a.shape[:2] == (8, 6) else a, inputs())
    assert_same(
        run(options(parallel_on(mesh, exchange, tokens=tokens)), given), jax.device_get(run(options(None), given))
    )


def test_an_expert_axis_of_size_one_is_the_plain_layer() -> None:
    mesh = jax.make_mesh((1,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    for exchange in some(EXCHANGES, 0):
        assert_same(run(options(ExpertParallel("expert", exchange, mesh=mesh)), inputs()), on_one_device("any"))


def in_float64() -> Any:
    """The inputs, for compositions that would magnify the rounding of float32."""
    return jax.tree.map(lambda a: a.astype(jnp.float64) if a.dtype == jnp.float32 else a, inputs())


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("exchange", some(EXCHANGES[:4], 3), ids=str)
def test_under_checkpoint_and_in_a_scan_over_layers(exchange: Any) -> None:
    given = in_float64()

    def deep(opts: Any, x: jax.Array, params: Any) -> jax.Array:
        @jax.checkpoint
        def layer(x: jax.Array, params: Any) -> tuple[jax.Array, None]:
            return x + 0.1 * ep_layer.moe(x, params, opts)[0], None

        return jnp.sum(jnp.sin(jax.lax.scan(layer, x, params)[0]))

    two = jax.tree.map(lambda a: jnp.stack([a, 0.7 * a[::-1]]), given.params)
    gradient = jax.jit(jax.grad(deep, (1, 2)), static_argnums=0)
    want = gradient(options(None), given.x, two)
    assert_same(gradient(options(parallel_on("4x2", exchange)), given.x, two), want, 1e-9)


@pytest.mark.usefixtures("x64")
def test_second_derivatives() -> None:
    given = in_float64()

    def penalty(opts: Any, params: Any) -> jax.Array:
        slope = jax.grad(lambda x: jnp.sum(jnp.sin(ep_layer.moe(x, given.params._replace(experts=params), opts)[0])))
        return jnp.sum(slope(given.x) ** 2)

    second = jax.jit(jax.grad(penalty, 1), static_argnums=0)
    one = second(options(None), given.params.experts)
    for exchange in some((AllToAll(), Gather()), 0):
        assert_same(second(options(parallel_on("4x2", exchange)), given.params.experts), one, 1e-9)


def test_what_does_not_fit_a_buffer_is_dropped_by_the_rule_and_counted() -> None:
    """Against a loop over ranks and tokens that follows the rule of `AllToAll`."""
    given, factor, ranks = inputs(), 0.6, 8
    exchange = AllToAll(factor)
    for routing in ROUTINGS:
        case = routed(given, routing)
        ids = np.asarray(chosen(case))
        kept = keep_by_the_rule(ids, exchange, ranks)
        got = run(options(parallel_on("8x1", exchange)), case)
        (_, (y, stats)), _ = got
        real = ids < E
        assert int(stats.dropped) == (real & ~kept).sum() > 0
        want = without(case, kept)
        np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4)


def chosen(given: Any) -> jax.Array:
    """The experts of each token, (T, K), E for padding."""
    logits = given.x.reshape(-1, ep_layer.D) @ given.params.router + given.params.router_bias
    masked = given.mask.reshape(-1)
    routing = ep_layer_route(logits, given.params.selection_bias, masked)
    return routing.ids


def ep_layer_route(logits: jax.Array, bias: jax.Array, mask: jax.Array) -> Any:
    from jax_ggemm.routing import Router, route  # noqa: PLC0415

    return route(logits, Router(K), selection_bias=bias, token_mask=mask)


def keep_by_the_rule(ids: np.ndarray, exchange: AllToAll, ranks: int) -> np.ndarray:
    per_rank, tokens = E // ranks, ids.shape[0] // ranks
    chunk, rows = exchange.chunk_rows(tokens, K, ranks), exchange.expert_rows(tokens, K, ranks, per_rank)
    kept = np.zeros(ids.shape, bool)
    for owner in range(ranks):
        chunks: list[list[int]] = [[] for _ in range(ranks)]
        for token, choices in enumerate(ids):
            source = token // tokens
            if any(choice // per_rank == owner and choice < E for choice in choices) and len(chunks[source]) < chunk:
                chunks[source].append(token)
        room = rows
        for place in range(chunk):
            for source in range(ranks):
                if place < len(chunks[source]):
                    token = chunks[source][place]
                    for j, choice in enumerate(ids[token]):
                        if choice < E and choice // per_rank == owner and room:
                            kept[token, j], room = True, room - 1
    return kept


def without(given: Any, kept: np.ndarray) -> np.ndarray:
    """The layer's result with only the choices in `kept`, by `moe_reference`."""
    params, x = given.params, np.asarray(given.x).reshape(-1, ep_layer.D)
    mask = given.mask.reshape(-1)
    logits = jnp.asarray(x) @ params.router + params.router_bias
    routing = ep_layer_route(logits, params.selection_bias, mask)
    weights = np.where(kept, routing.weights, 0)
    halves = [np.asarray(a) for a in np.split(np.asarray(params.experts.gate_up), 2, axis=2)]
    bias = [*np.split(np.asarray(params.experts.gate_up_bias), 2, axis=1), params.experts.down_bias]
    y = moe_reference.moe(x, routing.ids, weights, *halves, params.experts.down, biases=bias)
    shared = params.shared
    gate, up = np.split(x @ np.asarray(shared.gate_up), 2, axis=1)
    y += moe_reference.swiglu(gate, up) @ np.asarray(shared.down) * moe_reference.sigmoid(x @ np.asarray(shared.gate))
    return np.where(np.asarray(mask)[:, None], y, 0).reshape(given.x.shape)


def test_a_dropped_choice_has_zero_gradients_and_no_scatter_add() -> None:
    given = routed(inputs(), "first rank gets all")
    opts = options(parallel_on("8x1", AllToAll(0.5)))
    gradient = jax.grad(lambda x: jnp.sum(ep_layer.moe(x, given.params._replace(shared=None), opts)[0]))
    moe_reference.assert_no_scatter_add(gradient, given.x)
    rows = np.asarray(jax.jit(gradient)(given.x)).reshape(8, -1, ep_layer.D)
    assert (rows[:, -1] == 0).all()  # the last token of each rank found no room
    assert (np.abs(rows[:, 0]).sum(axis=-1) > 0).all()


@pytest.mark.parametrize("exchange", EXCHANGES[:1] + EXCHANGES[2:], ids=str)
def test_no_gradient_scatters(exchange: Any) -> None:
    given, opts = inputs(), options(parallel_on("4x2", exchange))
    moe_reference.assert_no_scatter_add(lambda g: run(opts, g), given)


@pytest.mark.skipif(not FULL, reason="compiles for half a minute: make test-full")
def test_bfloat16_is_as_good_as_on_one_device() -> None:
    exact = inputs()
    given = jax.tree.map(lambda a: a.astype(jnp.bfloat16) if a.dtype == jnp.float32 else a, exact)
    given = given._replace(params=given.params._replace(router=exact.params.router))
    same = jax.tree.map(lambda a: a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a, given)
    want = run(options(None), same)

    def errors(got: Any) -> list[float]:
        pairs = zip(jax.tree.leaves((got[0][1][0], got[1])), jax.tree.leaves((want[0][1][0], want[1])), strict=True)
        return [float(jnp.sqrt(jnp.mean((a.astype(jnp.float32) - b) ** 2))) for a, b in pairs]

    one = errors(run(options(None), given))
    for exchange in (AllToAll(), Ring(), Replicated()):
        for error, allowed in zip(errors(run(options(parallel_on("8x1", exchange)), given)), one, strict=True):
            assert error <= 1.5 * allowed + 1e-6, exchange


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ExpertParallel(3), TypeError, "expert_axis must be the name"),
        (lambda: ExpertParallel("expert", "ring"), TypeError, "exchange must be an Exchange"),
        (lambda: ExpertParallel("expert", Ring), TypeError, "exchange must be an Exchange"),
        (lambda: ExpertParallel("expert", tokens=("data", "expert")), TypeError, "tokens must be a PartitionSpec"),
        (lambda: ExpertParallel("expert", tensor_axis=("tensor",)), TypeError, "tensor_axis must be the name"),
        (lambda: ExpertParallel("expert", fsdp_axes="data"), TypeError, "fsdp_axes must be a tuple"),
        (lambda: ExpertParallel("expert", fsdp_axes=None), TypeError, "fsdp_axes must be a tuple"),
        (lambda: ExpertParallel("expert", fsdp_axes=("data", "data")), ValueError, "fsdp_axes must hold each"),
        (lambda: ExpertParallel("expert", mesh="4x2"), TypeError, "mesh must be a Mesh"),
        (lambda: ExpertParallel("expert", tensor_axis="expert"), ValueError, "tensor_axis must differ"),
        (lambda: AllToAll(0.0), ValueError, "buffer_factor must be positive"),
        (lambda: AllToAll(float("inf")), ValueError, "buffer_factor must be positive and finite"),
        (lambda: AllToAll("1.25"), TypeError, "buffer_factor must be a number"),
        (lambda: AllToAll(jnp.float32(1.25)), TypeError, "buffer_factor must be a number"),
        (lambda: Ring(jnp.int32), TypeError, "sum_dtype must be a dtype of floats"),
    ],
)
def test_bad_settings_are_named(make: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        make()


EXPLICIT = (jax.sharding.AxisType.Explicit,) * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mesh": None}, r"needs a mesh: call within jax.set_mesh"),
        ({"mesh": jax.sharding.AbstractMesh((4, 2), ("expert", "data"), EXPLICIT)}, r"explicit.*AxisType.Auto,\) \* 2"),
        ({"expert_axis": "experts"}, r"the mesh has axes \('expert', 'data'\), not 'experts'"),
        ({"tokens": P("data")}, r"tokens that are split over it"),
        ({"exchange": Replicated(), "tokens": P(("expert", "data"))}, r"the same on all its ranks"),
        ({"fsdp_axes": ("expert",)}, r"must not hold the expert axis"),
        ({"tokens": P("expert"), "fsdp_axes": ("data",)}, r"must be axes that tokens"),
        ({"tokens": P(None, ("expert", "data"))}, r"dimension 1 must be a multiple of 8"),
        ({"tokens": P("expert", None, "data")}, r"splits 3 dimensions"),
    ],
    ids=str,
)
def test_what_does_not_fit_the_mesh_is_named(change: Any, message: str) -> None:
    fields = {"expert_axis": "expert", "mesh": ep_layer.mesh_of("4x2"), **change}
    given = inputs()
    with pytest.raises(ValueError, match=message):
        ep_layer.moe(given.x, given.params, options(ExpertParallel(**fields)))


def test_without_tokens_nothing_is_sent() -> None:
    given = inputs()
    empty = given._replace(**{name: getattr(given, name)[:0] for name in ("x", "mask", "target")})
    opts = options(parallel_on("4x2", Gather()))
    assert "manual" not in run.lower(opts, empty).as_text()
    assert "manual" in run.lower(opts, given).as_text()


def test_inside_a_shard_map_over_another_axis() -> None:
    given, chosen = inputs(), options(ExpertParallel("expert", Gather()))

    def layer(x: jax.Array) -> jax.Array:
        y: jax.Array = ep_layer.moe(x, given.params, chosen)[0]
        return y

    with jax.set_mesh(ep_layer.mesh_of("2x4")):
        with pytest.raises(ValueError, match=r"inside jax.shard_map over its own axes \['expert'\]"):
            jax.shard_map(layer, in_specs=P("expert"), out_specs=P("expert"), axis_names={"expert"})(given.x)
        stage = jax.jit(jax.shard_map(layer, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}))
        assert jax.eval_shape(stage, given.x).shape == given.x.shape
        if FULL:
            assert_same(stage(given.x), ep_layer.moe(given.x, given.params, options(None))[0])


def test_sizes_that_the_mesh_does_not_divide_are_named() -> None:
    given = inputs()
    odd = given.params._replace(
        router=given.params.router[:, :15],
        router_bias=None,
        selection_bias=None,
        experts=jax.tree.map(lambda a: a[:15], given.params.experts),
    )
    with pytest.raises(ValueError, match="number of experts is 15; it must be a multiple of 8"):
        ep_layer.moe(given.x, odd, options(parallel_on("8x1", Gather())))
    mesh = jax.make_mesh((1, 3), ("expert", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with pytest.raises(ValueError, match=f"width of each expert is {M}; it must be a multiple of 3"):
        ep_layer.moe(given.x, given.params, options(ExpertParallel("expert", mesh=mesh, tensor_axis="tensor")))
