"""Operands of PTX instructions, and the fields of a decoded instruction."""

from __future__ import annotations

import dataclasses
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ptx_emulator.opcodes import NAMES
from ptx_emulator.syntax import split_operands

OP, FLAG, SPACE = NAMES["OP"], NAMES["FLAG"], NAMES["SPACE"]
REGISTER, CONSTANT, SINK, ADDRESS, CONSTANT_ADDRESS = range(5)
_TYPE = re.compile(r"^([busf])(\d+)$")
_OFFSET = re.compile(r"(.+?)\s*([+-])\s*(-?)\s*(0[xX][0-9a-fA-F]+|\d+)$")
_NUMBER = re.compile(r"^-?(0[xX][0-9a-fA-F]+|\d+)U?$")

Operand = tuple[int, int, int, int]
"""(kind, place, addend, bits)."""


class Scope(Protocol):
    """What the decoder asks the parser."""

    kernel: Any
    params: dict[str, Any]
    shared: dict[str, int]

    def find_label(self, scope: int, name: str) -> int: ...
    def register(self, scope: int, name: str) -> tuple[int, int] | None: ...
    def special(self, name: str, bits: int) -> tuple[int, int] | None: ...
    def constant(self, value: int, bits: int) -> int: ...
    def param_constant(self, offset: int, bits: int) -> int: ...


@dataclasses.dataclass
class Decoded:
    """The fields of one instruction, in the order of `Instr` in core/program.h."""

    op: int = 0
    kind: str = "b"
    bits: int = 32
    kind2: int = 0
    bits2: int = 0
    count: int = 1
    variant: int = 0
    flags: int = 0
    space: int = 0
    extra: int = 0
    target: int = -1
    operands: list[Operand] = dataclasses.field(default_factory=list)

    def flag(self, *names: str) -> None:
        """Sets flags."""
        for name in names:
            self.flags |= 1 << FLAG[name]


def type_of(parts: Sequence[str]) -> tuple[str, int]:
    """(kind, bits) of the last type among the parts of an opcode."""
    for part in reversed(parts):
        match = _TYPE.match(part)
        if match:
            return match.group(1), int(match.group(2))
        if part == "pred":
            return "p", 1
    raise KeyError("no type")


def space(parts: Sequence[str]) -> int:
    for part in parts:
        if part.startswith("shared"):
            return SPACE["shared"]
        if part in ("global", "const"):
            return SPACE["global"]
        if part.startswith("param"):
            return SPACE["param"]
    return SPACE["generic"]


def vector(parts: Sequence[str]) -> int:
    for part in parts:
        if part in ("v2", "v4", "v8"):
            return int(part[1:])
    return 1


def only(parts: Sequence[str], *groups: str) -> None:
    """Refuses an opcode with a part that none of the groups has.

    Args:
      parts: of the opcode, without the first word.
      *groups: alternatives, separated by "|", of which one may be there once; one must be where it ends with "!".
    """
    left = list(groups)
    for part in parts:
        group = next((group for group in left if part in group.rstrip("!").split("|")), None)
        if group is None:
            raise KeyError(f"no .{part} here")
        left.remove(group)
    missing = [group for group in left if group.endswith("!")]
    if missing:
        raise KeyError(f"no .{missing[0].rstrip('!').replace('|', ', .')}")


def take(arguments: Sequence[str], *counts: int) -> None:
    """Refuses another number of operands."""
    if len(arguments) not in counts:
        raise KeyError(f"{len(arguments)} operands instead of {' or '.join(map(str, counts))}")


def _split_offset(text: str) -> tuple[str, int]:
    """(`symbol`, offset) of `symbol+offset`."""
    match = _OFFSET.match(text)
    if not match:
        return text, 0
    value = int(match.group(4), 0)
    return match.group(1).strip(), -value if (match.group(2) == "-") != (match.group(3) == "-") else value


