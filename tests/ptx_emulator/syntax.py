"""Small pieces of PTX's syntax."""

from __future__ import annotations


class UnsupportedInstructionError(ValueError):
    """An instruction that the emulator does not know."""

    def __init__(self, line: int, text: str, why: str = ""):
        super().__init__(f"line {line}: the emulator does not know `{text}`" + (f": {why}" if why else ""))
        self.line = line
        self.text = text


def split_operands(text: str) -> list[str]:
    """Operands, separated by commas outside of brackets."""
    parts, depth, current = [], 0, ""
    for char in text:
        depth += (char in "[{(") - (char in "]})")
        if char == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += char
    if current.strip():
        parts.append(current.strip())
    return parts
