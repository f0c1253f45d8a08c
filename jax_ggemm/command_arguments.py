"""Types of command-line arguments for `argparse`, which names the argument where one refuses what came."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jax_ggemm.shapes import GroupedShape, recorded

_MOST = int(np.iinfo(np.int32).max)


def count(text: str) -> int:
    """A number of rows, columns, groups or calls: an int32 of 1 or more."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value <= _MOST:
        raise argparse.ArgumentTypeError(f"{text!r}; a whole number from 1 to {_MOST} is needed")
    return value


def amount(text: str) -> float:
    """A finite number of 0 or more."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}; a number of 0 or more is needed")
    return value


def number_dtype(text: str) -> str:
    """The name of a dtype of numbers that JAX has as it is set up."""
    try:
        dtype = jnp.dtype(text)
    except TypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is no dtype; bfloat16, float16 or float32 would do") from None
    if not jnp.issubdtype(dtype, jnp.number):
        raise argparse.ArgumentTypeError(f"{text!r} is no dtype of numbers; bfloat16, float16 or float32 would do")
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise argparse.ArgumentTypeError(f"{text!r} needs the environment variable JAX_ENABLE_X64=1")
    return str(dtype.name)


def float_dtype(text: str) -> str:
    """The name of a floating dtype: operands are drawn from a normal distribution."""
    name = number_dtype(text)
    if not jnp.issubdtype(name, jnp.floating):
        raise argparse.ArgumentTypeError(f"{text!r} is no float dtype; bfloat16, float16 or float32 would do")
    return name


def recorded_counts(text: str) -> list[GroupedShape]:
    """The shapes in a file of `--record-counts`."""
    try:
        return list(recorded(Path(text)))
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from None
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def output_file(text: str) -> Path:
    """A file that can be written, in a folder that is there."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; the name of a file is needed")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {path.parent}; make it first")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"{text}: the folder {path.parent} cannot be written to")
    return path


def output_folder(text: str) -> Path:
    """A folder, or where one can be made."""
    path = Path(text)
    there = next(one for one in (path, *path.absolute().parents) if one.exists())
    if not there.is_dir():
        raise argparse.ArgumentTypeError(f"{there} is a file; a folder is needed")
    if not os.access(there, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"{text}: the folder {there} cannot be written to")
    return path
