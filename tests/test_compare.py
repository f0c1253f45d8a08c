"""`benchmarks/compare.py` and `benchmarks/peers.py`: what shares a table, and what is refused in which words."""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jax_ggemm.shapes import BY_NAME

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import compare
import peers

pytestmark = pytest.mark.once


def report(candidate: str, microseconds: float, *shapes: str) -> dict[str, Any]:
    """A report of the forward product on shapes of 10 rows in 2 groups, with k 20 and n 30."""
    sizes = {"k": 20, "n": 30, "group_sizes": [4, 6], "source": "a test"}
    return {
        "environment": {"device": "H200", "date": "today"},
        "state": "steady",
        "dtype": "bfloat16",
        "rates": {"dense_flops": 1e12, "read_bytes": 1e10, "written_bytes": 1e10},
        "shapes": [{"name": name, **sizes} for name in shapes],
        "products": [
            {"shape": name, "product": "forward", "candidate": candidate, "microseconds": microseconds, "error": None}
            for name in shapes
        ],
    }


OURS, TORCH = report("jax_ggemm", 10.0, "a", "b"), report("torch", 20.0, "a", "b")


def changed(value: dict[str, Any], change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    value = copy.deepcopy(value)
    change(value)
    return value


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Compares reports, or the texts of files, named 0.json, 1.json and so on, and returns what is printed."""

    def run(*reports: Any) -> str:
        for i, content in enumerate(reports):
            (tmp_path / f"{i}.json").write_text(content if isinstance(content, str) else json.dumps(content))
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["compare.py", *(f"{i}.json" for i in range(len(reports)))])
        compare.main()
        return capsys.readouterr().out

    return run


def cells(text: str) -> dict[str, list[str]]:
    """The cells of the table by those of its first column."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    return {line[0]: line[1:] for line in lines}


def test_ratios_rooflines_and_the_best_rates(run: Callable[..., str]) -> None:
    fast = changed(TORCH, lambda r: r["rates"].update(read_bytes=2e10))
    fast["products"][1]["microseconds"] = 80.0
    text = run(OURS, fast)
    assert "state of the device: steady\ndtype: bfloat16" in text
    assert "0.02 TB/s read" in text
    table = cells(text)
    assert table["shape"] == [
        "product", "roofline us", "ours us", "of roofline", "torch us", "torch / ours", "error / dense's"
    ]  # fmt: skip
    assert [table[name][5] for name in ("a", "b", "geometric mean")] == ["2.00", "8.00", "4.00"]
    # 2 bytes each of (10, 20) and two (20, 30) read at 2e10 bytes/s, of (10, 30) written at 1e10
    assert table["a"][3] == f"{(2 * (200 + 1200) / 2e4 + 2 * 300 / 1e4) / 10:.2f}"
    wide = [changed(r, lambda r: r.update(dtype="float32")) for r in (OURS, fast)]
    assert cells(run(*wide))["a"][3] == f"{2 * (2 * (200 + 1200) / 2e4 + 2 * 300 / 1e4) / 10:.2f}"


def test_shapes_that_the_first_file_lacks_are_left_out_and_said(run: Callable[..., str]) -> None:
    text = run(OURS, report("torch", 20.0, "b", "c"))
    assert "left out, since 0.json lacks them: c of 1.json" in text
    assert cells(text).keys() == {"shape", "a", "b", "geometric mean"}
    failed = changed(OURS, lambda r: r["products"][0].update(microseconds=None))
    assert cells(run(failed, report("torch", 20.0, "a"))).keys() == {"shape", "b", "geometric mean"}


REFUSED = {
    "another state": ((OURS, changed(TORCH, lambda r: r.update(state="rested"))), r"states .*0.json \(steady\), 1"),
    "a CPU": ((OURS, changed(TORCH, lambda r: r.update(state=None))), r"1.json \(none, on a CPU\)"),
    "no state": ((OURS, changed(TORCH, lambda r: r.update(state="warm"))), r"1.json: 'warm' is no state: steady, res"),
    "another dtype": (
        (OURS, changed(TORCH, lambda r: r.update(dtype="float32"))),
        r"dtypes .*0.json \(bfloat16\), 1.json \(float32\)",
    ),
    "another device": (
        (OURS, changed(TORCH, lambda r: r["environment"].update(device="H100"))),
        r"devices .*0.json \(H200\), 1.json \(H100\)",
    ),
    "another shape": (
        (OURS, changed(TORCH, lambda r: r["shapes"][1].update(group_sizes=[5, 5]))),
        r"the shape b is not the same in 0.json and 1.json: .*groups of 4, 6 rows, .*groups of 5, 5 rows",
    ),
    "ours twice": ((OURS, OURS), "a forward jax_ggemm is timed twice, in 0.json and 1.json"),
    "no common shape": ((OURS, report("torch", 20.0, "c")), "1.json: no shape in it that is in 0.json"),
    "another order": ((TORCH, OURS), "0.json: no times of jax_ggemm in it: .* goes first"),
    "half a file": ((OURS, json.dumps(TORCH)[:99]), "1.json: no JSON, or not all of it"),
    "no rates": ((OURS, changed(TORCH, lambda r: r.pop("rates"))), "1.json: no rates in it: an older version"),
    "older peers": (
        (OURS, {name: TORCH[name] for name in ("environment", "state", "rates", "products")}),
        "1.json: no dtype, shapes in it: an older version measured; measure again",
    ),
    "one problem": (({"environment": {}, "results": []},), "0.json: no report over shapes: .*--shapes"),
    "a list": (([],), "0.json: no report over shapes: .*--shapes"),
    "something else": ((changed(OURS, lambda r: r.update(rates={"speed": 1})),), "0.json: not as `bench` .*'speed'"),
}


@pytest.mark.parametrize(("reports", "words"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_compare_is_refused(run: Callable[..., str], reports: tuple[Any, ...], words: str) -> None:
    with pytest.raises(SystemExit, match=rf"^error: .*{words}"):
        run(*reports)


def test_a_missing_file_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["compare.py", "/nowhere.json"])
    with pytest.raises(SystemExit, match=r"^error: /nowhere.json: No such file"):
        compare.main()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--help"], 0, "--all-configurations"),
        (["--json", "."], 2, "argument --json: . is a folder"),
        (["--json", "no/peers.json"], 2, "argument --json: no/peers.json: there is no folder no"),
        (["--json", "peers.json", "--state", "warm"], 2, "steady"),
        (["--json", "peers.json", "--budget", "-1"], 2, "argument --budget: '-1'; a number of 0 or more"),
    ],
)
def test_options_of_peers_are_read_without_torch(
    arguments: list[str], code: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(sys, "argv", ["peers.py", *arguments])
    with pytest.raises(SystemExit) as refused:
        peers.main()
    assert refused.value.code == code
    assert words in "".join(capsys.readouterr())


def test_what_peers_writes_compares(
    run: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = BY_NAME["glm_gateup_m64"]
    cuda = types.SimpleNamespace(get_device_name=lambda: "H200", is_available=lambda: True, empty_cache=lambda: None)
    times = [{"shape": shape.name, "product": "forward", "candidate": "torch", "microseconds": 30.0}]
    measured = types.SimpleNamespace(
        DTYPE="torch.bfloat16", rates=lambda state: OURS["rates"], time_shape=lambda shape, names, state: times
    )
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda, __version__="2"))
    monkeypatch.setitem(sys.modules, "torch_products", measured)
    out = tmp_path / "peers.json"
    monkeypatch.setattr(
        sys, "argv", ["peers.py", "--peers", "torch", "--shapes", shape.name, "--state", "rested", "--json", str(out)]
    )
    peers.main()
    capsys.readouterr()
    ours = report("jax_ggemm", 10.0, shape.name) | {"state": "rested", "shapes": [dataclasses.asdict(shape)]}
    assert cells(run(ours, out.read_text()))[shape.name][5] == "3.00"
    monkeypatch.setattr(cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["peers.py", "--peers", "torch", "--json", str(out)])
    with pytest.raises(SystemExit, match="error: torch finds no GPU"):
        peers.main()


def test_without_torch_it_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(sys, "argv", ["peers.py", "--json", str(tmp_path / "peers.json")])
    with pytest.raises(SystemExit, match=r"^error: .*; torch is needed"):
        peers.main()
