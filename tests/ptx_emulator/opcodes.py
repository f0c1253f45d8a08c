"""The lists of core/opcodes.def, which the parser shares with the core."""

from __future__ import annotations

import re
from pathlib import Path

DEFINITIONS = Path(__file__).parent / "core" / "opcodes.def"


def _read() -> dict[str, dict[str, int]]:
    names: dict[str, dict[str, int]] = {}
    text = re.sub(r"//[^\n]*", "", DEFINITIONS.read_text())
    for group, name in re.findall(r"([A-Z_]+)\((\w+)\)", text):
        members = names.setdefault(group, {})
        members[name] = len(members)
    return names


NAMES = _read()
"""Group to name to number: OP, FLAG, SPACE, COMPARE and so on."""
