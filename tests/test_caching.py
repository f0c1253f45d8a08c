"""Programs with the op go into JAX's persistent compilation cache: a second process compiles nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = """
import collections, json, sys
import jax, jax.numpy as jnp
import jax_ggemm
counts = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **kwargs: counts.update([name.rsplit("/", 1)[1]]))
def loss(lhs, rhs, sizes):
    return jnp.sum(jnp.sin(jax_ggemm.ragged_dot(lhs, rhs, sizes, implementation=IMPLEMENTATION)))
lhs, rhs = jnp.arange(84.0).reshape(14, 6) / 84, jnp.arange(90.0).reshape(3, 6, 5) / 90
value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1)))(lhs, rhs, jnp.array([4, 0, 9]))
norm = float(sum(jnp.sum(g ** 2) for g in gradients))
print(json.dumps({"value": float(value), "norm": norm, "hits": counts["cache_hits"], "misses": counts["cache_misses"]}))
"""


def run(implementation: Any, cache: Path) -> dict[str, Any]:
    environment = {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    program = f"IMPLEMENTATION = {implementation!r}\n{PROGRAM}"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("implementation", [None, "cpu"])
def test_a_second_process_compiles_nothing(implementation: Any, tmp_path: Path) -> None:
    first = run(implementation, tmp_path)
    second = run(implementation, tmp_path)
    assert first["misses"] > 0
    assert second["misses"] == 0
    assert second["hits"] == first["hits"] + first["misses"]
    assert (second["value"], second["norm"]) == (first["value"], first["norm"])


def test_importing_the_package_starts_no_backend_and_loads_no_library() -> None:
    program = (
        "import sys, jax, jax_ggemm\n"
        "from jax_ggemm import ragged_dot, replace_lax_ragged_dot\n"
        "from jax.extend.backend import backends\n"
        "maps = open('/proc/self/maps').read() if sys.platform == 'linux' else ''\n"
        "assert 'libjax_ggemm' not in maps\n"
        "jax.config.update('jax_num_cpu_devices', 3)  # refused once a backend is up\n"
        "assert jax.device_count() == 3\n"
    ).replace("from jax.extend.backend import backends\n", "")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
