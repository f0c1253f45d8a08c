"""The GPU side of the library on a machine without one: devices, threads and errors on a fake driver; instantiation."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_ggemm import native

pytestmark = pytest.mark.once

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_threads_and_devices_share_what_was_loaded_once(tmp_path: Path, sanitizer: str) -> None:
    flags = ["-std=gnu++17", "-O1", "-g", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-pthread"]
    compiler = os.environ.get("CXX", "c++")
    fake = tmp_path / "libcuda.so.1"
    sources = [ROOT / "tests/cuda_runtime_threads.cc", ROOT / "ffi/cuda_runtime.cc"]
    subprocess.run([compiler, *flags, "-shared", "-fPIC", ROOT / "tests/fake_cuda.cc", "-o", fake], check=True)
    program = [compiler, *flags, "-I", ROOT / "ffi", *sources, fake, "-ldl", "-o", tmp_path / "threads"]
    subprocess.run(program, check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run(
        [tmp_path / "threads", fake], env=environment, check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


PROBE = "jax_ggemm_probe"


@pytest.fixture(scope="module")
def probe() -> Any:
    """Compiles a program that calls the GPU's handler on this machine's CPU, where it is instantiated alike."""
    library = native._library()
    stages = {
        "instantiate": jax.ffi.pycapsule(library.jax_ggemm_cuda_instantiate),
        "execute": jax.ffi.pycapsule(library.jax_ggemm_cuda),
    }
    jax.ffi.register_ffi_target(PROBE, stages, platform="cpu")

    def compiled(**attributes: Any) -> Any:
        shape = jax.ShapeDtypeStruct((2,), jnp.float32)
        return jax.jit(lambda x: jax.ffi.ffi_call(PROBE, shape)(x, **attributes)).lower(shape).compile()

    return compiled


def test_objects_of_a_program_are_known_from_its_instantiation_on(probe: Any) -> None:
    keys = {"sm_90a": "some key", "sm_100a": "another key"}
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"object is not known.*product forward, kernel (some|another)"
    ):
        probe(product="forward", keys=keys)
    objects = {key: bytes(range(256)) * 100 for key in keys.values()}
    probe(product="forward", keys=keys, objects=objects)
    probe(product="forward", keys=keys)  # without, from then on


@pytest.mark.parametrize("attributes", [{}, {"product": "forward"}, {"product": 1, "keys": {}}], ids=str)
def test_calls_with_other_attributes_are_refused(probe: Any, attributes: Any) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError):
        probe(**attributes)
