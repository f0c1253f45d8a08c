"""Expert parallelism: the layer over a mesh. Knows mesh axes and PartitionSpecs; the mathematics is elsewhere.

Under jit the layer runs inside `jax.shard_map` on the whole mesh: every rank routes its own tokens, an exchange brings
them to the experts and back, and statistics are summed over the ranks that hold different tokens. Composes with

  * data and sequence axes: whatever `tokens` splits the leading dimensions of x over;
  * a tensor axis on the width of each expert, whose partial sums are added up at the token's own rank;
  * FSDP axes on the model width of the weights: gathered for the layer, their gradients reduce-scattered.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jax_ggemm.collectives import sum_over, vary_over
from jax_ggemm.exchanges import AllToAll, Exchange, LocalExperts, Tokens
from jax_ggemm.experts import ExpertOptions, SharedParams
from jax_ggemm.layouts import ExpertLayout, ExpertParams, Interleaved

__all__ = ["ExpertParallel", "Rank"]

_Weights = Any  # ExpertParams or SharedParams, of arrays, of pairs of arrays, or of PartitionSpecs


@dataclasses.dataclass(frozen=True)
class ExpertParallel:
    """How a layer lies on a mesh: hashable, so that it can be a static argument of jit.

    Rank r of the expert axis owns the r-th run of E / ranks experts. Parameters keep their global shapes: a checkpoint
    of the plain layer is one of this layer, on any mesh.

    Attributes:
      expert_axis: the mesh axis that the experts are spread over.
      exchange: how tokens get to their experts: `AllToAll()`, `AllToAll(buffer_factor)`, `Gather()`, `Ring()`, or
        `Replicated()` for tokens that are not split over the expert axis.
      tokens: how the leading dimensions of x are split, e.g. P(("data", "expert"), "sequence"). By default the first
        dimension, over all mesh axes but the tensor axis (and but the expert axis for `Replicated`), and but those of
        a `jax.shard_map` around the layer, such as one of pipeline stages.
      tensor_axis: the mesh axis that the width of each expert is spread over, if any. Weights whose layout is
        `INTERLEAVED` are stored split over it. With [gate | up] side by side no contiguous split is right: the layer
        takes its parts of gate and of up, and the fused weight is stored whole on the ranks of this axis.
      fsdp_axes: mesh axes, of those in `tokens`, that the model width of the weights is spread over in storage.
      mesh: the mesh, with automatic axes; that of `jax.set_mesh` if None.
    """

    expert_axis: str
    exchange: Exchange = dataclasses.field(default_factory=AllToAll)
    tokens: PartitionSpec | None = None
    tensor_axis: str | None = None
    fsdp_axes: tuple[str, ...] = ()
    mesh: Mesh | AbstractMesh | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.expert_axis, str):
            raise TypeError(f"expert_axis must be the name of a mesh axis, got {self.expert_axis!r}")
        if not isinstance(self.exchange, Exchange) or isinstance(self.exchange, type):
            raise TypeError(f"exchange must be an Exchange, e.g. AllToAll(), Gather() or Ring(); got {self.exchange!r}")
        if not isinstance(self.tokens, PartitionSpec | None):
            raise TypeError(f"tokens must be a PartitionSpec, e.g. P(('data', 'expert')); got {self.tokens!r}")
        if not isinstance(self.tensor_axis, str | None):
            raise TypeError(f"tensor_axis must be the name of a mesh axis, got {self.tensor_axis!r}")
        fsdp_axes: Any = self.fsdp_axes
        if not isinstance(fsdp_axes, tuple | list) or not all(isinstance(axis, str) for axis in fsdp_axes):
            raise TypeError(f"fsdp_axes must be a tuple of names of mesh axes, got {self.fsdp_axes!r}")
        if len(set(fsdp_axes)) < len(fsdp_axes):
            raise ValueError(f"fsdp_axes must hold each mesh axis once, got {self.fsdp_axes}")
        object.__setattr__(self, "fsdp_axes", tuple(fsdp_axes))
        if not isinstance(self.mesh, Mesh | AbstractMesh | None):
            raise TypeError(f"mesh must be a Mesh, as jax.make_mesh makes one; got {self.mesh!r}")
        if self.tensor_axis == self.expert_axis:
            raise ValueError(f"tensor_axis must differ from expert_axis, got {self.tensor_axis!r} for both")

    def expert_specs(self, layout: ExpertLayout) -> _Weights:
        """The PartitionSpecs that the experts' parameters are stored with."""
        return _specs(self, layout, self.expert_axis, stored=True)

    def shared_specs(self, layout: ExpertLayout) -> _Weights:
        """The PartitionSpecs that the shared expert's parameters are stored with."""
        return _shared(_specs(self, layout, None, stored=True))

    def check(self, num_experts: int, features: int, hidden_features: int, shared_features: int = 0) -> None:
        """Raises ValueError if a layer of these sizes does not fit the mesh; where none is set yet, its call will."""
        if self.mesh is not None or not jax.sharding.get_abstract_mesh().empty:
            self._check_sizes(self._mesh(), num_experts, features, hidden_features, shared_features)

    def apply(
        self,
        layer: Callable[..., tuple[jax.Array, Any]],
        layout: ExpertLayout,
        x: jax.Array,
        token_mask: jax.Array | None,
        params: Any,
    ) -> tuple[jax.Array, Any]:
        """Runs `layer(rank, x, token_mask, params)` on every rank of the mesh, each with its part.

        Args:
          layer: what a rank does; it returns (y, statistics), the statistics equal on all ranks. Its rank is None, for
            the layer on one device, if there are no tokens.
          layout: that of the experts' parameters.
          x: (..., D).
          token_mask: (...) bool or None.
          params: `MoEParams`, a named tuple of arrays, `experts` and `shared`.

        Returns:
          (y, statistics), y of the shape of x.

        Raises:
          ValueError: where mesh, sizes and axes do not fit each other.
        """
        mesh = self._mesh()
        tokens = self._tokens(mesh, x.shape)
        rank = Rank(self, layout, _axes_of(tokens))
        num_experts, width, hidden = params.experts.check(layout, "params.experts")
        shared_width = 0 if params.shared is None else params.shared.down.shape[1 if layout.out_first else 0]
        self._check_sizes(mesh, num_experts, width, hidden, shared_width)
        if not x.size:  # nothing to exchange, and XLA does not compile every collective of no rows
            return layer(None, x, token_mask, params)
        specs = jax.tree.map(lambda _: PartitionSpec(), params._replace(experts=None, shared=None))
        experts, shared = params.experts, params.shared
        specs = specs._replace(experts=rank.specs(experts), shared=None if shared is None else rank.specs(shared))
        params = params._replace(
            experts=rank.take_apart(experts), shared=None if shared is None else rank.take_apart(shared)
        )
        run = jax.shard_map(
            lambda *arrays: layer(rank, *arrays),
            mesh=self.mesh,
            in_specs=(tokens, None if token_mask is None else tokens, specs),
            out_specs=(tokens, PartitionSpec()),
        )
        return run(x, token_mask, params)

    def _mesh(self) -> Mesh | AbstractMesh:
        mesh = jax.sharding.get_abstract_mesh() if self.mesh is None else self.mesh
        if mesh.empty:
            raise ValueError(
                f"expert_axis={self.expert_axis!r} needs a mesh: call within jax.set_mesh(mesh), or pass"
                " ExpertParallel(mesh=mesh)"
            )
        named = (self.expert_axis, self.tensor_axis, *self.fsdp_axes, *_axes_of(self.tokens or PartitionSpec()))
        for axis in named:
            if axis is not None and axis not in mesh.shape:
                raise ValueError(f"the mesh has axes {tuple(mesh.shape)}, not {axis!r}")
        kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        used = mesh.axis_names if self.tokens is None else named
        if explicit := [axis for axis in mesh.axis_names if axis in used and kinds[axis] == AxisType.Explicit]:
            raise ValueError(
                f"the axes {explicit} of the mesh are explicit, which the layer does not support yet: make it with"
                f" jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Auto,) * {len(kinds)})"
            )
        if manual := [axis for axis in mesh.axis_names if axis in named and kinds[axis] == AxisType.Manual]:
            raise ValueError(
                f"the layer is inside jax.shard_map over its own axes {manual}: call it outside, or leave them out of"
                " axis_names there; it enters jax.shard_map itself"
            )
        return mesh

    def _tokens(self, mesh: Mesh | AbstractMesh, shape: tuple[int, ...]) -> PartitionSpec:
        """The spec of the leading dimensions of x, checked."""
        whole = {self.tensor_axis} if self.exchange.split_tokens else {self.tensor_axis, self.expert_axis}
        kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
        axes = tuple(axis for axis, kind in kinds if axis not in whole and kind != AxisType.Manual)
        default = PartitionSpec(axes)
        spec = default if self.tokens is None else self.tokens
        axes = _axes_of(spec)
        if (self.expert_axis in axes) != self.exchange.split_tokens:
            fits = "split over it" if self.exchange.split_tokens else "the same on all its ranks"
            raise ValueError(
                f"{self.exchange} is for tokens that are {fits}, and tokens={spec} says otherwise of the axis"
                f" {self.expert_axis!r}"
            )
        if self.tensor_axis in axes:
            raise ValueError(f"tokens={spec} must not split over the tensor axis {self.tensor_axis!r}")
        if missing := [axis for axis in self.fsdp_axes if axis not in axes]:
            raise ValueError(f"fsdp_axes must be axes that tokens={spec} are split over, got {missing}")
        if self.expert_axis in self.fsdp_axes:
            raise ValueError(f"fsdp_axes={self.fsdp_axes} must not hold the expert axis: it splits the experts already")
        if len(spec) >= len(shape):
            raise ValueError(
                f"x has shape {shape}: {len(shape) - 1} dimensions of tokens before its features, and tokens={spec}"
                f" splits {len(spec)} dimensions: give x as many, or pass ExpertParallel(tokens=...) with fewer. For a"
                " few tokens that every rank holds there is exchange=Replicated(), tokens=PartitionSpec()"
            )
        for dimension, entry in enumerate(spec):
            size = math.prod(mesh.shape[axis] for axis in _names(entry))
            if shape[dimension] % size:
                raise ValueError(
                    f"x has shape {shape}; dimension {dimension} must be a multiple of {size}, the ranks of mesh axes"
                    f" {_names(entry)}: pad it and pass token_mask, or pass ExpertParallel(tokens=...)"
                )
        return spec

    def _check_sizes(self, mesh: Mesh | AbstractMesh, num_experts: int, width: int, hidden: int, shared: int) -> None:
        tensor = (self.tensor_axis,) if self.tensor_axis else ()
        for what, size, axes in (
            ("number of experts", num_experts, (self.expert_axis,)),
            ("width of each expert", hidden, tensor),
            ("width of the shared expert", shared, tensor),
            ("model width", width, self.fsdp_axes),
        ):
            ranks = math.prod(mesh.shape[axis] for axis in axes)
            if size % ranks:
                raise ValueError(f"the {what} is {size}; it must be a multiple of {ranks}, the ranks of {axes}")


