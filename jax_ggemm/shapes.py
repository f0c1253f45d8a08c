"""The shapes and group sizes that kernels are timed on: a table of known models, and histograms of training runs."""

from __future__ import annotations

import dataclasses
import json
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from jax_ggemm.products import Product


@dataclasses.dataclass(frozen=True)
class GroupedShape:
    """A grouped product whose group sizes are known.

    Attributes:
      name: of the shape.
      k: rows of a weight matrix.
      n: columns of a weight matrix.
      group_sizes: rows of each group.
      source: where the shape and the group sizes come from.
    """

    name: str
    k: int
    n: int
    group_sizes: tuple[int, ...]
    source: str

    @property
    def m(self) -> int:
        """Rows of all groups."""
        return sum(self.group_sizes)

    @property
    def groups(self) -> int:
        """The number of groups."""
        return len(self.group_sizes)

    def __str__(self) -> str:
        return f"{self.name} (g {self.groups}, k {self.k}, n {self.n}, m {self.m})"


@dataclasses.dataclass(frozen=True)
class Work:
    """What a product has to do at least.

    Attributes:
      flops: multiplications and additions.
      read_bytes: of its operands, each once; weights of empty groups are not read.
      written_bytes: of its result.
    """

    flops: int
    read_bytes: int
    written_bytes: int


def work(shape: GroupedShape, product: Product, itemsize: int = 2) -> Work:
    """The least work of a product on a shape, with operands and result of `itemsize` bytes an element."""
    m, k, n = shape.m, shape.k, shape.n
    matrices = sum(size > 0 for size in shape.group_sizes)
    rows_in, rows_out = (n, k) if product is Product.DLHS else (k, n)
    if product is Product.DRHS:
        return Work(2 * m * k * n, itemsize * m * (k + n), itemsize * shape.groups * k * n)
    return Work(2 * m * k * n, itemsize * (m * rows_in + matrices * k * n), itemsize * m * rows_out)


def operand_shapes(product: Product, m: int, k: int, n: int, groups: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of lhs and rhs of a product, as `Product` has them."""
    match product:
        case Product.FORWARD:
            return (m, k), (groups, k, n)
        case Product.DLHS:
            return (m, n), (groups, k, n)
        case Product.DRHS:
            return (m, k), (m, n)


def _balanced(groups: int, rows: int) -> np.ndarray:
    sizes = np.full(groups, rows // groups)
    sizes[: rows % groups] += 1
    return sizes


def _multinomial(groups: int, rows: int) -> np.ndarray:
    return np.random.default_rng(0).multinomial(rows, np.full(groups, 1.0 / groups))


def _zipf(groups: int, rows: int, exponent: float) -> np.ndarray:
    weights = 1.0 / np.arange(1, groups + 1) ** exponent
    generator = np.random.default_rng(0)
    return generator.permutation(generator.multinomial(rows, weights / weights.sum()))


def _shape(name: str, k: int, n: int, sizes: Sequence[int] | np.ndarray, source: str) -> GroupedShape:
    return GroupedShape(name, k, n, tuple(int(size) for size in sizes), source)


_GLM = "GLM-5, gate and up of one of 8 devices: 32 experts, 8 for each token; tokens in the name"
_DEEPSEEK = "DeepSeek-V4-Pro, gate and up of one of 8 devices: 48 experts, 6 for each token; tokens in the name"
_KIMI = "Kimi-K3, gate and up of one of 8 devices: 112 experts of a latent, 16 for each token; tokens in the name"
_QWEN = "Qwen3-30B-A3B: 128 experts, 8 for each token, 4096 tokens"
_SKEW = "a skewed step of training: 32 groups of 64 rows, 28 of 400, 4 of 784"

TABLE = (
    _shape("glm_gateup_m16", 6144, 4096, _multinomial(32, 16 * 8), _GLM),
    _shape("glm_gateup_m64", 6144, 4096, _multinomial(32, 64 * 8), _GLM),
    _shape("glm_gateup_m256", 6144, 4096, _multinomial(32, 256 * 8), _GLM),
    _shape("glm_gateup_m1024", 6144, 4096, _multinomial(32, 1024 * 8), _GLM),
    _shape("dsv4pro_gateup_m64", 7168, 6144, _multinomial(48, 64 * 6), _DEEPSEEK),
    _shape("dsv4pro_gateup_m1024", 7168, 6144, _multinomial(48, 1024 * 6), _DEEPSEEK),
    _shape("kimik3_gateup_m64", 3584, 6144, _multinomial(112, 64 * 16), _KIMI),
    _shape("kimik3_gateup_m1024", 3584, 6144, _multinomial(112, 1024 * 16), _KIMI),
    _shape("qwen30_gateup_4k", 2048, 1536, _multinomial(128, 4096 * 8), _QWEN),
    _shape("qwen30_down_4k", 768, 2048, _multinomial(128, 4096 * 8), _QWEN),
    _shape("seed_balanced", 4096, 2048, _balanced(64, 16384), "equal groups of 256 rows"),
    _shape("seed_skewed", 4096, 2048, [64] * 32 + [400] * 28 + [784] * 4, _SKEW),
    _shape("gptoss_ep8", 2880, 5760, _multinomial(4, 32768), "gpt-oss on one of 8 devices: few experts, many rows"),
    _shape("mixtral_up", 4096, 14336, _zipf(8, 16384, 0.5), "Mixtral 8x7B, up, in training; Zipf with exponent 1/2"),
)
"""Group sizes are drawn once from a multinomial with equal probabilities, where the source does not say otherwise."""

BY_NAME = {shape.name: shape for shape in TABLE}


def recorded(path: Path, limit: int = 2) -> Iterator[GroupedShape]:
    """The shapes of a training run, from the file of `--record-counts` (`examples/train_moe_lm.py`).

    Of all recorded steps and layers, takes those whose largest expert has the most rows, at evenly spaced steps.

    Args:
      path: the .npz file.
      limit: how many steps.

    Yields:
      For each of them the gate/up product and the down product.

    Raises:
      OSError: where the file cannot be read.
      ValueError: for a file that holds no counts.
    """
    with path.open("rb") as opened:
        if not zipfile.is_zipfile(opened):
            raise ValueError(f"{path} is no .npz file, or not all of one; --record-counts writes one")
    with np.load(path) as file:
        if not {"counts", "metadata"} <= set(file.files):
            raise ValueError(f"{path} holds {file.files}; a file of recorded counts holds counts and metadata")
        counts, about = file["counts"], json.loads(str(file["metadata"]))
    if counts.ndim != 3 or not counts.size:
        raise ValueError(f"{path}: counts have shape {counts.shape}; (steps, layers, experts) are needed")
    missing = {"model", "features", "hidden_features"} - about.keys()
    if missing:
        raise ValueError(f"{path}: the metadata lack {', '.join(sorted(missing))}")
    features, hidden = about["features"], about["hidden_features"]
    source = f"{about['model']}, recorded"
    for step in np.unique(np.linspace(0, counts.shape[0] - 1, limit).astype(int)):
        layer = int(counts[step].max(axis=1).argmax())
        name = f"{about['model']}_step{step + 1}_layer{layer + 1}"
        yield _shape(f"{name}_gateup", features, 2 * hidden, counts[step, layer], source)
        yield _shape(f"{name}_down", hidden, features, counts[step, layer], source)
