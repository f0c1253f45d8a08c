"""The example over a mesh: the losses of one device, checkpoints across meshes, SIGKILL, several processes."""

from __future__ import annotations

import importlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import moe_reference
import numpy as np
import pytest
from ep_layer import FULL, some
from flax import nnx
from jax.sharding import NamedSharding

pytestmark = pytest.mark.once

cheap_compilation = moe_reference.cheap_compilation

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPT = EXAMPLES / "train_moe_ep.py"
TINY = (
    *("--features", "16", "--hidden-features", "16", "--heads", "2", "--layers", "1", "--experts", "8"),
    *("--top-k", "2", "--batch", "8", "--length", "16", "--corpus-bytes", "400000", "--evaluate-batches", "2"),
    *("--evaluate-every", "1000", "--log-every", "1", "--implementation", "cpu"),
)
MESHES = {
    "8x1": (("expert", 8),),
    "4x2": (("data", 2), ("expert", 4)),
    "2x2x2": (("data", 2), ("expert", 2), ("tensor", 2)),
}


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example's modules, importable for one test."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield importlib.import_module
    for path in EXAMPLES.glob("*.py"):
        if path.stem not in before:
            sys.modules.pop(path.stem, None)


@pytest.fixture
def trainer_on(modules: Any) -> Any:
    """Makes a tiny trainer on a mesh of `MESHES`, or on one device."""
    placement = modules("mesh_placement")
    text = modules("corpus").load(400_000)

    def make(mesh: str | None, steps: int, exchange: str = "all_to_all", checkpoint_blocks: bool = False) -> Any:
        on = None
        if mesh is not None:
            made = placement.EXCHANGES[exchange]()
            on = placement.MeshOptions(MESHES[mesh], made, mesh != "8x1", checkpoint_blocks).placement()
        model = modules("moe_lm").ModelConfig(16, 16, layers=1, heads=2, experts=8, implementation="cpu")
        config = modules("trainer").TrainingConfig(steps=steps, batch=8, length=16)
        return modules("trainer").Trainer(model, config, text, on)

    return make


def advance(trainer: Any, until: int) -> np.ndarray:
    mesh = getattr(trainer.placement, "mesh", None)
    if mesh is None:
        trainer.advance(until)
    else:
        with jax.set_mesh(mesh):
            trainer.advance(until)
    return trainer.history.loss


def test_fifty_steps_have_the_losses_of_one_device(trainer_on: Any) -> None:
    want = advance(trainer_on(None, 50), 50)
    assert want[-5:].mean() < 0.8 * want[:5].mean()
    runs = [("4x2", "all_to_all", False), ("8x1", "ring", False), ("2x2x2", "gather", True)]
    for mesh, exchange, again in some(runs, 0):
        got = advance(trainer_on(mesh, 50, exchange, again), 50)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-3)


def test_a_checkpoint_of_one_mesh_loads_on_every_other(trainer_on: Any, modules: Any, tmp_path: Path) -> None:
    folders = modules("run_folder")
    first = trainer_on("4x2", 6)
    advance(first, 3)
    assert_placed(first)
    with folders.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, first.model, first.optimizer, first.history)
    whole = advance(first, 6)
    for mesh in some(["8x1", "2x2x2", None], 1):
        trainer = trainer_on(mesh, 6)
        with folders.Checkpoints(tmp_path) as checkpoints:
            assert checkpoints.restore(trainer.model, trainer.optimizer, trainer.history) == 3
        np.testing.assert_allclose(advance(trainer, 6), whole, rtol=0, atol=1e-5)


def assert_placed(trainer: Any) -> None:
    """Parameters and optimiser state are where their specs say, after steps too."""
    shardings = [
        leaf.sharding
        for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state((trainer.model, trainer.optimizer)))
        if "gate_up" in jax.tree_util.keystr(path)
    ]
    assert len(shardings) == 3  # the parameter and both moments
    wanted = NamedSharding(trainer.placement.mesh, jax.sharding.PartitionSpec("expert", "data"))
    assert all(sharding.is_equivalent_to(wanted, 3) for sharding in shardings)


