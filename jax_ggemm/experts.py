"""The experts: gate/up product, activation, down product, on rows in expert order; and the shared expert.

Knows weights, activations and the grouped product; nothing of routing: rows come sorted, with one size per expert.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_ggemm.api import ragged_dot
from jax_ggemm.layouts import DEFAULT, ExpertLayout, ExpertParams

__all__ = [
    "DEFAULT_OPTIONS",
    "DOWN_NAME",
    "GATE_UP_NAME",
    "HIDDEN_NAME",
    "Activation",
    "ClampedSwiGLU",
    "ExpertOptions",
    "SharedParams",
    "clamped_swiglu",
    "experts",
    "geglu_tanh",
    "shared_expert",
    "swiglu",
]

GATE_UP_NAME = "moe_gate_up"
"""`checkpoint_name` of the gate/up product, (N, 2M)."""
HIDDEN_NAME = "moe_hidden"
"""`checkpoint_name` of the activation's result, (N, M); cheap to compute again from the gate/up product."""
DOWN_NAME = "moe_down"
"""`checkpoint_name` of the down product, (N, K)."""

Activation = Callable[[jax.Array, jax.Array], jax.Array]
"""Takes gate and up, (N, M) float32 each, and returns the hidden rows (N, M). Any such function will do:

    def deepseek_v4(gate, up):  # SwiGLU with a clamp at 10
        return jax.nn.silu(jnp.minimum(gate, 10.0)) * jnp.clip(up, -10.0, 10.0)

    def kimi_k3(gate, up):  # SiTU-GLU
        return 4.0 * jnp.tanh(gate / 4.0) * jax.nn.sigmoid(gate) * 25.0 * jnp.tanh(up / 25.0)
"""


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) * up (Shazeer, arXiv:2002.05202)."""
    return jax.nn.silu(gate) * up


def geglu_tanh(gate: jax.Array, up: jax.Array) -> jax.Array:
    """gelu(gate) * up with the tanh approximation of GELU (Gemma)."""
    return jax.nn.gelu(gate, approximate=True) * up


@dataclasses.dataclass(frozen=True)
class ClampedSwiGLU:
    """gate * sigmoid(alpha * gate) * (up + 1) with gate clipped from above and up from both sides (gpt-oss).

    Equal parameters compare equal, so a new instance does not compile a jitted caller anew.

    Attributes:
      limit: gate is clipped to at most `limit`, up to [-limit, limit]; 7 in gpt-oss.
      alpha: steepness of the sigmoid; 1.702, which makes x * sigmoid(alpha * x) resemble GELU.
    """

    limit: float = 7.0
    alpha: float = 1.702

    def __post_init__(self) -> None:
        values: dict[str, Any] = {"limit": self.limit, "alpha": self.alpha}
        for name, value in values.items():
            if isinstance(value, bool) or not isinstance(value, numbers.Real):
                raise TypeError(f"{name} must be a number, got {value!r}")
        if not self.limit > 0:
            raise ValueError(f"limit must be positive, got {self.limit}")
        if not math.isfinite(self.alpha):
            raise ValueError(f"alpha must be finite, got {self.alpha}")

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """Returns the hidden rows."""
        gate = jnp.minimum(gate, self.limit)
        return gate * jax.nn.sigmoid(self.alpha * gate) * (jnp.clip(up, -self.limit, self.limit) + 1)


clamped_swiglu = ClampedSwiGLU()


@dataclasses.dataclass(frozen=True)
class ExpertOptions:
    """How experts compute.

    The experts are differentiable in reverse mode alone (`jax.grad`, `jax.vjp`, `jax.jacrev`; any order), with
    `implementation="xla"` too; forward mode (`jax.jvp`, `jax.jacfwd`, `jax.hessian`) raises TypeError.

    Attributes:
      activation: gate and up to hidden; in float32 (float64 for float64), its result is cast to the rows' dtype.
      layout: how the weights lie.
      precision: of the products, as in `jax.lax.dot`.
      implementation: of the grouped products, as in `jax_ggemm.ragged_dot`.
      ragged_dot: the grouped product, a function with the signature of `jax_ggemm.ragged_dot`.
    """

    activation: Activation = swiglu
    layout: ExpertLayout = DEFAULT
    precision: lax.PrecisionLike = None
    implementation: Any = None
    ragged_dot: Callable[..., jax.Array] = ragged_dot

    def __post_init__(self) -> None:
        if not callable(self.activation):
            raise TypeError(f"activation must be a function of gate and up, e.g. swiglu; got {self.activation!r}")
        if not isinstance(self.layout, ExpertLayout):
            raise TypeError(
                "layout must be an ExpertLayout, e.g. DEFAULT, HF_LINEAR or GPT_OSS of jax_ggemm.layouts; got"
                f" {self.layout!r}"
            )
        if not callable(self.ragged_dot):
            raise TypeError(f"ragged_dot must be a function, e.g. jax_ggemm.ragged_dot; got {self.ragged_dot!r}")


DEFAULT_OPTIONS = ExpertOptions()
"""SwiGLU experts in the default layout."""


class SharedParams(NamedTuple):
    """The parameters of a shared expert of width S, a pytree, in the matrix layout of the other experts.

    Attributes:
      gate_up: (K, 2S), or (2S, K) with `out_first`.
      down: (S, K), or (K, S) with `out_first`.
      gate: (K, 1) or None: a sigmoid gate on the result, one value a token (Qwen3-Next, Qwen3.5).
    """

    gate_up: jax.Array
    down: jax.Array
    gate: jax.Array | None = None

    def check(self, layout: ExpertLayout, width: int, prefix: str = "params") -> None:
        """Raises TypeError, in which `prefix` names this object, for sizes that do not fit x of `width` features."""
        fused = self.gate_up.shape[0 if layout.out_first else 1] if self.gate_up.ndim == 2 else 0
        shapes = {"gate_up": (width, fused), "down": (fused // 2, width)}
        if layout.out_first:
            shapes = {name: shape[::-1] for name, shape in shapes.items()}
        for name, shape in {**shapes, "gate": (width, 1)}.items():
            value = getattr(self, name)
            if value is not None and value.shape != shape:
                raise TypeError(
                    f"{prefix}.{name} of the shared expert has shape {value.shape}; x of {width} features and gate_up"
                    f" of shape {self.gate_up.shape} with {layout} need {shape}"
                )


def experts(
    rows: jax.Array, group_sizes: jax.Array, params: ExpertParams, options: ExpertOptions = DEFAULT_OPTIONS
) -> jax.Array:
    """Applies each expert to its own rows.

    Args:
      rows: (N, K) floating, sorted by expert.
      group_sizes: (E,) integers, rows per expert.
      params: of E experts, in the dtype of the rows.
      options: how.

    Returns:
      (N, K) in the dtype of the rows; rows past the sum of the sizes are exact zeros.

    Raises:
      TypeError: for a wrong dtype or rank, or sizes that do not fit each other.
    """
    num_experts, width, _ = params.check(options.layout)
    _check_inputs("rows", rows, width)
    check_dtypes("params", params, "rows", rows.dtype)
    if group_sizes.shape != (num_experts,):
        raise TypeError(f"group_sizes must have shape ({num_experts},), one size an expert, got {group_sizes.shape}")

    def product(rows: jax.Array, weights: jax.Array, bias: jax.Array | None, name: str) -> jax.Array:
        result = options.ragged_dot(
            rows,
            weights,
            group_sizes,
            precision=options.precision,
            transpose_rhs=options.layout.out_first,
            bias=bias,
            implementation=options.implementation,
        )
        named: jax.Array = checkpoint_name(result, name)
        return named

    fused = product(rows, params.gate_up, params.gate_up_bias, GATE_UP_NAME)
    hidden = checkpoint_name(_activate(fused, options), HIDDEN_NAME)
    return product(hidden, params.down, params.down_bias, DOWN_NAME)


def shared_expert(x: jax.Array, params: SharedParams, options: ExpertOptions = DEFAULT_OPTIONS) -> jax.Array:
    """Applies the expert that every token shares.

    Args:
      x: (T, K) floating.
      params: its parameters, in the dtype of x.
      options: activation, layout and precision, as for the other experts.

    Returns:
      (T, K) float32 (float64 for float64), to be added to the other experts' result before that is rounded.

    Raises:
      TypeError: for a wrong dtype or rank, or sizes that do not fit each other.
    """
    width = x.shape[-1]
    _check_inputs("x", x, width)
    check_dtypes("params", params, "x", x.dtype)
    params.check(options.layout, width)
    wide = jnp.promote_types(jnp.float32, x.dtype)

    def product(left: jax.Array, right: jax.Array, contract: int, kind: Any) -> jax.Array:
        dims = (((1,), (contract,)), ((), ()))
        return lax.dot_general(left, right, dims, precision=options.precision, preferred_element_type=kind)

    contract = 1 if options.layout.out_first else 0
    hidden = _activate(product(x, params.gate_up, contract, x.dtype), options)
    result = product(hidden, params.down, contract, wide)
    if params.gate is not None:
        result = result * jax.nn.sigmoid(product(x, params.gate, 0, wide))
    return result


def check_dtypes(prefix: str, params: ExpertParams | SharedParams, name: str, dtype: Any) -> None:
    """One dtype throughout, that of argument `name`: promotion would silently copy the weights of every expert."""
    for field, value in params._asdict().items():
        if value is not None and value.dtype != dtype:
            raise TypeError(f"{prefix}.{field} has dtype {value.dtype} and {name} {dtype}; cast one of them")


def _activate(fused: jax.Array, options: ExpertOptions) -> jax.Array:
    """Splits gate from up and joins them by the activation, in float32 or wider, rounded once at the end."""
    gate, up = options.layout.gate_up.split(fused.astype(jnp.promote_types(jnp.float32, fused.dtype)))
    hidden = options.activation(gate, up)
    if hidden.shape != gate.shape:
        raise TypeError(f"activation must return shape {gate.shape}, that of gate and of up, got {hidden.shape}")
    return hidden.astype(fused.dtype)


def _check_inputs(name: str, rows: jax.Array, width: int) -> None:
    if rows.ndim != 2 or rows.shape[1] != width:
        raise TypeError(f"{name} must have shape (rows, {width}), as the weights have it, got {rows.shape}")
    if not jnp.issubdtype(rows.dtype, jnp.floating):
        raise TypeError(f"{name} must be floating, got {rows.dtype}")
