"""The flax layer over a mesh: where its variables are, and that nothing else about them changes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import moe_reference
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_ggemm import ExpertParallel, Gather, MoE, Router
from jax_ggemm.layouts import DEFAULT, HF_LINEAR, INTERLEAVED, ExpertLayout

cheap_compilation = moe_reference.cheap_compilation

PARALLEL = ExpertParallel("expert", Gather(), tensor_axis="tensor", fsdp_axes=("data",))


def make(parallel: ExpertParallel | None = None, **options: Any) -> MoE:
    return MoE(
        8,
        4,
        8,
        router=Router(2),
        use_bias=True,
        shared_features=4,
        shared_gate=True,
        parallel=parallel,
        implementation="cpu",
        rngs=nnx.Rngs(0),
        **options,
    )


@pytest.fixture
def mesh() -> Any:
    return jax.make_mesh((2, 2, 2), ("data", "expert", "tensor"), axis_types=(AxisType.Auto,) * 3)


@pytest.mark.parametrize(
    ("layout", "gate_up", "down"),
    [
        (DEFAULT, P("expert", ("data",), None), P("expert", "tensor", ("data",))),
        (HF_LINEAR, P("expert", None, ("data",)), P("expert", ("data",), "tensor")),
        (ExpertLayout(INTERLEAVED), P("expert", ("data",), "tensor"), P("expert", "tensor", ("data",))),
        (ExpertLayout(INTERLEAVED, True), P("expert", "tensor", ("data",)), P("expert", ("data",), "tensor")),
    ],
)
def test_variables_carry_their_specs(layout: ExpertLayout, gate_up: Any, down: Any) -> None:
    specs = nnx.get_partition_spec(nnx.state(make(PARALLEL, layout=layout)))
    assert specs["gate_up"].get_value() == gate_up
    assert specs["down"].get_value() == down
    assert specs["router"].get_value() == P()


def test_made_in_a_mesh_they_are_sharded_at_once(mesh: Any) -> None:
    layout = ExpertLayout(INTERLEAVED)
    with jax.set_mesh(mesh):
        layer = make(PARALLEL, layout=layout)
    assert layer.gate_up[...].addressable_shards[0].data.shape == (4, 4, 4)
    assert layer.down[...].addressable_shards[0].data.shape == (4, 2, 4)
    for got, want in zip(
        jax.tree.leaves(nnx.state(layer)), jax.tree.leaves(nnx.state(make(layout=layout))), strict=True
    ):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((8, 4, 7), r"number of experts is 7; it must be a multiple of 2, the ranks of \('expert',\)"),
        ((8, 3, 8), "width of each expert is 3; it must be a multiple of 2"),
        ((7, 4, 8), "model width is 7; it must be a multiple of 2"),
    ],
)
def test_a_layer_that_does_not_fit_the_mesh_is_not_made(mesh: Any, sizes: Any, message: str) -> None:
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
        MoE(*sizes, router=Router(2), parallel=PARALLEL, rngs=nnx.Rngs(0))


def test_metadata_of_the_caller_win() -> None:
    layer = make(PARALLEL, gate_up_metadata={"out_sharding": P("expert"), "eager_sharding": False})
    assert nnx.get_partition_spec(nnx.state(layer))["gate_up"].get_value() == P("expert")


def test_expert_axis_is_short_for_a_parallel(mesh: Any) -> None:
    layer = MoE(8, 4, 8, router=Router(2), expert_axis="expert", rngs=nnx.Rngs(0))
    assert layer.options.parallel == ExpertParallel("expert")
    with pytest.raises(ValueError, match="pass one"):
        make(PARALLEL, expert_axis="expert")
    with pytest.raises(ValueError, match="needs a mesh"):
        layer(jnp.ones((8, 8)))
    with jax.set_mesh(mesh):
        with pytest.raises(
            ValueError, match=r"x has shape \(8,\): 0 dimensions of tokens.* with fewer.*Replicated\(\)"
        ):
            layer(jnp.ones(8))
        with pytest.raises(ValueError, match=r"x has shape \(12, 8\); dimension 0 must be a multiple of 8"):
            layer(jnp.ones((12, 8)))


def test_outside_jit_it_is_compiled_once(mesh: Any) -> None:
    x, traced = jax.random.normal(jax.random.key(1), (8, 8)), []

    def activation(gate: jax.Array, up: jax.Array) -> jax.Array:
        traced.append(gate.shape)
        return gate * up

    def gradient(parallel: ExpertParallel | None) -> Any:
        options: Any = {"activation": activation, "implementation": "cpu", "parallel": parallel}
        layer = MoE(8, 4, 8, router=Router(2), rngs=nnx.Rngs(0), **options)
        return jax.value_and_grad(lambda x: jnp.sum(layer(x)[0] ** 2))

    with jax.set_mesh(mesh):
        spread = gradient(ExpertParallel("expert", Gather()))
        got = spread(x)
        number = len(traced)
        spread(x)
    assert len(traced) == number
    for a, b in zip(got, jax.jit(gradient(None))(x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_a_training_step_is_that_of_one_device(mesh: Any) -> None:
    x = jax.random.normal(jax.random.key(1), (8, 3, 8))

    @nnx.jit
    def step(layer: MoE, optimizer: nnx.Optimizer) -> None:
        def loss(layer: MoE) -> jax.Array:
            y, stats = layer(x)
            return jnp.mean((y - x) ** 2) + 0.01 * stats.load_balance_loss

        optimizer.update(layer, nnx.grad(loss)(layer))

    layers = []
    for parallel in (None, PARALLEL):
        layer = make(parallel)
        optimizer = nnx.Optimizer(layer, optax.adam(1e-2), wrt=nnx.Param)
        if parallel is None:
            step(layer, optimizer)
        else:
            with jax.set_mesh(mesh):
                step(layer, optimizer)
        layers.append(nnx.state(layer))
    for one, spread in zip(*map(jax.tree.leaves, layers), strict=True):
        np.testing.assert_allclose(spread, one, rtol=1e-4, atol=1e-5)