class Rank(NamedTuple):
    """What one rank of a mesh does with its part of the layer, inside `jax.shard_map`."""

    parallel: ExpertParallel
    layout: ExpertLayout
    token_axes: tuple[str, ...]
    """The mesh axes whose ranks hold different tokens."""

    @property
    def tensor_axes(self) -> tuple[str, ...]:
        """The tensor axis, if there is one."""
        return () if self.parallel.tensor_axis is None else (self.parallel.tensor_axis,)

    def specs(self, params: _Weights) -> _Weights:
        """The specs of `take_apart(params)`."""
        fields = self._specs_of(params, stored=False)._asdict()
        if self._apart:
            fields |= {name: (spec, spec) for name, spec in fields.items() if name.startswith("gate_up")}
        return type(params)(**{name: None if getattr(params, name) is None else fields[name] for name in fields})

    @property
    def _apart(self) -> bool:
        """Whether gate and up are split over the tensor axis one by one."""
        return bool(self.tensor_axes) and not isinstance(self.layout.gate_up, Interleaved)

    def take_apart(self, params: _Weights) -> _Weights:
        """The parameters as they enter `jax.shard_map`: gate and up in a pair where their fusion cannot be split."""
        if not self._apart:
            return params
        axis = -2 if self.layout.out_first else -1
        stored = self._specs_of(params, stored=True)

        def split(name: str, axis: int) -> tuple[jax.Array, ...]:
            # Both halves whole, as their fusion is: XLA would split that over the tensor axis, and send weights around.
            spec = getattr(stored, name)
            place = spec if self.parallel.mesh is None else NamedSharding(self.parallel.mesh, spec)
            halves = self.layout.gate_up.split(getattr(params, name), axis)
            return tuple(lax.with_sharding_constraint(half, place) for half in halves)

        fused = {"gate_up": split("gate_up", axis)}
        if isinstance(params, ExpertParams) and params.gate_up_bias is not None:
            fused["gate_up_bias"] = split("gate_up_bias", -1)
        return params._replace(**fused)

    def _specs_of(self, params: _Weights, stored: bool) -> Any:
        """The specs that these parameters are stored with, or that the layer takes them with."""
        if isinstance(params, SharedParams):
            return _shared(_specs(self.parallel, self.layout, None, stored=stored))
        return _specs(self.parallel, self.layout, self.parallel.expert_axis, stored=stored)

    def put_together(self, params: _Weights) -> _Weights:
        """This rank's parameters, as the layer on one device takes them: gathered over the FSDP axes."""
        axes, axis = self.parallel.fsdp_axes, -1 if self.layout.out_first else -2
        model = {"gate_up": axis, "down": -3 - axis, "down_bias": -1, "gate": -2}

        def whole(name: str, array: jax.Array) -> jax.Array:
            return lax.all_gather(array, axes, axis=model[name] % array.ndim, tiled=True) if axes else array

        fields = params._asdict()
        for name, value in fields.items():
            if name in model and value is not None:
                fields[name] = jax.tree.map(lambda array, name=name: whole(name, array), value)
        if self._apart:
            gate, up = fields["gate_up"]
            fields["gate_up"] = self.layout.gate_up.join(gate, up, -3 - axis)
            if fields.get("gate_up_bias") is not None:
                fields["gate_up_bias"] = self.layout.gate_up.join(*fields["gate_up_bias"])
        if fields.get("down_bias") is not None and self.tensor_axes:  # added once, not by every rank
            first = lax.axis_index(*self.tensor_axes) == 0
            fields["down_bias"] = jnp.where(first, fields["down_bias"], 0)
        return type(params)(**fields)

    def enter(self, array: jax.Array) -> jax.Array:
        """What each rank of the tensor axis multiplies with its own part of the weights."""
        return vary_over(array, self.tensor_axes)

    def leave(self, array: jax.Array) -> jax.Array:
        """The sum of such results."""
        return sum_over(array, self.tensor_axes)

    def experts(
        self, tokens: Tokens, params: ExpertParams, options: ExpertOptions, num_experts: int
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(y, counts, dropped) of this rank's tokens; counts and dropped over all ranks."""
        counts = jnp.zeros_like(tokens.ids, shape=(num_experts,))
        for j in range(tokens.ids.shape[1]):  # one fused pass over (T, E) each, no scatter
            counts += jnp.sum(tokens.ids[:, j, None] == jnp.arange(num_experts), axis=0, dtype=jnp.int32)
        local = LocalExperts(params, options, self.parallel.expert_axis)
        entered = Tokens(self.enter(tokens.x), tokens.ids, self.enter(tokens.weights))
        y, dropped = self.parallel.exchange(entered, local)
        if self.tensor_axes:
            dropped = lax.pmax(vary_over(dropped, self.tensor_axes), self.tensor_axes)
        return y, sum_over(counts, self.token_axes), sum_over(dropped, self.token_axes)


def _specs(parallel: ExpertParallel, layout: ExpertLayout, expert: str | None, *, stored: bool) -> _Weights:
    """The specs of expert weights. A fused weight with gate beside up is stored whole over the tensor axis."""
    width, hidden = parallel.fsdp_axes or None, parallel.tensor_axis
    fused = None if stored and not isinstance(layout.gate_up, Interleaved) else hidden
    matrices = [(width, fused), (hidden, width)]
    if layout.out_first:
        matrices = [matrix[::-1] for matrix in matrices]
    gate_up, down = (PartitionSpec(expert, *matrix) for matrix in matrices)
    return ExpertParams(gate_up, down, PartitionSpec(expert, fused), PartitionSpec(expert, width))


def _shared(specs: _Weights) -> _Weights:
    """The specs of a shared expert from those of experts: without the first dimension."""
    gate_up, down, _, (_, width) = specs
    shared: list[Any] = [PartitionSpec(*spec) for spec in (gate_up[1:], down[1:], (width, None))]
    return SharedParams(*shared)


def _names(entry: Any) -> tuple[str, ...]:
    """The mesh axes in one entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _axes_of(spec: PartitionSpec) -> tuple[str, ...]:
    return tuple(axis for entry in spec for axis in _names(entry))
