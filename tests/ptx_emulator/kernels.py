"""The project's kernels for the emulator: an object with the PTX of the very same compilation."""

from __future__ import annotations

import dataclasses
import functools
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

from jax_ggemm import objects
from jax_ggemm.files import write_whole
from jax_ggemm.kernel.config import KernelSpec

from ptx_emulator import native
from ptx_emulator.host_object import HostObject

PREFIX = "jax_ggemm"
"""What kernel/build.py calls the function in every object."""

_PROGRAM = """
import os, pickle, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from cutlass import cute
compile_function, kept = cute.compile, []
class Keep:
    def __call__(self, *args, **kwargs):
        kept.append(compile_function(*args, **kwargs))
        return kept[-1]
    def __getattr__(self, name):
        return getattr(compile_function, name)
cute.compile = Keep()
from jax_ggemm.kernel import build
arch, spec = pickle.load(sys.stdin.buffer)
data = build.build(spec, arch)
ptx = kept[-1].__ptx__
if "\\n" not in ptx:
    ptx = Path(ptx).read_text()
Path(sys.argv[2]).write_bytes(pickle.dumps((data, ptx)))
"""


@dataclasses.dataclass(frozen=True)
class CompiledKernel:
    """What one compilation gave."""

    data: bytes
    ptx: str

    @functools.cached_property
    def host(self) -> HostObject:
        """Its host code, ready to run."""
        return HostObject(self.data, PREFIX)


def _compile(spec: KernelSpec, arch: str) -> bytes:
    """As `objects.build` does, with the PTX kept."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CUTE_DSL_")}
    with tempfile.TemporaryDirectory() as folder:
        environment |= {
            "CUTE_DSL_ARCH": arch,
            "CUTE_DSL_KEEP": "ptx",
            "CUTE_DSL_DUMP_DIR": folder,
            "JAX_PLATFORMS": "cpu",
        }
        target = Path(folder) / "kernel"
        root = Path(objects.__file__).parent.parent
        result = subprocess.run(
            [sys.executable, "-c", _PROGRAM, str(root), str(target)],
            input=pickle.dumps((arch, spec)),
            capture_output=True,
            env=environment,
            check=False,
        )
        if result.returncode != 0:
            raise RuntimeError(f"the CuTe DSL could not compile {spec} for {arch}:\n{result.stderr.decode()[-4000:]}")
        return target.read_bytes()


@functools.cache
def compiled(spec: KernelSpec, arch: str) -> CompiledKernel:
    """A kernel's object and PTX, from this user's cache or compiled now, which needs the CuTe DSL."""
    path = native.cache_directory() / f"kernel-{objects.key(spec, arch)}.pickle"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        content = _compile(spec, arch)
        write_whole(path, lambda file: file.write(content))
    return CompiledKernel(*pickle.loads(path.read_bytes()))
