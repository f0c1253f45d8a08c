"""`MoE`, the `flax.nnx` module: parameters, their initialisation, and calls of the functional core. No math of its own.

The only module here that imports flax.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from jax import lax
from jax.typing import DTypeLike

from jax_ggemm.arguments import as_array
from jax_ggemm.expert_parallel import ExpertParallel
from jax_ggemm.experts import Activation, ExpertOptions, SharedParams, swiglu
from jax_ggemm.layouts import CONCATENATED, DEFAULT, ExpertLayout, ExpertParams, convert
from jax_ggemm.moe_layer import MoEOptions, MoEParams, moe
from jax_ggemm.routing import Router, RoutingStats, as_int, update_selection_bias

__all__ = ["MoE", "SelectionBias"]

Initializer = Callable[..., jax.Array]
Metadata = Mapping[str, Any]

default_kernel_init = nnx.initializers.lecun_normal()
default_bias_init = nnx.initializers.zeros_init()
_NO_METADATA: Metadata = MappingProxyType({})


class SelectionBias(nnx.Variable[jax.Array]):
    """The bias of the router's choice: state that `MoE.update_selection_bias` changes, not a parameter to train."""


class MoE(nnx.Module):
    """A Mixture-of-Experts layer over the last dimension of the input.

    Example usage::

      >>> from flax import nnx
      >>> import jax, jax.numpy as jnp
      >>> from jax_ggemm.nnx_moe import MoE
      >>> from jax_ggemm.routing import Router

      >>> layer = MoE(8, 16, num_experts=4, router=Router(top_k=2), rngs=nnx.Rngs(0))
      >>> y, stats = layer(jnp.ones((2, 3, 8)))
      >>> y.shape, stats.counts.shape
      ((2, 3, 8), (4,))

    Options go past the model width, the expert width and the number of experts by keyword. DeepSeek-V3's layer is
    `MoE(7168, 2048, 256, router=Router(8, score=jax.nn.sigmoid, num_groups=8, top_groups=4, scale=2.5,
    probabilities=normalized_sigmoid), use_selection_bias=True, shared_features=2048, rngs=rngs)`, and gpt-oss-20b's
    `MoE(2880, 2880, 32, router=Router(4, score=identity, weigh=jax.nn.softmax), activation=clamped_swiglu,
    layout=GPT_OSS, use_bias=True, use_router_bias=True, rngs=rngs)`; `identity` and `normalized_sigmoid` are in
    `jax_ggemm.routing`, `clamped_swiglu` is in `jax_ggemm.experts`, and `GPT_OSS` in `jax_ggemm.layouts`.

    Attributes `router`, `gate_up`, `down` and the rest are variables or None, in the layout that `layout` says: for
    checkpoints see `jax_ggemm.layouts`.

    Differentiable in reverse mode alone (`jax.grad`, `jax.vjp`, `jax.jacrev`; any order), with `implementation="xla"`
    too; forward mode (`jax.jvp`, `jax.jacfwd`, `jax.hessian`) raises TypeError.

    Args:
      features: the model width D, of input and output.
      hidden_features: the width M of each expert.
      num_experts: E.
      router: from logits to experts and weights.
      activation: gate and up to hidden, any function of the two.
      layout: how the expert weights lie.
      use_bias: whether both products of the experts have biases.
      use_router_bias: whether the router's logits have a bias.
      use_selection_bias: whether the choice has a bias, see `update_selection_bias`.
      shared_features: the width of an expert that every token shares; 0 for none.
      shared_gate: whether that one has a sigmoid gate.
      dtype: the dtype of the computation (default: infer from input and params). The router runs in float32.
      param_dtype: the dtype passed to the initializers of the experts and of the shared expert (default: float32). The
        router's parameters are float32.
      precision: of the experts' products, see `jax.lax.Precision`.
      implementation: of the grouped products, see `jax_ggemm.ragged_dot`.
      expert_axis: the mesh axis that the experts are spread over: short for `parallel=ExpertParallel(expert_axis)`.
      parallel: how the layer lies on a mesh, see `ExpertParallel`; None for one device. The experts' variables then
        carry their PartitionSpecs as `out_sharding`, unless their metadata name another; made where a mesh is set,
        they are sharded at once. Values, shapes and checkpoints are those of the layer on one device.
      kernel_init: initializer of each single matrix, given its shape (in, out): an expert's fan-in is its own, and the
        values do not depend on `layout`.
      bias_init: initializer of biases.
      router_init: initializer of the router's matrix (D, E).
      promote_dtype: see `nnx.Linear`; applied to input and weights together.
      router_metadata: metadata of the router's matrix, such as its sharding; likewise the other `*_metadata`.
      gate_up_metadata: of the experts' gate/up weights.
      down_metadata: of the experts' down weights.
      gate_up_bias_metadata: of the experts' gate/up biases.
      down_bias_metadata: of the experts' down biases.
      shared_gate_up_metadata: of the shared expert's gate/up weight.
      shared_down_metadata: of the shared expert's down weight.
      rngs: rng key.
    """

    def __init__(  # noqa: PLR0913 - options of a flax layer are keywords
        self,
        features: int,
        hidden_features: int,
        num_experts: int,
        *,
        router: Router,
        activation: Activation = swiglu,
        layout: ExpertLayout = DEFAULT,
        use_bias: bool = False,
        use_router_bias: bool = False,
        use_selection_bias: bool = False,
        shared_features: int = 0,
        shared_gate: bool = False,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        precision: lax.PrecisionLike = None,
        implementation: Any = None,
        expert_axis: str | None = None,
        parallel: ExpertParallel | None = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        router_init: Initializer = default_kernel_init,
        promote_dtype: Callable[..., Any] = dtypes.promote_dtype,
        router_metadata: Metadata = _NO_METADATA,
        gate_up_metadata: Metadata = _NO_METADATA,
        down_metadata: Metadata = _NO_METADATA,
        gate_up_bias_metadata: Metadata = _NO_METADATA,
        down_bias_metadata: Metadata = _NO_METADATA,
        shared_gate_up_metadata: Metadata = _NO_METADATA,
        shared_down_metadata: Metadata = _NO_METADATA,
        rngs: nnx.Rngs,
    ):
        features, hidden_features, num_experts = (
            _size(name, size)
            for name, size in (
                ("features", features),
                ("hidden_features", hidden_features),
                ("num_experts", num_experts),
            )
        )
        shared_features = as_int("shared_features", shared_features)
        if shared_features < 0:
            raise ValueError(f"shared_features must not be negative, got {shared_features}; 0 means no shared expert")
        if shared_gate and not shared_features:
            raise ValueError("shared_gate=True needs a shared expert, got shared_features=0")
        if expert_axis is not None:
            if parallel is not None:
                raise ValueError(
                    f"expert_axis={expert_axis!r} is short for parallel=ExpertParallel(...): pass one of them"
                )
            parallel = ExpertParallel(expert_axis)
        options = MoEOptions(router, ExpertOptions(activation, layout, precision, implementation), parallel)
        router.check(num_experts)
        if parallel is not None:
            parallel.check(num_experts, features, hidden_features, shared_features)
        placed, shared_placed = _placed(parallel, layout)
        gate_up_bias_metadata = {**placed.gate_up_bias, **gate_up_bias_metadata}
        down_bias_metadata = {**placed.down_bias, **down_bias_metadata}

        def kernels(number: int, hidden: int) -> ExpertParams:
            """Weights of `number` experts in `layout`, from one call of the initializer per matrix."""

            def one(key: jax.Array) -> tuple[jax.Array, jax.Array]:
                gate, up, down = jax.random.split(key, 3)
                fused = CONCATENATED.join(
                    kernel_init(gate, (features, hidden), param_dtype), kernel_init(up, (features, hidden), param_dtype)
                )
                return fused, kernel_init(down, (hidden, features), param_dtype)

            gate_up, down = jax.vmap(one)(jax.random.split(rngs.params(), number))
            return convert(ExpertParams(gate_up, down), DEFAULT, layout)

        def bias(use: bool, shape: tuple[int, ...], kind: DTypeLike, metadata: Metadata) -> Any:
            return nnx.Param(bias_init(rngs.params(), shape, kind), **metadata) if use else nnx.data(None)

        self.router = nnx.Param(router_init(rngs.params(), (features, num_experts), jnp.float32), **router_metadata)
        self.router_bias = bias(use_router_bias, (num_experts,), jnp.float32, _NO_METADATA)
        weights = kernels(num_experts, hidden_features)
        self.gate_up = nnx.Param(weights.gate_up, **{**placed.gate_up, **gate_up_metadata})
        self.down = nnx.Param(weights.down, **{**placed.down, **down_metadata})
        fused_shape = (num_experts, 2 * hidden_features)
        self.gate_up_bias = bias(use_bias, fused_shape, param_dtype, gate_up_bias_metadata)
        self.down_bias = bias(
            use_bias, (num_experts, features), param_dtype, {**placed.down_bias, **down_bias_metadata}
        )
        self.selection_bias = (
            SelectionBias(jnp.zeros((num_experts,), jnp.float32)) if use_selection_bias else nnx.data(None)
        )
        self.shared_gate_up = self.shared_down = self.shared_gate = nnx.data(None)
        if shared_features:
            shared = kernels(1, shared_features)
            self.shared_gate_up = nnx.Param(shared.gate_up[0], **{**shared_placed.gate_up, **shared_gate_up_metadata})
            self.shared_down = nnx.Param(shared.down[0], **{**shared_placed.down, **shared_down_metadata})
        if shared_gate:
            self.shared_gate = nnx.Param(kernel_init(rngs.params(), (features, 1), param_dtype), **shared_placed.gate)

        self.features = features
        self.hidden_features = hidden_features
        self.num_experts = num_experts
        self.options = options
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.promote_dtype = promote_dtype

    def __call__(self, inputs: jax.Array, *, token_mask: jax.Array | None = None) -> tuple[jax.Array, RoutingStats]:
        """Applies the layer.

        Args:
          inputs: (..., features).
          token_mask: (...) bool, False for a token of padding, which counts nowhere and gets 0.

        Returns:
          (y, stats): y of the shape of `inputs` in the computation's dtype; the router's counts and losses, which the
          caller adds to the training loss with the coefficients of the model.

        Raises:
          TypeError: for what is no array, a wrong dtype or rank, or sizes that do not fit.
          NotImplementedError: for an array that is sharded over an explicit mesh axis.
        """
        inputs = as_array("inputs", inputs)
        if inputs.ndim < 1 or inputs.shape[-1] != self.features:
            raise TypeError(f"inputs must have shape (..., {self.features}), got {inputs.shape}")
        names = ("gate_up", "down", "gate_up_bias", "down_bias", "shared_gate_up", "shared_down", "shared_gate")
        x, *weights = self.promote_dtype((inputs, *map(self._array, names)), dtype=self.dtype)
        params = MoEParams(
            router=self._array("router"),
            experts=ExpertParams(*weights[:4]),
            router_bias=self._array("router_bias"),
            selection_bias=self._array("selection_bias"),
            shared=None if self.shared_gate_up is None else SharedParams(*weights[4:]),
        )
        return moe(x, params, self.options, token_mask=token_mask)

    def _array(self, name: str) -> Any:
        """The value of a variable, checked; None where the layer has none."""
        variable = getattr(self, name)
        return None if variable is None else as_array(name, variable[...])

    def update_selection_bias(self, counts: jax.Array, rate: float | jax.Array) -> None:
        """Moves the selection bias towards balance: the auxiliary-loss-free update of DeepSeek-V3.

        Args:
          counts: (E,) `stats.counts` of a step, summed over data-parallel devices.
          rate: the step; 0.001 in DeepSeek-V3.

        Raises:
          ValueError: if the layer has no selection bias.
        """
        if self.selection_bias is None:
            raise ValueError("this layer has no selection bias; make it with use_selection_bias=True")
        self.selection_bias[...] = update_selection_bias(self.selection_bias[...], counts, rate)


def _placed(parallel: ExpertParallel | None, layout: ExpertLayout) -> tuple[Any, Any]:
    """Metadata that say how variables are sharded: in the fields of ExpertParams, and of SharedParams."""

    def metadata(spec: Any) -> Metadata:
        if parallel is None:
            return _NO_METADATA
        mesh = parallel.mesh
        known = not (jax.sharding.get_abstract_mesh() if mesh is None else mesh).empty
        return {"out_sharding": spec, "eager_sharding": known, **({} if mesh is None else {"mesh": mesh})}

    specs = parallel or ExpertParallel("")
    experts: list[Any] = [metadata(spec) for spec in specs.expert_specs(layout)]
    shared: list[Any] = [metadata(spec) for spec in specs.shared_specs(layout)]
    return ExpertParams(*experts), SharedParams(*shared)


def _size(name: str, value: Any) -> int:
    size = as_int(name, value)
    if size < 1:
        raise ValueError(f"{name} must be at least 1, got {size}")
    return size
