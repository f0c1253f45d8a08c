"""Files that are written whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any


def write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Writes a file that is at any time either the old one or the new one, whole.

    Args:
      path: the file; its folder is made where it is missing.
      write: writes the content to an open file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            write(file.file)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes a value as JSON, whole."""
    write_whole(path, lambda file: file.write(json.dumps(value, indent=1).encode() + b"\n"))
