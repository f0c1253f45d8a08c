"""The CPU handler's products against a plain loop in C++, under the address and undefined-behaviour sanitizers."""

from __future__ import annotations

import os
import platform
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

_ROOT = Path(__file__).parent.parent
_X86 = platform.machine() in ("x86_64", "AMD64")
_FLAGS = {
    "tests/fuzz_grouped_product.cc": [],
    "ffi/grouped_product.cc": [],
    "ffi/inner_product_base.cc": [],
}
if _X86:
    _FLAGS["ffi/inner_product_avx2.cc"] = ["-mavx2", "-mfma"]
    _FLAGS["ffi/inner_product_avx512.cc"] = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma"]


def _compile(arguments: list[str]) -> None:
    compiler = os.environ.get("CXX", "c++")
    sanitize = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-pthread"]
    subprocess.run([compiler, "-std=gnu++17", "-O1", *sanitize, *arguments], check=True)


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")

    def compile_one(source: str) -> str:
        compiled = str(folder / Path(source).with_suffix(".o").name)
        define = ["-DJAX_GGEMM_X86"] if _X86 else []
        _compile(["-c", str(_ROOT / source), "-I", str(_ROOT / "ffi"), "-o", compiled, *define, *_FLAGS[source]])
        return compiled

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, _FLAGS))
    _compile([*objects, "-o", str(folder / "fuzz")])
    return folder / "fuzz"


@pytest.mark.parametrize("instruction_set", ["base", "avx2", "avx512"])
@pytest.mark.parametrize("seed", [1, 2])
def test_random_products_are_right_and_stay_inside_their_arrays(fuzzer: Path, instruction_set: str, seed: int) -> None:
    result = subprocess.run([fuzzer, instruction_set, str(seed), "100"], check=False, capture_output=True, text=True)
    if result.returncode == 2 and instruction_set != "base":
        pytest.skip(f"this processor has no {instruction_set}")
    assert result.returncode == 0, result.stdout + result.stderr
