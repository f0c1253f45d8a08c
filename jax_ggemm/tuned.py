"""Configurations that `python -m jax_ggemm tune` found, in the user's cache, and which one a call takes.

One small file per device kind, product, dtypes, groups, k, n and power of two of rows. A file is written whole, so that
several processes may tune at once; one that cannot be read, or that names no candidate of this version, is ignored with
a warning. What a process has once looked up it keeps.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_ggemm import objects
from jax_ggemm.files import write_json
from jax_ggemm.kernel import architectures
from jax_ggemm.products import Product

_ALIGNMENT = 8
"""Columns are padded to multiples of this many before a kernel sees them."""

_forced: contextvars.ContextVar[Any] = contextvars.ContextVar("jax_ggemm_forced_configuration", default=None)


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a configuration is chosen for.

    Attributes:
      product: which product.
      in_dtype: of the kernel's operands.
      out_dtype: of its result.
      m: rows.
      k: columns of the weights' first axis.
      n: columns of the weights' second axis.
      groups: number of groups.
    """

    product: Product
    in_dtype: np.dtype
    out_dtype: np.dtype
    m: int
    k: int
    n: int
    groups: int

    def file_name(self, device_kind: str) -> str:
        """The name of the file; the same for all m up to the same power of two."""
        rows = 1 << max(self.m - 1, 0).bit_length()
        dtypes = f"{self.in_dtype.name}-{self.out_dtype.name}"
        k, n = (-(-columns // _ALIGNMENT) * _ALIGNMENT for columns in (self.k, self.n))
        extents = f"g{self.groups}-k{k}-n{n}-m{rows}"
        kind = re.sub(r"[^A-Za-z0-9]+", "_", device_kind)
        return f"{kind}-{self.product.value}-{dtypes}-{extents}.json"


def pick(problem: Problem, arch: str = "sm_90a") -> Any:
    """The configuration that a call takes: the tuned one where there is one, or the analytic pick.

    Args:
      problem: what the call is.
      arch: the architecture that its kernel is for.

    Returns:
      A configuration of that architecture.
    """
    architecture = architectures.BY_NAME[arch]
    forced = _forced.get()
    if forced is not None:
        return forced
    kind = device_kind()
    found = None if kind is None else lookup(problem, kind)
    if found is not None and found in architecture.candidates(problem.product):
        return found
    return architecture.pick(problem.product, problem.m, problem.k, problem.n, problem.groups)


@contextlib.contextmanager
def forced(configuration: Any) -> Iterator[None]:
    """Within it every call that is traced takes this configuration, right for its product or not: for measuring."""
    token = _forced.set(configuration)
    try:
        yield
    finally:
        _forced.reset(token)


@functools.cache
def device_kind() -> str | None:
    """The kind of this machine's GPUs, as JAX names it; None without one."""
    try:
        return str(jax.devices("cuda")[0].device_kind)
    except RuntimeError:
        return None


def directory() -> Path:
    """Where this user's tuned configurations are kept."""
    return objects.cache_directory().with_name("tuned")


def lookup(problem: Problem, kind: str) -> Any:
    """The tuned configuration for a problem on a kind of device, or None."""
    return _read(directory() / problem.file_name(kind), problem.product)


def store(problem: Problem, kind: str, best: Any, about: dict[str, Any]) -> Path:
    """Writes the configuration for a problem, whole; calls that are traced from now on take it.

    Args:
      problem: what it is for.
      kind: of the device that it was measured on.
      best: the configuration.
      about: what else to write down.

    Returns:
      The file.
    """
    path = directory() / problem.file_name(kind)
    write_json(path, {"config": dataclasses.asdict(best), **about})
    _read.cache_clear()
    return path


@functools.cache
def _read(path: Path, product: Product) -> Any:
    try:
        content = path.read_text()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        return _ignored(path, str(error))
    try:
        named = json.loads(content)["config"]
    except (ValueError, KeyError, TypeError) as error:
        return _ignored(path, f"it holds no configuration ({type(error).__name__}: {error})")
    for candidate in architectures.candidates(product):
        if dataclasses.asdict(candidate) == named:
            return candidate
    return _ignored(path, f"{named} is no candidate for {product.value} of this version")


def _ignored(path: Path, reason: str) -> None:
    warnings.warn(f"the tuned configuration in {path} is ignored: {reason}; tune again", stacklevel=2)