class Operands:
    """Looks up the operands of one kernel."""

    def __init__(self, scope: Scope):
        self.parser = scope
        self.scope = 0
        self.accumulators: set[int] = set()

    def number(self, text: str, bits: int) -> int | None:
        """The value of an immediate, or None."""
        if text.startswith(("0f", "0F")) and len(text) == 10:
            raw = int(text[2:], 16)
            if bits == 64:
                return struct.unpack("<Q", struct.pack("<d", struct.unpack("<f", struct.pack("<I", raw))[0]))[0]
            return raw
        if text.startswith(("0d", "0D")) and len(text) == 18:
            return int(text[2:], 16)
        if _NUMBER.match(text):
            return int(text.rstrip("U"), 0)
        return None

    def value(self, text: str, bits: int, wider: bool = False) -> Operand:
        """A register of this width, or `wider`; an immediate, a symbol or a sink."""
        if text == "_":
            return (SINK, 0, 0, bits)
        found = self.parser.register(self.scope, text)
        if found:
            if found[1] != bits and not (wider and 1 < bits < found[1]):
                raise KeyError(f"{text} has {found[1]} bits, not {bits}")
            return (REGISTER, found[0], 0, found[1])
        if text == "WARP_SZ":
            text = "32"
        value = self.number(text, bits)
        if value is not None:
            return (CONSTANT, self.parser.constant(value, bits), 0, bits)
        if text.startswith("%"):
            special = self.parser.special(text, bits)
            if special:
                return (REGISTER, special[0], 0, special[1])
        text, addend = _split_offset(text)
        if text in self.parser.params:
            place = self.parser.param_constant(self.parser.params[text].offset + addend, bits)
            return (CONSTANT, place, 0, bits)
        if text in self.parser.shared and addend + self.parser.shared[text] == 0:
            base = self.parser.special("%shared_base", bits)
            assert base is not None
            return (REGISTER, base[0], 0, base[1])
        raise KeyError(text)

    def symbol_address(self, text: str, bits: int) -> tuple[str, int] | None:
        """(symbol, addend) where a `mov` takes the address of a shared variable that is not the first."""
        name, addend = _split_offset(text)
        if name in self.parser.shared:
            return name, addend + self.parser.shared[name]
        return None

    def values(self, text: str, bits: int, wider: bool = False) -> list[Operand]:
        """The members of a `{...}`, or the one operand."""
        inner = split_operands(text[1:-1]) if text.startswith("{") else [text]
        return [self.value(item, bits, wider) for item in inner]

    def address(self, text: str) -> Operand:
        """A `[...]`."""
        if not text.startswith("["):
            raise KeyError(text)
        inner, addend = text[1:-1].strip(), 0
        found = self.parser.register(self.scope, inner)
        if not found:
            inner, addend = _split_offset(inner)
            found = self.parser.register(self.scope, inner)
        if found:
            if found[1] < 32:
                raise KeyError(f"{inner} has {found[1]} bits, too few for an address")
            return (ADDRESS, found[0], addend, found[1])
        if inner in self.parser.shared:
            base = self.parser.special("%shared_base", 32)
            assert base is not None
            return (ADDRESS, base[0], addend + self.parser.shared[inner], base[1])
        if inner in self.parser.params:
            place = self.parser.param_constant(self.parser.params[inner].offset, 64)
            return (CONSTANT_ADDRESS, place, addend, 64)
        value = self.number(inner, 64)
        if value is None:
            raise KeyError(inner)
        return (CONSTANT_ADDRESS, self.parser.constant(value, 64), addend, 64)

    def pair(self, text: str, bits: int) -> list[Operand]:
        """`d|p`, or `d` with nowhere for p to go."""
        first, _, second = text.partition("|")
        return [self.value(first.strip(), bits), self.value(second.strip() or "_", 1)]

    def cache_policy(self, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
        """The last operand of an instruction with a cache hint. It does nothing here, but must hold a value."""
        if "L2::cache_hint" in parts:
            d.operands.append(self.value(arguments[-1], 64))

    def simple(self, d: Decoded, parts: Sequence[str], arguments: Sequence[str], name: str) -> None:
        """An operation on registers of one type."""
        d.op = OP[name]
        d.kind, d.bits = type_of(parts)
        if d.bits == 8:
            raise KeyError("8 bits")
        d.operands = [self.value(argument, d.bits) for argument in arguments]


Head = Callable[[Operands, Decoded, Sequence[str], Sequence[str]], None]
"""Decodes the instructions that begin with one word: from the parts of the opcode and the operands' texts."""
