"""What the command line refuses before any work, and how: the argument, what came, and what would do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jax_ggemm import __main__ as command_line
from jax_ggemm import bench_report, benchmark, info, tune

pytestmark = pytest.mark.once

WHOLE = "a whole number from 1 to 2147483647 is needed"
REFUSED = [
    ("info --m -3", f"argument --m: '-3'; {WHOLE}"),
    ("info --dtype bf16", "argument --dtype: 'bf16' is no dtype; bfloat16, float16 or float32 would do"),
    ("info --dtype str", "argument --dtype: 'str' is no dtype of numbers"),
    ("info --dtype int64", "argument --dtype: 'int64' needs the environment variable JAX_ENABLE_X64=1"),
    ("bench --m -64", f"argument --m: '-64'; {WHOLE}"),
    ("bench --groups 8 0", f"argument --groups: '0'; {WHOLE}"),
    ("bench --repeats 0", f"argument --repeats: '0'; {WHOLE}"),
    ("bench --k 3000000000", f"argument --k: '3000000000'; {WHOLE}"),
    ("bench --n x", f"argument --n: 'x'; {WHOLE}"),
    ("bench --budget -1", "argument --budget: '-1'; a number of 0 or more is needed"),
    ("bench --budget nan", "argument --budget: 'nan'; a number of 0 or more is needed"),
    ("bench --dtype nope", "argument --dtype: 'nope' is no dtype"),
    ("bench --dtype int8", "argument --dtype: 'int8' is no float dtype; bfloat16, float16 or float32 would do"),
    ("bench --counts none.npz", "argument --counts: none.npz: No such file or directory"),
    ("bench --counts a.txt", "argument --counts: a.txt is no .npz file, or not all of one"),
    ("bench --counts a.npy", "argument --counts: a.npy is no .npz file, or not all of one"),
    ("bench --json .", "argument --json: . is a folder; the name of a file is needed"),
    ("bench --json no/a.json", "argument --json: no/a.json: there is no folder no; make it first"),
    ("bench --shapes all --state warm", "'steady', 'rested'"),
    ("bench --shapes all --state rested", "argument --state: it is what a GPU did before it is timed"),
    ("bench --shapes all --m 64", "argument --m: it is of one problem of equal groups"),
    ("bench --layers glm_layer_m64 --repeats 3", "argument --repeats: it is of one problem of equal groups"),
    ("bench --implementations tokamax", "argument --implementations: it is of the table of shapes"),
    ("tune", "name what to tune for: --shapes, --counts or --problem"),
    ("tune --problem 64 64 0 2", f"argument --problem: '0'; {WHOLE}"),
    ("tune --shapes all --dtype bf16", "argument --dtype: 'bf16' is no dtype"),
    ("tune --counts none.npz", "argument --counts: none.npz: No such file or directory"),
    ("compile --out o --dtypes bfloat16 float32", "there are kernels for sm_90a of bfloat16, float16\n"),
    ("compile --out o --dtypes int8", "argument --dtypes: int8; there are kernels for sm_90a of bfloat16, float16\n"),
    ("compile --out o --arch sm_100a --dtypes bf16", "for sm_100a of bfloat16, float16, float32\n"),
    ("compile --out a.txt", "argument --out: a.txt is a file; a folder is needed"),
    ("compile --out a.txt/o", "/a.txt is a file; a folder is needed"),
    ("compile --out o --max-mib -1", "argument --max-mib: '-1'; a number of 0 or more is needed"),
    ("compile --out o --keep ptx,sass", "argument --keep: sass: choose from ptx, cubin"),
]


@pytest.fixture
def no_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with some files, and commands that must not begin."""
    (tmp_path / "a.txt").write_text("text")
    np.save(tmp_path / "a.npy", np.zeros(3))
    monkeypatch.chdir(tmp_path)

    def begun(*arguments: Any, **options: Any) -> None:
        raise AssertionError("work began")

    for module, name in ((info, "report"), (bench_report, "run"), (benchmark, "run"), (tune, "run")):
        monkeypatch.setattr(module, name, begun)
    monkeypatch.setattr(command_line.compile_objects, "compile_all", begun)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(("command", "words"), REFUSED, ids=[command for command, _ in REFUSED])
def test_refused(command: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        command_line.main(command.split())
    assert refused.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.usefixtures("no_work")
def test_on_a_gpu_the_table_is_timed_and_options_of_one_problem_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(SystemExit):
        command_line.main(["bench", "--groups", "4"])
    assert "argument --groups: it is of one problem of equal groups" in capsys.readouterr().err
    plans: list[bench_report.Plan] = []
    monkeypatch.setattr(bench_report, "run", plans.append)
    command_line.main(["bench", "--state", "rested", "--implementations", "dense", "--json", "a.json"])
    command_line.main(["bench"])
    assert [(plan.state, plan.names, plan.budget) for plan in plans] == [
        (bench_report.State.RESTED, ["dense"], 240.0),
        (bench_report.State.STEADY, command_line.bench_products.NAMES, 240.0),
    ]
    assert not Path("a.json").exists()


@pytest.mark.parametrize("command", ["info", "bench", "tune", "compile"])
def test_help_says_the_defaults_that_there_are(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command_line.main([command, "--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "None)" not in text
    assert "[])" not in text
    defaults = {"info": "(default: 4096)", "bench": "(default: [8, 64])", "tune": "(default: bfloat16)"}
    assert defaults.get(command, "(default: sm_90a)") in text
