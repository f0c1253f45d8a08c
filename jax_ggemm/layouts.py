"""How expert weights lie in memory, and exact conversions between layouts.

This module knows parameters only: their shapes, where gate and up sit in the fused gate/up weight, and which axis of a
matrix comes first. It does no arithmetic, so a conversion there and back returns every bit as it was (but for the
payload of a NaN in bfloat16 JAX arrays, which XLA may quiet as it copies). It works on NumPy arrays (a checkpoint that
is being read) as well as on JAX arrays, and keeps the kind that it was given.

With `w` the arrays of one MoE block of a Hugging Face checkpoint, by name, and the experts' `gate_proj.weight`,
`up_proj.weight` and `down_proj.weight` in lists, a `layer` of `jax_ggemm.nnx_moe.MoE` in `DEFAULT` layout gets them so:

    dtype = layer.param_dtype
    layer.router[...] = jnp.asarray(w["gate.weight"].T).astype(jnp.float32)  # (E, D) in the checkpoint
    experts = stack_experts(gates, ups, downs, DEFAULT)  # or convert(ExpertParams(gate_up, down), HF_LINEAR, DEFAULT)
    layer.gate_up[...], layer.down[...] = (jnp.asarray(a).astype(dtype) for a in experts[:2])
    one = stack_experts([shared_gate], [shared_up], [shared_down], DEFAULT)  # w["shared_experts.gate_proj.weight"], ...
    layer.shared_gate_up[...], layer.shared_down[...] = (jnp.asarray(a[0]).astype(dtype) for a in one[:2])
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

__all__ = [
    "CONCATENATED",
    "DEFAULT",
    "GPT_OSS",
    "HF_LINEAR",
    "INTERLEAVED",
    "Concatenated",
    "ExpertLayout",
    "ExpertParams",
    "GateUp",
    "Interleaved",
    "convert",
    "stack_experts",
    "unstack_experts",
]

Array = Any  # jax.Array or numpy.ndarray


class GateUp(Protocol):
    """Where gate and up sit on the fused axis of length 2M of a gate/up weight, bias or result."""

    def split(self, fused: Array, axis: int = -1) -> tuple[Array, Array]:
        """Takes gate and up, each of length M on `axis`, out of `fused`, of length 2M there."""

    def join(self, gate: Array, up: Array, axis: int = -1) -> Array:
        """Puts gate and up together again: the exact inverse of `split`."""


@dataclasses.dataclass(frozen=True)
class Concatenated:
    """All of gate, then all of up: [g0, g1, ..., u0, u1, ...] (Qwen3, GLM, DeepSeek and most others)."""

    def split(self, fused: Array, axis: int = -1) -> tuple[Array, Array]:
        """Takes gate and up out of `fused`; see `GateUp.split`."""
        half = _half(fused, axis)
        return fused[_slice(fused, axis, slice(None, half))], fused[_slice(fused, axis, slice(half, None))]

    def join(self, gate: Array, up: Array, axis: int = -1) -> Array:
        """Concatenates gate and up; see `GateUp.join`."""
        return _module(gate).concatenate([gate, up], axis=axis)


@dataclasses.dataclass(frozen=True)
class Interleaved:
    """Gate and up alternate: [g0, u0, g1, u1, ...] (gpt-oss)."""

    def split(self, fused: Array, axis: int = -1) -> tuple[Array, Array]:
        """Takes gate and up out of `fused`; see `GateUp.split`."""
        pairs = _pairs(fused, axis)
        return pairs[_slice(pairs, axis, 0, after=1)], pairs[_slice(pairs, axis, 1, after=1)]

    def join(self, gate: Array, up: Array, axis: int = -1) -> Array:
        """Alternates gate and up; see `GateUp.join`."""
        axis = axis % gate.ndim
        pairs = _module(gate).stack([gate, up], axis=axis + 1)
        return pairs.reshape(*gate.shape[:axis], 2 * gate.shape[axis], *gate.shape[axis + 1 :])


CONCATENATED = Concatenated()
INTERLEAVED = Interleaved()


@dataclasses.dataclass(frozen=True)
class ExpertLayout:
    """The layout of one set of expert weights.

    With E experts, model width K (a checkpoint's "hidden size") and expert width M ("moe intermediate size"):

    ==============  ===================  ===================
    parameter       out_first=False      out_first=True
    ==============  ===================  ===================
    gate_up         (E, K, 2M)           (E, 2M, K)
    down            (E, M, K)            (E, K, M)
    gate_up_bias    (E, 2M)              (E, 2M)
    down_bias       (E, K)               (E, K)
    ==============  ===================  ===================

    Attributes:
      gate_up: how the axis of length 2M holds gate and up: `CONCATENATED` or `INTERLEAVED`, or another `GateUp`.
      out_first: whether each matrix is stored as `torch.nn.Linear` stores it, output features first. Both are
        multiplied without a transpose at run time.
    """

    gate_up: GateUp = CONCATENATED
    out_first: bool = False


DEFAULT = ExpertLayout()
"""(E, K, 2M) with all of gate first, and (E, M, K)."""

HF_LINEAR = ExpertLayout(CONCATENATED, out_first=True)
"""Fused `[E, 2M, H]` and `[E, H, M]` of Hugging Face's Qwen3-MoE, GLM-4-MoE and DeepSeek-V3 classes. Gemma 4's
(E, 2, M, H) is the same bytes: reshape it to (E, 2M, H)."""

GPT_OSS = ExpertLayout(INTERLEAVED, out_first=False)
"""`gate_up_proj` `[E, H, 2M]` with alternating columns and `down_proj` `[E, M, H]` of gpt-oss."""


class ExpertParams(NamedTuple):
    """The parameters of E gated experts, a pytree; `ExpertLayout` has the shapes."""

    gate_up: Array
    down: Array
    gate_up_bias: Array | None = None
    down_bias: Array | None = None

    def check(self, layout: ExpertLayout, prefix: str = "params") -> tuple[int, int, int]:
        """Checks ranks and sizes against each other.

        Args:
          layout: the layout that these parameters are said to have.
          prefix: what a message calls this object.

        Returns:
          (E, K, M): experts, model width, expert width.

        Raises:
          TypeError: for a wrong rank or sizes that do not fit each other.
        """
        for name, value, rank in (
            ("gate_up", self.gate_up, 3),
            ("down", self.down, 3),
            ("gate_up_bias", self.gate_up_bias, 2),
            ("down_bias", self.down_bias, 2),
        ):
            if value is not None and getattr(value, "ndim", None) != rank:
                came = getattr(value, "shape", type(value).__name__)
                raise TypeError(f"{prefix}.{name} must be an array of rank {rank}, got {came}")
        num_experts, first, second = self.gate_up.shape
        width, fused = (second, first) if layout.out_first else (first, second)
        if fused % 2:
            raise TypeError(
                f"{prefix}.gate_up of shape {self.gate_up.shape} has {fused} output features for {layout}; gate and up"
                " together need an even number"
            )
        hidden = fused // 2
        expected = {
            "down": (num_experts, width, hidden) if layout.out_first else (num_experts, hidden, width),
            "gate_up_bias": (num_experts, fused),
            "down_bias": (num_experts, width),
        }
        for name, shape in expected.items():
            value = getattr(self, name)
            if value is not None and tuple(value.shape) != shape:
                raise TypeError(
                    f"{prefix}.{name} has shape {tuple(value.shape)}, but {prefix}.gate_up of shape"
                    f" {tuple(self.gate_up.shape)} with {layout} needs {shape}"
                )
        return num_experts, width, hidden


def convert(params: ExpertParams, source: ExpertLayout, target: ExpertLayout) -> ExpertParams:
    """Rearranges expert parameters from one layout to another, bit for bit.

    `convert(convert(p, a, b), b, a)` equals `p` exactly. Loading a checkpoint of Qwen3 into the default layout is
    `convert(ExpertParams(gate_up_proj, down_proj), HF_LINEAR, DEFAULT)`; with `HF_LINEAR` as the layer's own
    layout no conversion is needed at all.

    Args:
      params: the parameters, NumPy or JAX arrays, in layout `source`.
      source: the layout they have.
      target: the layout to return.

    Returns:
      The parameters in layout `target`, arrays of the kind that came.

    Raises:
      TypeError: for a wrong rank or sizes that do not fit each other.
    """
    params.check(source)
    gate_up, down, gate_up_bias, down_bias = params
    if source.gate_up != target.gate_up:
        gate_up = target.gate_up.join(*source.gate_up.split(gate_up, _fused_axis(source)), _fused_axis(source))
        if gate_up_bias is not None:
            gate_up_bias = target.gate_up.join(*source.gate_up.split(gate_up_bias))
    if source.out_first != target.out_first:
        gate_up, down = gate_up.swapaxes(1, 2), down.swapaxes(1, 2)
    return ExpertParams(gate_up, down, gate_up_bias, down_bias)


def stack_experts(
    gates: Sequence[Array], ups: Sequence[Array], downs: Sequence[Array], layout: ExpertLayout = HF_LINEAR
) -> ExpertParams:
    """Builds expert parameters from one matrix per expert and projection, as older checkpoints hold them.

    Args:
      gates: E matrices (M, K): `experts.{e}.gate_proj.weight` of a checkpoint (`w1` in Mixtral).
      ups: E matrices (M, K): `up_proj.weight` (`w3` in Mixtral).
      downs: E matrices (K, M): `down_proj.weight` (`w2` in Mixtral).
      layout: the layout to return.

    Returns:
      The stacked parameters, without biases.

    Raises:
      TypeError: if the three lists differ in length, or the matrices in shape.
      ValueError: if the lists are empty.
    """
    if not len(gates) == len(ups) == len(downs):
        raise TypeError(
            f"gates, ups and downs must hold one matrix per expert each, got {len(gates)}, {len(ups)} and {len(downs)}"
        )
    if not len(gates):
        raise ValueError("gates, ups and downs are empty; at least one expert is needed")
    first = tuple(gates[0].shape)
    for name, matrices, shape in (("gates", gates, first), ("ups", ups, first), ("downs", downs, first[::-1])):
        for expert, matrix in enumerate(matrices):
            if matrix.ndim != 2 or tuple(matrix.shape) != shape:
                raise TypeError(
                    f"{name}[{expert}] has shape {tuple(matrix.shape)}; gates[0] of shape {first} needs {shape}"
                )
    module = _module(gates[0])
    gate_up = module.concatenate([module.stack(list(gates)), module.stack(list(ups))], axis=1)
    return convert(ExpertParams(gate_up, module.stack(list(downs))), HF_LINEAR, layout)


def unstack_experts(
    params: ExpertParams, layout: ExpertLayout = HF_LINEAR
) -> tuple[list[Array], list[Array], list[Array]]:
    """Takes expert parameters apart into one matrix per expert and projection: the inverse of `stack_experts`.

    Args:
      params: the parameters in `layout`; biases are not part of such a checkpoint.
      layout: the layout they have.

    Returns:
      (gates, ups, downs): lists of E matrices (M, K), (M, K) and (K, M).

    Raises:
      TypeError: for a wrong rank or sizes that do not fit each other.
      ValueError: if there are biases, which the result could not hold.
    """
    if params.gate_up_bias is not None or params.down_bias is not None:
        raise ValueError("params has biases, which per-expert matrices cannot hold; split the biases off first")
    linear = convert(params, layout, HF_LINEAR)
    gate, up = CONCATENATED.split(linear.gate_up, axis=1)
    return list(gate), list(up), list(linear.down)


def _fused_axis(layout: ExpertLayout) -> int:
    """Returns the axis of length 2M of a gate/up weight."""
    return 1 if layout.out_first else 2


def _half(fused: Array, axis: int) -> int:
    """Returns M for an axis of length 2M."""
    length: int = fused.shape[axis]
    if length % 2:
        raise TypeError(
            f"fused has shape {tuple(fused.shape)}; gate and up together need an even length on axis {axis}"
        )
    return length // 2


def _pairs(fused: Array, axis: int) -> Array:
    """Splits an axis of length 2M into two of lengths M and 2."""
    half, axis = _half(fused, axis), axis % fused.ndim
    return fused.reshape(*fused.shape[:axis], half, 2, *fused.shape[axis + 1 :])


def _slice(array: Array, axis: int, index: int | slice, after: int = 0) -> tuple[int | slice, ...]:
    """Returns an index tuple that applies `index` to the axis `after` axes behind `axis` of the unsplit array."""
    axis = axis % (array.ndim - after) + after
    return (*(slice(None) for _ in range(axis)), index)


def _module(array: Array) -> Any:
    """Returns the array module of `array`, so that a checkpoint in host memory stays there."""
    return jnp if isinstance(array, jax.Array) else np
