"""Compiles programs for eight NVIDIA GPUs on a machine that has none, and prints their collectives as JSON.

    python tests/gpu_target.py FOLDER

FOLDER is where `pip install --no-deps --target FOLDER jax-cuda12-pjrt==VERSION` put JAX's compiler for CUDA, of the
version of the installed jaxlib. It is not installed beside jaxlib: JAX would then look for a GPU whenever it starts.
"""

from __future__ import annotations

import json
import os
import sys

sys.path.append(sys.argv[1])
os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}

import jax
import jax.numpy as jnp
import numpy as np
from collective_count import collectives
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ggemm
from jax_ggemm import AllToAll, ExpertOptions, ExpertParallel, ExpertParams, MoEOptions, MoEParams, Ring, Router, moe
from jax_ggemm.layouts import INTERLEAVED, ExpertLayout

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 84978434048 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 12 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
"""What XLA's compiler asks of a device: the published figures of an H100 SXM."""

D, M, E, K, T = 32, 24, 8, 3, 16
LAYOUT = ExpertLayout(INTERLEAVED)


def array(mesh: Mesh, shape: tuple[int, ...], spec: P, dtype: object = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    """An argument of a program, by its type alone."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def layer(mesh: Mesh, exchange: object) -> list[object]:
    """The collectives of a layer's forward and backward pass."""
    names = mesh.axis_names
    parallel = ExpertParallel(
        "expert",
        exchange,  # type: ignore[arg-type]
        mesh=mesh,
        tensor_axis="tensor" if "tensor" in names else None,
        fsdp_axes=("data",) if "data" in names else (),
    )
    options = MoEOptions(Router(K), ExpertOptions(layout=LAYOUT), parallel)
    split = tuple(name for name in names if name != "tensor")
    tokens = T * mesh.size // mesh.shape.get("tensor", 1)
    specs = parallel.expert_specs(LAYOUT)
    params = MoEParams(
        array(mesh, (D, E), P(), jnp.float32),
        ExpertParams(array(mesh, (E, D, 2 * M), specs.gate_up), array(mesh, (E, M, D), specs.down)),
    )

    def loss(x: jax.Array, params: MoEParams) -> jax.Array:
        return jnp.sum(moe(x, params, options)[0].astype(jnp.float32) ** 2)

    run = jax.jit(jax.grad(loss, (0, 1)))
    return [*collectives(run.lower(array(mesh, (tokens, D), P(split)), params).compile().as_text())]


def bare(mesh: Mesh) -> list[object]:
    """Those of the op and its gradients with rows split over one axis and groups over another."""
    lhs, rhs = array(mesh, (64, D), P("data")), array(mesh, (E, D, M), P("expert"))
    sizes = array(mesh, (E,), P(), jnp.int32)

    def loss(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        return jnp.sum(jax_ggemm.ragged_dot(lhs, rhs, sizes).astype(jnp.float32) ** 2)

    wanted = (lhs.sharding, rhs.sharding)
    run = jax.jit(jax.grad(loss, (0, 1)), out_shardings=wanted)
    return [*collectives(run.lower(lhs, rhs, sizes).compile().as_text())]


def main() -> None:
    """Prints {program: [[name, dtype, shapes], ...]}."""
    topology = topologies.get_topology_desc("", "cuda", target_config=H100, topology="1x1x8")
    devices = np.array(topology.devices)
    flat = Mesh(devices, ("expert",))
    square = Mesh(devices.reshape(2, 4), ("data", "expert"))
    cube = Mesh(devices.reshape(2, 2, 2), ("data", "expert", "tensor"))
    found = {"AllToAll": layer(cube, AllToAll()), "Ring": layer(flat, Ring()), "ragged_dot": bare(square)}
    print(json.dumps({name: [[c.name, c.dtype, c.shapes] for c in each] for name, each in found.items()}))


if __name__ == "__main__":
    main()
