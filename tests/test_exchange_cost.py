"""The formulas of docs/expert_parallel.md against the collectives of compiled programs, which gather nothing else."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from collective_count import Collective, collectives
from ep_layer import some
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ggemm import (
    AllToAll,
    ExpertOptions,
    ExpertParallel,
    ExpertParams,
    Gather,
    MoEOptions,
    MoEParams,
    Replicated,
    Ring,
    Router,
    moe,
)
from jax_ggemm.exchange_cost import LayerSizes, cost
from jax_ggemm.exchanges import ranks_per_token
from jax_ggemm.layouts import DEFAULT, INTERLEAVED, ExpertLayout

pytestmark = pytest.mark.once

D, M, E, K, T = 32, 24, 8, 3, 16
LAYOUT = ExpertLayout(INTERLEAVED)
OWN = {
    AllToAll: {"all-to-all"},
    Gather: {"all-gather", "reduce-scatter"},
    Ring: {"collective-permute"},
    Replicated: {"all-reduce"},
}
"""The collectives of each exchange; the router's own is an all-reduce."""


@functools.cache
def program(
    exchange: Any, axes: tuple[tuple[str, int], ...], dtype: Any = jnp.float32, each: int = T
) -> list[Collective]:
    """The collectives of a layer's forward and backward pass on `each` tokens a device."""
    names, sizes = (tuple(part) for part in zip(*axes, strict=True))
    mesh = jax.make_mesh(
        sizes, names, axis_types=(AxisType.Auto,) * len(names), devices=jax.devices()[: math.prod(sizes)]
    )
    parallel = ExpertParallel(
        "expert",
        exchange,
        mesh=mesh,
        tensor_axis="tensor" if "tensor" in names else None,
        fsdp_axes=("data",) if "data" in names else (),
    )
    options = MoEOptions(Router(K), ExpertOptions(layout=LAYOUT, implementation="cpu"), parallel)

    def array(shape: tuple[int, ...], spec: Any, dtype: Any = dtype) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    split = tuple(n for n in names if n == "data" or (n == "expert" and exchange.split_tokens))
    tokens = each * math.prod(mesh.shape[n] for n in split)
    specs = parallel.expert_specs(LAYOUT)
    params = MoEParams(
        array((D, E), P(), jnp.float32),
        ExpertParams(array((E, D, 2 * M), specs.gate_up), array((E, M, D), specs.down)),
    )

    def loss(x: jax.Array, params: MoEParams) -> jax.Array:
        return jnp.sum(moe(x, params, options)[0] ** 2)

    lowered = jax.jit(jax.grad(loss, (0, 1))).lower(array((tokens, D), P(split)), params)
    return collectives(lowered.compile().as_text())


EXCHANGES = [AllToAll(), AllToAll(1.25), Gather(), Ring(), Replicated()]
COUNTED = [(exchange, ranks) for exchange in EXCHANGES for ranks in (2, 4, 8)]


