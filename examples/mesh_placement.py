"""Where a model over a mesh lives: the mesh of a command line, shardings, batches, and several processes."""

from __future__ import annotations

import argparse
import dataclasses
import math
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_ggemm import AllToAll, ExpertParallel, Gather, Replicated, Ring
from jax_ggemm.exchanges import Exchange
from moe_lm import ModelConfig, MoELM

EXCHANGES = {"all_to_all": AllToAll, "gather": Gather, "ring": Ring, "replicated": Replicated}
AXES = ("data", "expert", "tensor")


@dataclasses.dataclass(frozen=True)
class MeshOptions:
    """What the command line says of the mesh. A resumed run may change all of it.

    Attributes:
      mesh: axes and sizes.
      exchange: how tokens get to their experts.
      fsdp: whether expert weights are spread over the data axis too.
      checkpoint_blocks: whether blocks are computed again for the gradient.
    """

    mesh: tuple[tuple[str, int], ...]
    exchange: Exchange
    fsdp: bool
    checkpoint_blocks: bool

    def placement(self) -> OnMesh:
        """The placement on this process's and the other processes' devices.

        Raises:
          ValueError: if the mesh is not as large as the devices are many.
        """
        sizes = tuple(size for _, size in self.mesh)
        if math.prod(sizes) > jax.device_count():
            raise ValueError(
                f"--mesh needs {math.prod(sizes)} devices, and there are {jax.device_count()}; --cpu-devices makes"
                " virtual ones"
            )
        names = tuple(name for name, _ in self.mesh)
        mesh = jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))
        parallel = ExpertParallel(
            "expert",
            self.exchange,
            tensor_axis="tensor" if "tensor" in names else None,
            fsdp_axes=("data",) if self.fsdp else (),
        )
        return OnMesh(mesh, parallel, self.checkpoint_blocks)


@dataclasses.dataclass(frozen=True)
class OnMesh:
    """Parameters as their PartitionSpecs say, batches split over data and expert axes; a `Placement`."""

    mesh: Mesh
    parallel: ExpertParallel
    checkpoint_blocks: bool

    def build(self, config: ModelConfig, rngs: nnx.Rngs) -> MoELM:
        """Makes the model on one device; the same one in every process."""
        return MoELM(config, parallel=self.parallel, checkpoint_blocks=self.checkpoint_blocks, rngs=rngs)

    def place(self, module: nnx.Module) -> None:
        """Moves the arrays to their devices."""
        state = jax.device_get(nnx.state(module))
        nnx.update(module, jax.device_put(state, self._shardings(nnx.state(module))))

    def batch(self, windows: np.ndarray) -> jax.Array:
        """Every process has all windows, and keeps those of its devices."""
        return jax.device_put(windows, NamedSharding(self.mesh, self._batch_spec()))

    def keep(self, module: nnx.Module) -> None:
        """See `Placement`."""
        state = nnx.state(module)
        nnx.update(module, jax.lax.with_sharding_constraint(state, self._shardings(state)))

    def _shardings(self, state: Any) -> Any:
        def sharding(spec: Any) -> NamedSharding:
            return NamedSharding(self.mesh, spec if isinstance(spec, PartitionSpec) else PartitionSpec())

        return jax.tree.map(sharding, nnx.get_partition_spec(state))

    def _batch_spec(self) -> PartitionSpec:
        whole = {"tensor"} if self.parallel.exchange.split_tokens else {"tensor", "expert"}
        return PartitionSpec(tuple(name for name in self.mesh.axis_names if name not in whole))


def add_options(command_line: argparse.ArgumentParser) -> None:
    """Adds the options of the mesh and of several processes."""
    group = command_line.add_argument_group("mesh")
    group.add_argument(
        "--mesh",
        default="expert=2",
        metavar="AXIS=SIZE,...",
        help="axes of " + ", ".join(AXES) + "; tokens are split over data and expert (default: %(default)s)",
    )
    group.add_argument("--exchange", choices=EXCHANGES, default="all_to_all", help="default: %(default)s")
    group.add_argument("--buffer-factor", type=float, help="of all_to_all; nothing is dropped if left out")
    group.add_argument("--fsdp", action="store_true", help="spread expert weights over the data axis too")
    group.add_argument("--checkpoint-blocks", action="store_true", help="compute blocks again for the gradient")
    add_process_options(command_line)


def add_process_options(command_line: argparse.ArgumentParser) -> None:
    """Adds the options of `start_processes`."""
    group = command_line.add_argument_group("devices, and several processes (each is started with the same options)")
    group.add_argument("--cpu-devices", type=int, metavar="N", help="run on N virtual CPU devices in each process")
    group.add_argument("--coordinator", metavar="HOST:PORT", help="address of the first process")
    group.add_argument("--processes", type=int, metavar="N", help="how many there are")
    group.add_argument("--process", type=int, metavar="I", help="which one this is, from 0")


def take_options(command_line: argparse.ArgumentParser, values: dict[str, Any]) -> MeshOptions:
    """Takes the options of `add_options` out of `values`, and starts JAX as they say; exits where they are wrong."""
    mesh = []
    for part in values.pop("mesh").split(","):
        name, _, size = part.partition("=")
        if name not in AXES or not size.isdecimal() or int(size) < 1:
            command_line.error(f"--mesh takes AXIS=SIZE,... with axes {', '.join(AXES)}; got {part!r}")
        mesh.append((name, int(size)))
    names = [name for name, _ in mesh]
    if "expert" not in names or len(set(names)) < len(names):
        command_line.error(f"--mesh needs the axis expert, and each axis once; got {names}")
    exchange, factor = EXCHANGES[values.pop("exchange")], values.pop("buffer_factor")
    if factor is not None and (exchange is not AllToAll or not factor > 0):
        command_line.error(f"--buffer-factor must be positive, and is for --exchange all_to_all; got {factor}")
    if (fsdp := values.pop("fsdp")) and "data" not in names:
        command_line.error("--fsdp needs the axis data in --mesh")
    start_processes(command_line, values)
    return MeshOptions(
        tuple(mesh), exchange() if factor is None else AllToAll(factor), fsdp, values.pop("checkpoint_blocks")
    )


def start_processes(command_line: argparse.ArgumentParser, values: dict[str, Any]) -> None:
    """Takes the options of `add_process_options` out of `values`, and starts JAX so; exits where they are wrong."""
    devices = values.pop("cpu_devices")
    if devices is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", devices)
    coordinator, processes, process = (values.pop(name) for name in ("coordinator", "processes", "process"))
    if coordinator is not None:
        if processes is None or process is None:
            command_line.error("--coordinator needs --processes and --process")
        if devices is not None:
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(coordinator, processes, process, local_device_ids=None if devices else [process])


def wait_for_all(what: str) -> None:
    """Waits until every process is here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)
