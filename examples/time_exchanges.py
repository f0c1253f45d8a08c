"""Times the exchanges of expert parallelism on the devices of this host, and checks training against one device.

    python examples/time_exchanges.py --out exchanges.json                    # all GPUs of the host
    python examples/time_exchanges.py --cpu-devices 4 --small --out cpu.json  # a trial run without a GPU
    python examples/time_exchanges.py --out exchanges.json --coordinator localhost:9911 --processes 2 --process 0 &
    python examples/time_exchanges.py --out exchanges.json --coordinator localhost:9911 --processes 2 --process 1

Writes JSON with three parts, each per exchange, and prints them as tables:

    layer     milliseconds of one MoE layer, forward and backward, and of the same layer with tokens that stay at home
    training  tokens/s of the language model of train_moe_lm.py, and the exchange's share of a step
    losses    the largest difference to the losses of one device, in float32

"At home" is the same program with the same number of rows, in which each token takes experts of its own device: what
it takes less is the exchange.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import corpus
import runs_on
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
from jax_ggemm.exchanges import LocalExperts, Tokens
from jax_ggemm.files import write_json
from mesh_placement import OnMesh, add_process_options, start_processes
from moe_lm import ModelConfig
from trainer import Trainer, TrainingConfig


@dataclasses.dataclass(frozen=True)
class AtHome:
    """No exchange: each token takes experts of its own rank instead, as many as it has choices."""

    split_tokens: bool = dataclasses.field(default=True, init=False, repr=False)

    def __call__(self, tokens: Tokens, local: LocalExperts) -> tuple[jax.Array, jax.Array]:
        """See `jax_ggemm.exchanges.Exchange`."""
        y = local(tokens._replace(ids=tokens.ids % local.number), tokens.ids.size)
        return y, jnp.zeros_like(tokens.ids, shape=())


PARTS = ("training", "layer", "losses")

EXCHANGES = (AtHome(), AllToAll(), AllToAll(1.5), Gather(), Gather(jnp.bfloat16), Ring(), Replicated())


@dataclasses.dataclass(frozen=True)
class LayerShape:
    """One layer; by default that of Qwen3-30B-A3B with 8192 tokens a device."""

    features: int = 2048
    hidden: int = 768
    experts: int = 128
    top_k: int = 8
    tokens: int = 8192


SMALL = LayerShape(32, 32, 8, 2, 64)


def milliseconds(function: Callable[[], Any], repeats: int) -> float:
    """The median time of a call, after two to warm up."""
    times = []
    for _ in range(repeats + 2):
        begin = time.perf_counter()
        jax.block_until_ready(function())
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times[2:])


def time_layer(mesh: Mesh, exchange: Any, shape: LayerShape, repeats: int) -> dict[str, float]:
    """Times the layer forward, and forward with backward; Replicated gets a decoding batch of 64 tokens."""
    parallel = ExpertParallel("expert", exchange, mesh=mesh)
    options = MoEOptions(Router(shape.top_k), ExpertOptions(), parallel)
    ranks = mesh.shape["expert"]
    tokens = ranks * shape.tokens if exchange.split_tokens else min(64, shape.tokens)
    specs = parallel.expert_specs(options.experts.layout)

    def put(key: int, size: tuple[int, ...], spec: PartitionSpec, dtype: Any) -> jax.Array:
        make = jax.jit(
            lambda: 0.02 * jax.random.normal(jax.random.key(key), size, dtype), out_shardings=NamedSharding(mesh, spec)
        )
        return make()

    experts, features, hidden = shape.experts, shape.features, shape.hidden
    params = MoEParams(
        put(0, (features, experts), PartitionSpec(), jnp.float32),
        ExpertParams(
            put(1, (experts, features, 2 * hidden), specs.gate_up, jnp.bfloat16),
            put(2, (experts, hidden, features), specs.down, jnp.bfloat16),
        ),
    )
    batch = PartitionSpec("expert") if exchange.split_tokens else PartitionSpec()
    x = 50 * put(3, (tokens, features), batch, jnp.bfloat16)

    def loss(x: jax.Array, params: MoEParams) -> jax.Array:
        return jnp.sum(moe(x, params, options)[0].astype(jnp.float32) ** 2)

    forward = jax.jit(lambda x, params: moe(x, params, options)[0])
    both = jax.jit(jax.grad(loss, (0, 1)))
    memory = both.lower(x, params).compile().memory_analysis()
    return {
        "tokens": tokens,
        "forward_ms": milliseconds(lambda: forward(x, params), repeats),
        "forward_backward_ms": milliseconds(lambda: both(x, params), repeats),
        "temporary_mib": memory.temp_size_in_bytes / 2**20 if memory is not None else float("nan"),
    }


def training(mesh: Mesh, exchange: Any, model: ModelConfig, config: TrainingConfig, text: corpus.Corpus) -> Any:
    """Trains; returns losses, tokens/s without the first quarter, and what was dropped."""
    placement = None if exchange is None else OnMesh(mesh, ExpertParallel("expert", exchange), False)
    trainer = Trainer(model, config, text, placement)  # before jax.set_mesh: each process makes the whole model
    with contextlib.nullcontext() if placement is None else jax.set_mesh(mesh):
        warm = max(1, config.steps // 4)
        trainer.advance(warm)
        begin = time.perf_counter()
        trainer.advance(config.steps)
        seconds = time.perf_counter() - begin
    speed = (config.steps - warm) * config.batch * config.length / seconds
    return {"losses": trainer.history.loss.tolist(), "tokens_per_s": speed, "dropped": trainer.dropped}


def main() -> int:
    """Runs the command; returns its exit code."""
    command_line = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command_line.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    command_line.add_argument("--small", action="store_true", help="small sizes, for a trial")
    command_line.add_argument("--repeats", type=int, default=10, help="of each timed call (default: %(default)s)")
    command_line.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all of them")
    add_process_options(command_line)
    given = command_line.parse_args()
    start_processes(command_line, vars(given))
    first = jax.process_index() == 0
    mesh = jax.make_mesh((jax.device_count(),), ("expert",), axis_types=(AxisType.Auto,))
    results: dict[str, Any] = {
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "processes": jax.process_count(),
        "versions": runs_on.versions_line(),
        "layer": {},
        "training": {},
        "losses": {},
    }

    def save() -> None:
        if first:
            write_json(given.out, results)

    def note(part: str, exchange: Any, values: Callable[[], dict[str, Any]]) -> None:
        """Adds a result, unless its part was left out, writes the file, and says it.

        One that fails is noted as such, and the others go on.
        """
        if part not in given.parts:
            return
        try:
            result = values()
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"[:500]}
        results[part][str(exchange)] = result
        save()
        shown = {name: float(f"{value:.4g}") for name, value in result.items() if isinstance(value, float | int)}
        if first:
            print(f"{part:9} {exchange!s:32} {shown or result}", flush=True)

    text = corpus.load(400_000)
    exact = ModelConfig(features=64, hidden_features=64, experts=8, dtype="float32")
    short = TrainingConfig(steps=4 if given.small else 20, batch=8, length=32 if given.small else 128)
    model = ModelConfig(features=2048, hidden_features=768, layers=2, heads=16, experts=64, top_k=8, dtype="bfloat16")
    config = TrainingConfig(steps=24, batch=16, length=1024)
    if given.small:
        model, config = exact, short
    for exchange in (AtHome(), AllToAll(), Gather(), Ring(), AllToAll(1.5), None):
        note("training", exchange, lambda exchange=exchange: training(mesh, exchange, model, config, text))
    home = results["training"].get(str(AtHome()), {}).get("tokens_per_s")
    for name, result in results["training"].items():
        if home and "tokens_per_s" in result and name not in ("None", str(AtHome())):
            result["exchange_share_of_step"] = 1 - result["tokens_per_s"] / home
            if first:
                print(f"share of the step {name:32} {result['exchange_share_of_step']:.1%}")
    save()
    shape = SMALL if given.small else LayerShape()
    for exchange in EXCHANGES:
        note("layer", exchange, lambda exchange=exchange: time_layer(mesh, exchange, shape, given.repeats))

    with jax.default_matmul_precision("highest"):
        one = functools.cache(lambda: training(mesh, None, exact, short, text)["losses"])
        for exchange in (AllToAll(), Gather(), Ring(), Replicated()):

            def difference(exchange: Any = exchange) -> dict[str, Any]:
                losses = training(mesh, exchange, exact, short, text)["losses"]
                return {"largest_difference": float(np.abs(np.subtract(losses, one())).max()), "losses": losses}

            note("losses", exchange, difference)
    return 0


if __name__ == "__main__":
    sys.exit(main())