@pytest.mark.parametrize(("exchange", "ranks"), some(COUNTED, 1, 6, 10, 12), ids=str)
def test_bytes_are_those_of_the_compiled_program(exchange: Any, ranks: int) -> None:
    found = [c for c in program(exchange, (("expert", ranks),)) if c.name in OWN[type(exchange)]]
    steps = ranks - 1 if isinstance(exchange, Ring) else 1
    counted = sum(c.to_others(ranks) * (1 if c.in_entry else steps) for c in found)
    sizes = LayerSizes(T, D, K, ranks, E // ranks, itemsize=4)
    expected = cost(exchange, sizes)
    assert counted == expected.forward + expected.backward


def test_chunks_with_much_room_go_in_rounds_of_balanced_size() -> None:
    """The first round is in the program itself, any other in the body of a loop."""
    each, ranks = 40 * T, 8
    sizes = LayerSizes(each, D, K, ranks, E // ranks, itemsize=4)
    at_once = AllToAll().round_rows(each, K, ranks)
    assert each * ranks_per_token(K, ranks) / ranks < at_once <= each / 2
    found = [c for c in program(AllToAll(), (("expert", ranks),), each=each) if c.name == "all-to-all"]
    first = sum(c.to_others(ranks) for c in found if c.in_entry)
    more = sum(c.to_others(ranks) for c in found if not c.in_entry)
    balanced, skewed = cost(AllToAll(), sizes), cost(AllToAll(), dataclasses.replace(sizes, skew=1.7))
    assert first == balanced.forward + balanced.backward
    assert first + more == skewed.forward + skewed.backward
    assert {shape[1] for c in found for shape in c.shapes if len(shape) == 3} == {at_once}


MESHES = [(("expert", 8),), (("data", 2), ("expert", 4)), (("data", 2), ("expert", 2), ("tensor", 2))]
PROGRAMS = [(exchange, axes) for exchange in (AllToAll(), Gather(), Ring(), Replicated()) for axes in MESHES]


@pytest.mark.parametrize(("exchange", "axes"), some(PROGRAMS, 2, 7), ids=str)
def test_nothing_else_is_gathered(axes: Any, exchange: Any) -> None:
    """Weights are gathered over FSDP axes alone, tokens by no exchange but Gather, and sums stay small."""
    mesh = dict(axes)
    experts = E // mesh["expert"]
    weights = {(experts, D // 2, 2 * M // mesh.get("tensor", 1)), (experts, M // mesh.get("tensor", 1), D // 2)}
    for c in program(exchange, axes):
        if c.name == "all-gather" and not isinstance(exchange, Gather):
            assert "data" in mesh
            assert set(c.shapes) <= weights
        elif c.name == "reduce-scatter" and not isinstance(exchange, Gather):
            assert {(s[0], *sorted(s[1:])) for s in c.shapes} <= {
                (w[0], *sorted((D, w[1] * w[2] * 2 // D))) for w in weights
            }
        elif c.name == "all-reduce":
            # the router's gradient and statistics; tokens over tensor ranks, and over expert ranks for Replicated
            assert all(math.prod(s) <= D * E + 2 * E + 2 or s[-1:] in {(D,), (K,)} for s in c.shapes)
            assert all(len(s) < 3 for s in c.shapes)
        assert c.name in OWN[type(exchange)] | {"all-gather", "reduce-scatter", "all-reduce", "all-to-all"}


def test_a_fused_weight_stored_whole_over_the_tensor_axis_is_cut_where_it_is() -> None:
    """[gate | up] is on every rank of the tensor axis: only the gradient of its parts is gathered there."""
    axes = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("expert", "tensor"), axis_types=axes, devices=jax.devices()[:4])
    parallel = ExpertParallel("expert", tensor_axis="tensor", mesh=mesh)
    specs = parallel.expert_specs(DEFAULT)
    weights = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in (((E, D, 2 * M), specs.gate_up), ((E, M, D), specs.down))
    ]

    def layer(rank: Any, x: jax.Array, _: None, params: Any) -> Any:
        part = rank.put_together(params.experts)
        return x * rank.leave(jnp.sum(part.gate_up**2) + jnp.sum(part.down)), ()

    def loss(gate_up: jax.Array, down: jax.Array) -> jax.Array:
        params = MoEParams(jnp.zeros((D, E)), ExpertParams(gate_up, down))
        return jnp.sum(parallel.apply(layer, DEFAULT, jnp.ones((2, D)), None, params)[0])

    for function, allowed in ((loss, []), (jax.grad(loss), [(E // 2, D, M // 2)] * 2)):
        stored = weights[0].sharding if allowed else None
        found = collectives(jax.jit(function, out_shardings=stored).lower(*weights).compile().as_text())
        large = [c for c in found if any(len(shape) == 3 for shape in c.shapes)]
        assert [(c.name, *c.shapes) for c in large] == [("all-gather", shape) for shape in allowed]


def test_ranks_per_token_is_the_mean_over_choices() -> None:
    import itertools  # noqa: PLC0415

    choices = list(itertools.product(range(4), repeat=3))
    assert ranks_per_token(3, 4) == pytest.approx(sum(len(set(c)) for c in choices) / len(choices))


def test_an_unknown_exchange_has_no_cost() -> None:
    with pytest.raises(TypeError, match="is not known"):
        cost(object(), LayerSizes(1, 1, 1, 1, 1))  # type: ignore[arg-type]
