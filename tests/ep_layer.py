"""Layers over meshes of eight CPU devices and the same on one device, for the tests of expert parallelism."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from jax_ggemm import ExpertOptions, ExpertParallel, ExpertParams, MoEOptions, MoEParams, Router, moe
from jax_ggemm.experts import SharedParams
from jax_ggemm.layouts import DEFAULT, ExpertLayout, convert

FULL = "JAX_GGEMM_TEST_FULL" in os.environ


def some(cases: Sequence[Any], *indices: int) -> Sequence[Any]:
    """All cases in a full run, else those at the indices: every one compiles for seconds."""
    return cases if FULL else [cases[index] for index in indices]


E, D, M, S, K = 16, 12, 8, 4, 3
BATCH, LENGTH = 8, 6

MESHES = {
    "8x1": {"expert": 8, "data": 1},
    "4x2": {"expert": 4, "data": 2},
    "2x4": {"expert": 2, "data": 4},
    "2x2x2": {"expert": 2, "data": 2, "tensor": 2},
}


def mesh_of(name: str) -> Mesh:
    """A mesh of `MESHES`; its axes are automatic."""
    axes = MESHES[name]
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def parallel_on(name: str, exchange: Any, **more: Any) -> ExpertParallel:
    """The layer on a mesh of `MESHES`: FSDP over data, the width of experts over tensor."""
    tensor = "tensor" if "tensor" in MESHES[name] else None
    fsdp = () if MESHES[name]["data"] == 1 else ("data",)
    return ExpertParallel("expert", exchange, mesh=mesh_of(name), **{"tensor_axis": tensor, "fsdp_axes": fsdp, **more})


class Inputs(NamedTuple):
    """What a layer gets: activations, parameters, a mask of padding tokens, and what to approach."""

    x: jax.Array
    params: MoEParams
    mask: jax.Array
    target: jax.Array


def inputs(layout: ExpertLayout = DEFAULT, seed: int = 0) -> Inputs:
    """Random inputs; every kind of parameter is there."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    experts = ExpertParams(normal(E, D, 2 * M), normal(E, M, D), normal(E, 2 * M), normal(E, D))
    one = convert(ExpertParams(normal(1, D, 2 * S), normal(1, S, D)), DEFAULT, layout)
    params = MoEParams(
        normal(D, E),
        convert(experts, DEFAULT, layout),
        normal(E),
        0.05 * normal(E),
        SharedParams(one.gate_up[0], one.down[0], normal(D, 1)),
    )
    mask = jnp.asarray(rng.random((BATCH, LENGTH)) > 0.2)
    return Inputs(normal(BATCH, LENGTH, D), params, mask, normal(BATCH, LENGTH, D))


ROUTINGS = {
    # To add to the selection bias: who gets tokens.
    "any": np.zeros(E),
    "first rank gets all": np.where(np.arange(E) < 2, 40.0, 0) + np.where(np.arange(E) == 2, 20, 0),
    "one rank gets none": np.where((np.arange(E) >= 8) & (np.arange(E) < 10), -40.0, 0),
    "half of all experts are empty": np.where(np.arange(E) % 2, -40.0, 0),
    "last experts get all": np.where(np.arange(E) >= E - K, 40.0, 0),
}


def routed(given: Inputs, routing: str) -> Inputs:
    """The inputs with a router that sends tokens as `ROUTINGS` says."""
    params = given.params
    return given._replace(
        params=params._replace(selection_bias=params.selection_bias + jnp.asarray(ROUTINGS[routing], jnp.float32))
    )


@functools.partial(jax.jit, static_argnums=0)
def run(options: MoEOptions, given: Inputs) -> Any:
    """((loss, (y, statistics)), gradients of x and of all parameters)."""

    def loss(x: jax.Array, params: MoEParams) -> tuple[jax.Array, Any]:
        y, stats = moe(x, params, options, token_mask=given.mask)
        return 0.5 * jnp.sum((y - given.target) ** 2) + stats.load_balance_loss + 0.1 * stats.z_loss, (y, stats)

    return jax.value_and_grad(loss, (0, 1), has_aux=True)(given.x, given.params)


def options(parallel: ExpertParallel | None, layout: ExpertLayout = DEFAULT) -> MoEOptions:
    """The layer's options. One implementation of the products: naming none would compile those of every platform."""
    return MoEOptions(Router(K), ExpertOptions(layout=layout, implementation="cpu"), parallel)


def assert_same(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    """Every leaf of the two trees agrees, relative to the RMS of each row; what should be zero is."""

    def compare(path: Any, a: Any, b: Any) -> None:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape, path
        if b.ndim > 1 and b.shape[-1] == 1:  # a matrix of one column is a vector
            a, b = a[..., 0], b[..., 0]
        rms = np.sqrt(np.mean(np.square(b), axis=-1, keepdims=True)) if b.ndim else np.abs(b)
        bad = ~(np.abs(a - b) <= tolerance * rms)
        worst = np.max(np.abs(a - b) / np.maximum(rms, 1e-30), initial=0)
        assert not bad.any(), f"{jax.tree_util.keystr(path)}: {bad.sum()} of {bad.size} differ, by {worst:.2g} of RMS"

    jax.tree_util.tree_map_with_path(compare, got, want)
