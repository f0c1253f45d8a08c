"""The package as a user gets it: one wheel on the oldest and the newest JAX, and what importing it loads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from jax_ggemm import native, objects
from jax_ggemm.files import write_json

_ROOT = Path(__file__).parent.parent
_OLDEST = "0.10.2"

_USE = """
import jax, jax.numpy as jnp, jax_ggemm
lhs, rhs, sizes = jnp.ones((5, 3)), jnp.ones((2, 3, 4)), jnp.array([2, 2])
def loss(lhs, rhs):
    return jax_ggemm.ragged_dot(lhs, rhs, sizes, implementation="cpu").sum()
value, (d_lhs, d_rhs) = jax.jit(jax.value_and_grad(loss, (0, 1)))(lhs, rhs)
assert value == 48 and d_lhs.sum() == 48 and d_rhs.sum() == 48, (value, d_lhs, d_rhs)
print(jax.__version__)
"""

_IMPORT = """
import sys
import jax
before = set(sys.modules)
import jax_ggemm
loaded = {name.split(".")[0] for name in set(sys.modules) - before}
assert loaded <= {"jax", "jaxlib", "jax_ggemm"}, loaded
from jax_ggemm import native
assert native.register.cache_info().currsize == 0, "importing jax_ggemm loads the native library"
"""


def _python(interpreter: str | Path, *arguments: str) -> str:
    # Away from the source tree, so that only the installed package is found.
    result = subprocess.run(
        [interpreter, *arguments], check=False, capture_output=True, text=True, cwd=Path(sys.executable).parent
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.strip()


def _newer_interpreters() -> list[str]:
    """Interpreters that the newest JAX supports: this one if it does, or others found on the machine."""
    names = [f"python3.{minor}" for minor in (12, 13, 14)]
    pyenv = Path.home() / ".pyenv" / "versions"
    found = [sys.executable, *filter(None, map(shutil.which, names))]
    found += [str(path) for name in names for path in sorted(pyenv.glob(f"*/bin/{name}"))]
    check = "import sys, ensurepip; sys.exit(sys.version_info < (3, 12))"
    return [
        path for path in found if subprocess.run([path, "-c", check], check=False, capture_output=True).returncode == 0
    ]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, _ROOT], check=True
    )
    (built,) = folder.glob("jax_ggemm-*.whl")
    assert "-py3-none-" in built.name
    return built


@pytest.mark.install
@pytest.mark.parametrize("jax_version", [_OLDEST, "newest"])
def test_one_wheel_works_on_the_oldest_and_the_newest_jax(wheel: Path, tmp_path: Path, jax_version: str) -> None:
    if jax_version == "newest":
        interpreters = _newer_interpreters()
        if not interpreters:
            assert "CI" not in os.environ, "CI must have a Python that the newest JAX supports"
            pytest.skip("the newest JAX needs Python 3.12 or later, and this machine has none")
        interpreter, requirement = interpreters[0], "jax"
    else:
        interpreter, requirement = sys.executable, f"jax=={jax_version}"
    _python(interpreter, "-m", "venv", str(tmp_path / "env"))
    python = tmp_path / "env" / "bin" / "python"
    _python(python, "-m", "pip", "install", "--quiet", requirement, str(wheel))
    version = _python(python, "-c", _USE)
    assert (version == _OLDEST) == (jax_version == _OLDEST)


_FIND = """
import sys
from jax_ggemm import objects
assert objects.read(objects.packaged_directory() / "kept.o") == b"an object"
assert not (objects.packaged_directory() / "stale.o").exists()
"""


@pytest.mark.install
def test_a_wheel_holds_the_objects_that_a_manifest_names(tmp_path: Path) -> None:
    for name in ("kept", "stale"):
        objects.write(tmp_path / "objects" / f"{name}.o", b"an object")
    write_json(tmp_path / "objects" / "manifest.json", {"kernels": [{"key": "kept"}]})
    setting = f"--config-settings=cmake.define.JAX_GGEMM_OBJECTS={tmp_path / 'objects'}"
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, setting, _ROOT]
    subprocess.run(command, check=True)
    (built,) = tmp_path.glob("jax_ggemm-*.whl")
    with zipfile.ZipFile(built) as wheel:
        wheel.extractall(tmp_path / "site")
    _python(sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n{_FIND}")


def test_importing_loads_nothing_beyond_jax_and_not_the_native_library() -> None:
    _python(sys.executable, "-c", _IMPORT)


@pytest.mark.parametrize("runs", [(0, 0), (1, 9)])
def test_a_library_built_for_another_ffi_version_is_refused_before_it_is_registered(
    monkeypatch: pytest.MonkeyPatch, runs: tuple[int, int]
) -> None:
    monkeypatch.setattr(native, "_runtime_ffi_version", lambda: runs)
    load = native._library.__wrapped__  # not the one that other tests have loaded
    with pytest.raises(ImportError, match=rf"built for XLA FFI 0\.3, .* has {runs[0]}\.{runs[1]}"):
        load()


def test_a_missing_library_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_LIBRARY", "libabsent.so")
    with pytest.raises(ImportError, match="pip install"):
        native._library.__wrapped__()
