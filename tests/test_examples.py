"""The examples, run as their users run them, on tiny models."""

import importlib
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
TRAIN = EXAMPLES / "train_moe_lm.py"
COMPARE = EXAMPLES / "compare_ragged_dot.py"

LAYERS, EXPERTS, TOP_K, BATCH, LENGTH = 2, 4, 2, 2, 32
TINY = (
    *("--features", "16", "--hidden-features", "16", "--heads", "2", "--layers", str(LAYERS)),
    *("--experts", str(EXPERTS), "--top-k", str(TOP_K), "--batch", str(BATCH), "--length", str(LENGTH)),
    *("--corpus-bytes", "400000", "--evaluate-batches", "2", "--evaluate-every", "4"),
)
STEPS, CHECKPOINT = 12, 6


@pytest.fixture(scope="module", autouse=True)
def compile_once(tmp_path_factory):
    """Programs that one process compiled serve the next ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        yield


def command(script, *arguments):
    return [sys.executable, str(script), *map(str, arguments)]


def run_example(script, *arguments, returncode=0):
    done = subprocess.run(command(script, *arguments), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == returncode, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run to the end, and what it printed."""
    folder = tmp_path_factory.mktemp("train")
    counts = ("--record-counts", folder / "new" / "counts.npz")
    done = run_example(
        TRAIN, *TINY, "--steps", STEPS, "--checkpoint-every", CHECKPOINT, "--out", folder / "run", *counts
    )
    return folder, done


def results(folder):
    return json.loads((folder / "results.json").read_text())


def test_training_says_what_it_runs_on_and_how_it_ended(finished):
    folder, done = finished
    assert f"jax {jax.__version__}" in done.stdout
    assert jax.devices()[0].platform in done.stdout
    assert "implementation '" in done.stdout
    assert done.stdout.index("compiling the first step ...") < done.stdout.index("compiled in")
    assert "tokens/s" in done.stderr
    assert "Warning" not in done.stderr
    end = results(folder / "run")
    assert f"held-out loss {end['held_out_loss']:.3f} = {end['held_out_ratio']:.3f} x" in done.stdout


def test_training_learns(finished):
    end = results(finished[0] / "run")
    losses = np.array(end["losses"])
    assert losses.shape == (STEPS,)
    assert np.isfinite(losses).all()
    assert list(end["held_out_losses"]) == ["4", "8", "12"]
    assert end["held_out_losses"]["12"] < end["held_out_losses"]["4"]
    assert end["held_out_ratio"] == pytest.approx(end["held_out_loss"] / end["held_out_unigram_entropy"])
    assert end["train_loss"] == pytest.approx(losses[-20:].mean(), rel=1e-6)


def test_training_leaves_a_picture_and_a_sample(finished):
    run = finished[0] / "run"
    assert (run / "loss_and_load.png").read_bytes().startswith(b"\x89PNG")
    assert len((run / "sample.txt").read_bytes()) > 400


def test_recorded_counts_can_be_replayed(finished):
    with np.load(finished[0] / "new" / "counts.npz", allow_pickle=False) as file:
        counts, metadata = file["counts"], json.loads(str(file["metadata"]))
    assert counts.dtype == np.int32
    assert counts.shape == (STEPS, LAYERS, EXPERTS)
    assert (counts.sum(axis=2) == metadata["tokens_per_step"] * metadata["top_k"]).all()
    assert metadata["tokens_per_step"] == BATCH * LENGTH
    assert {"model", "features", "hidden_features", "jax", "jax_ggemm"} <= metadata.keys()
    assert [path.name for path in (finished[0] / "new").iterdir()] == ["counts.npz"]  # no temporary file is left


def test_resumed_run_equals_an_uninterrupted_one(finished, tmp_path):
    interrupted, counts = tmp_path / "run", tmp_path / "counts.npz"
    shutil.copytree(finished[0] / "run", interrupted)
    shutil.rmtree(interrupted / "checkpoints" / str(STEPS))  # what a process leaves that was killed after CHECKPOINT
    (interrupted / "results.json").unlink()
    done = run_example(TRAIN, "--resume", "--out", interrupted, "--record-counts", counts)
    assert f"after step {CHECKPOINT} of {STEPS}" in done.stdout
    whole, resumed = results(finished[0] / "run"), results(interrupted)
    np.testing.assert_allclose(resumed["losses"], whole["losses"], rtol=0, atol=1e-6)
    assert resumed["held_out_losses"] == pytest.approx(whole["held_out_losses"], abs=1e-6)
    with np.load(counts) as ours, np.load(finished[0] / "new" / "counts.npz") as expected:
        np.testing.assert_array_equal(ours["counts"], expected["counts"])


