"""What `jax.export` and the process that loads an exported program need."""

from __future__ import annotations

import dataclasses
import functools

import jax
from jax import lax
from jax.export import DisabledSafetyCheck

from jax_ggemm import cpu, cute, native, objects, xla
from jax_ggemm.products import Call, Operands

export_checks = (DisabledSafetyCheck.custom_call(native.TARGET),)
"""For `jax.export.export(f, disabled_checks=jax_ggemm.export_checks)`.

JAX refuses to export custom calls that it does not know, since it cannot promise that they stay compatible. A
program exported with this one runs where this version of jax_ggemm, or a later one, is installed and its
`ragged_dot` has been called or `jax_ggemm.register()` was.
"""


def register() -> None:
    """Makes the custom call known to XLA, for programs that were not traced in this process.

    Raises:
      ImportError: where the compiled library is missing, or does not fit the installed jaxlib.
    """
    native.register()
    native.register_cuda()
    runtime = objects.runtime_library()
    if runtime is not None:
        native.set_runtime(runtime)


@dataclasses.dataclass(frozen=True)
class GpuKernels:
    """`implementation=` for programs that are compiled here and run elsewhere: for `jax.export`.

    On NVIDIA GPUs of the named architectures the program runs the kernels of "cute", and holds their objects: no GPU
    and no file is needed where it is exported, and no compiler where it is loaded. On other platforms it takes the
    native CPU handler or plain JAX.

    Attributes:
      architectures: what to hold kernels for: "sm_90a" (Hopper), "sm_100a" and "sm_103a" (Blackwell).
    """

    architectures: tuple[str, ...] = ("sm_90a",)

    def __post_init__(self) -> None:
        known = tuple(cute.ARCHITECTURES.values())
        if not self.architectures or not set(self.architectures) <= set(known):
            raise ValueError(f"architectures must be some of {known}; got {self.architectures!r}")

    @property
    def name(self) -> str:
        """What errors call it."""
        return f"cute for {', '.join(self.architectures)}"

    @property
    def _targets(self) -> cute.Targets:
        return cute.Targets(self.architectures, embedded=True)

    def unsupported(self, call: Call, operands: Operands) -> str | None:
        """Why the kernels cannot take the call, or None where they can."""
        return cute.unsupported(call, operands, self._targets)

    def __call__(self, call: Call, operands: Operands) -> jax.Array:
        """The product; every operand may carry batch axes, of full length or of length 1."""
        platforms = {"cuda": functools.partial(cute.grouped_product, call, launcher=self._targets)}
        if cpu.unsupported(call, operands) is None:
            platforms["cpu"] = functools.partial(cpu.grouped_product, call)
        return lax.platform_dependent(operands, default=functools.partial(xla.grouped_product, call), **platforms)