@pytest.fixture
def compile_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that one process compiled serve the next ones."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


def command(*arguments: Any) -> list[str]:
    return [sys.executable, str(SCRIPT), *map(str, arguments)]


def run_to_the_end(*arguments: Any) -> str:
    done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(folder: Path) -> list[float]:
    return json.loads((folder / "results.json").read_text())["losses"]


@pytest.mark.skipif(not FULL, reason="four processes, each of which compiles the model: make test-full")
@pytest.mark.usefixtures("compile_once")
def test_killed_in_a_step_it_goes_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    mesh = ("--cpu-devices", 8, "--mesh", "data=2,expert=4", "--fsdp")
    run = (*TINY, "--steps", 40, "--checkpoint-every", 2, *mesh)
    with subprocess.Popen(command(*run, "--out", tmp_path / "killed"), stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 800
        while not (tmp_path / "killed" / "checkpoints" / "4").exists() and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    shutil.copytree(tmp_path / "killed", tmp_path / "other")
    text = run_to_the_end("--resume", "--out", tmp_path / "killed", *mesh)
    assert "resuming     after step " in text
    first = int(text.split("resuming     after step ")[1].split()[0])
    assert 4 <= first < 40
    other = run_to_the_end("--resume", "--out", tmp_path / "other", "--cpu-devices", 2, "--mesh", "expert=2")
    assert f"after step {first} " in other
    run_to_the_end(*run, "--out", tmp_path / "whole")
    np.testing.assert_allclose(losses(tmp_path / "killed"), losses(tmp_path / "whole"), rtol=0, atol=1e-6)
    np.testing.assert_allclose(losses(tmp_path / "other")[:30], losses(tmp_path / "whole")[:30], rtol=0, atol=1e-3)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return int(listener.getsockname()[1])


@pytest.mark.skipif(not FULL, reason="three processes, each of which compiles the model: make test-full")
def test_two_processes_have_the_losses_of_one(tmp_path: Path) -> None:
    run = (*TINY, "--steps", 6, "--checkpoint-every", 3, "--mesh", "expert=2")
    together = ("--cpu-devices", 1, "--coordinator", f"localhost:{free_port()}", "--processes", 2)
    both = [
        subprocess.Popen(
            command(*run, *together, "--process", number, "--out", tmp_path / "two"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(2)
    ]
    texts = [process.communicate(timeout=900)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], "".join(texts)
    assert "mesh         expert 2: 2 of 2 devices in 2 processes" in texts[0]
    assert "bytes to other devices in a step" in texts[0]
    assert "load of the experts, layer 1" in texts[0]
    assert "load" not in texts[1]
    run_to_the_end(*run, "--cpu-devices", 2, "--out", tmp_path / "one")
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--mesh", "experts=2"), "AXIS=SIZE,... with axes data, expert, tensor; got 'experts=2'"),
        (("--mesh", "data=2"), "--mesh needs the axis expert"),
        (("--fsdp",), "--fsdp needs the axis data"),
        (("--buffer-factor", "1.5", "--exchange", "ring"), "--buffer-factor must be positive, and is for"),
        (("--coordinator", "localhost:1"), "--coordinator needs --processes and --process"),
    ],
)
def test_bad_options_exit_with_a_message(modules: Any, capsys: Any, arguments: Any, message: str) -> None:
    line, mesh = modules("command_line").parser(""), modules("mesh_placement")
    mesh.add_options(line)
    with pytest.raises(SystemExit, match="2"):
        mesh.take_options(line, vars(line.parse_args(arguments)))
    assert message in capsys.readouterr().err


def test_a_mesh_larger_than_the_devices_is_refused(modules: Any) -> None:
    from jax_ggemm import AllToAll  # noqa: PLC0415

    options = modules("mesh_placement").MeshOptions((("expert", 64),), AllToAll(), False, False)
    with pytest.raises(ValueError, match=r"--mesh needs 64 devices, and there are 8"):
        options.placement()
