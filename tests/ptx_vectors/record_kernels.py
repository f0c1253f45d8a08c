"""Runs the Hopper kernels on a GPU and keeps what came out: `python -m ptx_vectors.record_kernels [FILE]` in tests/.

With --compile it makes the kernels' objects instead, on a machine that has the CuTe DSL.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np

from jax_ggemm import cute, objects
from jax_ggemm.kernel import config
from ptx_vectors.kernels import Case, cases

PATH = Path(__file__).with_name("recorded_kernels.npz")
ARCHITECTURE = "sm_90a"


def run(case: Case, implementation: Any) -> np.ndarray:
    """The result of a case as it lies in memory.

    Args:
      case: which.
      implementation: grouped_product(call, operands), as `Call.implementation` has it.

    Returns:
      Unsigned integers of the result's size.
    """
    call, operands = case.operands()
    with mock.patch.object(config, "pick", return_value=case.config):
        result = jax.jit(lambda *a: implementation(*a), static_argnums=0)(call, operands)
    array = np.asarray(result)
    return array.view({2: np.uint16, 4: np.uint32}[array.itemsize])


def digest(array: np.ndarray) -> str:
    """Of a result."""
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


def _compile() -> None:
    specs = list(dict.fromkeys(case.spec for case in cases()))
    missing = [
        s for s in specs if objects.read(objects.cache_directory() / f"{objects.key(s, ARCHITECTURE)}.o") is None
    ]
    for spec, compiled in zip(missing, objects.build_all(missing, ARCHITECTURE), strict=True):
        objects.write(objects.cache_directory() / f"{objects.key(spec, ARCHITECTURE)}.o", compiled.data)
    print(f"{len(specs)} objects in {objects.cache_directory()}")


def _record(path: Path) -> None:
    exact: dict[str, str] = {}
    arrays: dict[str, np.ndarray] = {}
    rounded: dict[str, str] = {}
    failed = 0
    for case in cases():
        try:
            call, operands = case.operands()
            reason = cute.unsupported(call, operands)
            if reason is not None:
                raise RuntimeError(reason)
            result = run(case, cute.grouped_product)
        except Exception as error:  # every other case is still worth having
            failed += 1
            print(f"{case.name:64} FAILED {type(error).__name__}: {str(error)[:200]}", flush=True)
            continue
        if case.exact:
            exact[case.name] = digest(result)
        else:
            rounded[case.name] = digest(result)
            arrays[rounded[case.name]] = result  # configurations that add in the same order give the same result
        print(f"{case.name:64} {digest(result)}", flush=True)
    machine = {
        "gpu": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "platform": jax.devices()[0].client.platform_version.replace("\n", " "),
        "kernel sources": objects.versions()["sources"],
        "dsl": objects.versions()["dsl"],
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    about = json.dumps({"exact": exact, "rounded": rounded, "machine": machine})
    with path.open("wb") as file:
        np.savez_compressed(file, about=np.array(about), **arrays)  # type: ignore[arg-type]
    print(
        f"{len(exact)} exact, {len(rounded)} rounded in {len(arrays)} different results, {failed} failed;"
        f" {path.stat().st_size} bytes in {path}; {machine}"
    )


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=PATH)
    parser.add_argument("--compile", action="store_true", help="only make the kernels' objects")
    arguments = parser.parse_args()
    if arguments.compile:
        _compile()
    else:
        _record(arguments.file)


if __name__ == "__main__":
    main()
