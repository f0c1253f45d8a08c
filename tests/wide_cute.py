"""The "cute" implementation for tests that are written in float32: every product is exact sums of bfloat16 products.

The tests of behaviour compare with float64 loops, as closely as float32 allows. This object brings their float32 data
to the kernels: each operand is three bfloat16 arrays, whose products the kernels add up in float32. So what surrounds
the kernels (padding, batches, pieces, gradients) and the kernels themselves are held to the tolerances of float32.

On a machine with a GPU the kernels run. On others the CPU's handler stands in for them, at the custom call: it takes
the same operands, and here it takes only those that the kernels take.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ggemm import cute, native
from jax_ggemm.kernel import config
from jax_ggemm.products import Call, Operands, Product

HAS_GPU = cute._architecture() is not None


class CpuStandIn:
    """Runs a kernel's custom call on the CPU's handler, after checks of what the kernel relies on."""

    architectures = ("sm_90a",)

    def unavailable(self, spec: config.KernelSpec, arch: str) -> str | None:
        del spec, arch
        return None

    def call(self, specs: Mapping[str, config.KernelSpec], arrays: list[jax.Array], result: Any) -> jax.Array:
        (spec,) = specs.values()
        lhs, rhs, sizes, offset, *bias = arrays
        batch = result.shape[0]
        weights = result if spec.product is Product.DRHS else rhs
        assert lhs.dtype == rhs.dtype == spec.in_dtype
        assert spec.in_dtype in (jnp.bfloat16, jnp.float16)
        assert result.dtype == spec.out_dtype
        assert spec.out_dtype in (spec.in_dtype, np.float32)
        assert (sizes.dtype, offset.dtype) == (np.int32, np.int32)
        assert bool(bias) == spec.has_bias
        assert all(row.dtype == np.float32 for row in bias)
        assert {array.shape[0] for array in (lhs, rhs, *bias)} <= {1, batch}
        assert {array.shape[0] for array in (sizes, offset)} == {batch}
        for array in (lhs, rhs, result):
            assert array.shape[-1] % 8 == 0
        assert weights.shape[-2] % 8 == 0
        native.register()
        return jax.ffi.ffi_call(native.TARGET, result)(*arrays, product=spec.product.value)


@dataclasses.dataclass(frozen=True)
class WideCute:
    """The kernels, on operands of float32 too."""

    name: str = "cute"

    def __str__(self) -> str:
        return self.name

    def unsupported(self, call: Call, operands: Operands) -> str | None:
        if np.float64 in (operands.lhs.dtype, operands.rhs.dtype, call.out_dtype):
            return "the kernels add in float32"
        return cute._unsupported_shape(call, operands)

    def __call__(self, call: Call, operands: Operands) -> jax.Array:
        exact = dataclasses.replace(call, precision=lax.Precision.HIGHEST)
        return cute.grouped_product(exact, operands, None if HAS_GPU else CpuStandIn())
