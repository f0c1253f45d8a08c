"""A small decoder-only transformer over bytes whose every layer is a Mixture of Experts of `jax_ggemm`."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from jax_ggemm.expert_parallel import ExpertParallel
from jax_ggemm.nnx_moe import MoE
from jax_ggemm.routing import Router, RoutingStats

VOCABULARY = 256
ROTARY_BASE = 10_000.0


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The model. A field's metadata is its help on the command line."""

    features: int = dataclasses.field(default=128, metadata={"help": "width of the model"})
    hidden_features: int = dataclasses.field(default=256, metadata={"help": "width of each expert"})
    layers: int = dataclasses.field(default=2, metadata={"help": "layers"})
    heads: int = dataclasses.field(default=4, metadata={"help": "attention heads"})
    experts: int = dataclasses.field(default=8, metadata={"help": "experts in each layer"})
    top_k: int = dataclasses.field(default=2, metadata={"help": "experts for each token"})
    dtype: str = dataclasses.field(
        default="float32", metadata={"help": "of the computation", "choices": ("float32", "bfloat16", "float16")}
    )
    implementation: str | None = dataclasses.field(
        default=None,
        metadata={"help": "of the grouped products; the best one if left out", "choices": ("cute", "cpu", "xla")},
    )

    def __post_init__(self) -> None:
        for name in ("features", "hidden_features", "layers", "heads", "experts", "top_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.features % (2 * self.heads):
            raise ValueError(f"features must be a multiple of 2 * heads = {2 * self.heads}, got {self.features}")
        if self.top_k > self.experts:
            raise ValueError(f"top_k must be at most experts = {self.experts}, got {self.top_k}")


class Attention(nnx.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.heads = config.heads
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=jnp.dtype(config.dtype), rngs=rngs)
        self.qkv = linear(config.features, 3 * config.features)
        self.out = linear(config.features, config.features)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Attends to this and earlier positions; x is (batch, length, features)."""
        batch, length, features = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, self.heads, features // self.heads)
        query, key, value = rotate(qkv[:, :, 0]), rotate(qkv[:, :, 1]), qkv[:, :, 2]
        attended = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        return self.out(attended.reshape(x.shape))


def embed(tokens: jax.Array, table: jax.Array) -> jax.Array:
    """Rows of the table. On a GPU a product: the gradient of a lookup is a scatter-add, four fifths of a step there."""

    def product(tokens: jax.Array, table: jax.Array) -> jax.Array:
        return jnp.matmul(jax.nn.one_hot(tokens, table.shape[0], dtype=table.dtype), table, precision="highest")

    return jax.lax.platform_dependent(
        tokens.astype(jnp.int32), table, cpu=lambda tokens, table: table[tokens], default=product
    )


def rotate(x: jax.Array) -> jax.Array:
    """Turns pairs of features by angles that grow with the position (RoPE, arXiv:2104.09864).

    Args:
      x: (batch, length, heads, head features).

    Returns:
      The same shape and dtype.
    """
    length, half = x.shape[1], x.shape[3] // 2
    frequencies = ROTARY_BASE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = (jnp.arange(length, dtype=jnp.float32)[:, None] * frequencies)[:, None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


class Block(nnx.Module):
    """Attention, then experts, each on a normalised input and added to the residual stream."""

    def __init__(self, config: ModelConfig, *, parallel: ExpertParallel | None = None, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.dtype)
        self.attention_norm = nnx.RMSNorm(config.features, dtype=dtype, rngs=rngs)
        self.attention = Attention(config, rngs=rngs)
        self.moe_norm = nnx.RMSNorm(config.features, dtype=dtype, rngs=rngs)
        self.moe = MoE(
            config.features,
            config.hidden_features,
            config.experts,
            router=Router(config.top_k),
            dtype=dtype,
            implementation=config.implementation,
            parallel=parallel,
            rngs=rngs,
        )

    def __call__(self, x: jax.Array) -> tuple[jax.Array, RoutingStats]:
        """Applies the block to x, (batch, length, features); also returns what its router did."""
        x = x + self.attention(self.attention_norm(x))
        y, stats = self.moe(self.moe_norm(x))
        return x + y, stats


def _apply(block: Block, x: jax.Array) -> tuple[jax.Array, RoutingStats]:
    return block(x)


class MoELM(nnx.Module):
    """The language model: bytes in, logits of the next byte out.

    Args:
      config: the sizes.
      parallel: how the experts lie on a mesh; None for one device.
      checkpoint_blocks: whether a block keeps its input alone for the gradient and computes the rest again.
      rngs: rng key.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        parallel: ExpertParallel | None = None,
        checkpoint_blocks: bool = False,
        rngs: nnx.Rngs,
    ):
        self.checkpoint_blocks = checkpoint_blocks
        dtype = jnp.dtype(config.dtype)
        self.embed = nnx.Embed(VOCABULARY, config.features, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([Block(config, parallel=parallel, rngs=rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(config.features, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(config.features, VOCABULARY, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, RoutingStats]:
        """Predicts the byte after each byte.

        Args:
          tokens: (batch, length) integers below 256.

        Returns:
          (logits, stats): (batch, length, 256) float32, and the routing statistics with a leading axis of layers.
        """
        x = embed(tokens, self.embed.embedding[...].astype(self.head.dtype))
        apply = nnx.remat(_apply) if self.checkpoint_blocks else _apply
        stats = []
        for block in self.blocks:
            x, layer_stats = apply(block, x)
            stats.append(layer_stats)
        logits = self.head(self.norm(x)).astype(jnp.float32)
        return logits, jax.tree.map(lambda *layers: jnp.stack(layers), *stats)


@nnx.jit(static_argnames=("count",))
def generate(model: MoELM, prompt: jax.Array, key: jax.Array, temperature: jax.Array, *, count: int) -> jax.Array:
    """Continues a text, always from a window as long as the prompt (what the model was trained on).

    Args:
      model: the model.
      prompt: (length,) integers.
      key: of `jax.random`.
      temperature: below 1 for likelier, above 1 for more surprising text.
      count: bytes to generate.

    Returns:
      (count,) int32.
    """

    def next_byte(window: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits, _ = model(window[None])
        token = jax.random.categorical(key, logits[0, -1] / temperature).astype(window.dtype)
        return jnp.append(window[1:], token), token

    return jax.lax.scan(next_byte, prompt.astype(jnp.int32), jax.random.split(key, count))[1]