def test_new_run_keeps_the_old_one_and_ctrl_c_leaves_a_checkpoint(finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished[0] / "run", run)
    arguments = command(TRAIN, *TINY, "--steps", 1_000_000, "--checkpoint-every", 1_000_000, "--out", run)
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("compiled"):
                process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == 128 + signal.SIGINT, "".join(lines)
    assert results(tmp_path / "run.1") == results(finished[0] / "run")
    assert any("run.1" in line for line in lines)
    assert "--resume" in lines[-1]
    (checkpoint,) = (run / "checkpoints").iterdir()
    assert f"after step {checkpoint.name};" in lines[-1]


@pytest.fixture
def modules(monkeypatch):
    """The example's modules, importable for one test."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield importlib.import_module
    for path in EXAMPLES.glob("*.py"):
        if path.stem not in before:
            sys.modules.pop(path.stem, None)


def test_resuming_refuses_other_settings_but_more_steps(modules, finished):
    out, folders, command_line = finished[0] / "run", modules("run_folder"), modules("command_line")
    stored = folders.read_settings(out)
    with pytest.raises(folders.FolderError, match=r"--features 16, not 32: leave out --features"):
        command_line.parse("", ["--resume", "--out", str(out), "--features", "32"]).settings(stored)
    settings = command_line.parse("", ["--resume", "--steps", "20"]).settings(stored)
    assert settings.training.steps == 20
    assert settings.model.features == 16


@pytest.mark.parametrize("steps", [STEPS, 4])
def test_resuming_refuses_a_total_that_is_already_done(finished, steps):
    out = finished[0] / "run"
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    done = run_example(TRAIN, "--resume", "--out", out, "--steps", steps, returncode=2)
    assert f"the run in {out} has done {STEPS} steps; --steps is the total: pass --steps {STEPS + steps}" in done.stderr
    assert f"for {steps} more" in done.stderr
    assert "Traceback" not in done.stderr
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_steps_done_writes_nothing(modules, tmp_path):
    steps_done = modules("run_folder").steps_done
    assert steps_done(tmp_path) == 0
    assert not list(tmp_path.iterdir())
    for name in ("8", "40", "41.orbax-checkpoint-tmp"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert steps_done(tmp_path) == 40


def test_folder_without_a_run_is_neither_resumed_nor_moved(modules, tmp_path):
    folders = modules("run_folder")
    assert folders.move_old_run_aside(tmp_path / "new") is None
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(folders.FolderError, match="was not made by this program"):
        folders.move_old_run_aside(tmp_path)
    with pytest.raises(folders.FolderError, match="leave out --resume"):
        folders.read_settings(tmp_path)


@pytest.mark.parametrize(
    "arguments", [("--batch", "0"), ("--top-k", "9"), ("--features", "12"), ("--log-every", "0"), ("--dtype", "int8")]
)
def test_bad_options_exit_with_a_message(modules, capsys, arguments):
    with pytest.raises(SystemExit, match="2"):
        modules("command_line").parse("", arguments)
    assert arguments[0].strip("-").replace("-", "_") in capsys.readouterr().err.replace("-", "_")


def test_unigram_entropy_and_windows(modules):
    corpus = modules("corpus")
    text = np.arange(256, dtype=np.uint8)
    assert corpus.unigram_entropy(text) == pytest.approx(np.log(256))
    assert corpus.unigram_entropy(np.zeros(9, np.uint8)) == 0
    windows = corpus.random_windows(text, 50, 250, (0, 3))
    np.testing.assert_array_equal(windows, corpus.random_windows(text, 50, 250, (0, 3)))
    assert (windows != corpus.random_windows(text, 50, 250, (0, 4))).any()
    np.testing.assert_array_equal(np.unique(windows[:, 0]), np.arange(7))  # every place, the last one too
    np.testing.assert_array_equal(corpus.even_windows(text, 3, 100)[:, 0], [0, 78, 156])


@pytest.mark.parametrize("script", [TRAIN, COMPARE])
def test_help(script):
    done = run_example(script, "--help")
    assert f"python examples/{script.name}" in done.stdout
    assert "default: " in done.stdout


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_comparison_has_all_rows(tmp_path, dtype):
    file = tmp_path / "table.json"
    shape = ("--m", 64, "--k", 16, "--n", 24, "--groups", 4, "--repeats", 2, "--dtype", dtype)
    done = run_example(COMPARE, *shape, "--json", file)
    report = json.loads(file.read_text())
    timed = {(row["pass"], row["candidate"]) for row in report["results"]}
    expected = {"dense", "jax.lax.ragged_dot", "jax_ggemm xla"}
    if jax.devices()[0].platform == "cpu":
        expected.add("jax_ggemm cpu")
    for name in ("forward", "forward+gradients"):
        assert expected <= {candidate for one, candidate in timed if one == name}
    lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert expected <= {line.split("|")[1].strip() for line in lines[2:]}
    assert len({len(line) for line in lines}) == 1
    assert sum(report["group_sizes"]) == 64
    assert all(row["best_seconds"] > 0 for row in report["results"])
    assert expected - {"dense"} <= report["errors"].keys()
    for errors in report["errors"].values():
        assert max(errors.values()) < (1e-5 if dtype == "float32" else 3e-2)
