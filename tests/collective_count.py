"""What a compiled program sends: its collectives, read off the optimised HLO."""

from __future__ import annotations

import dataclasses
import math
import re

_NAMES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_OP = re.compile(rf"= (?P<type>\(?.*?) (?P<name>{'|'.join(_NAMES)})(?P<start>-start)?\((?P<operands>[^)]*)\)")
_ARRAY = re.compile(r"\b(pred|[suf]\d+|bf16)\[([\d,]*)\]")
_BYTES = {"pred": 1, "bf16": 2}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of one device's program.

    Attributes:
      name: of the operation.
      dtype: of its operands.
      sent: bytes of the operands of one device.
      shapes: of the operands.
      in_entry: whether it is outside of loops and other inner computations.
    """

    name: str
    dtype: str
    sent: int
    shapes: tuple[tuple[int, ...], ...]
    in_entry: bool

    def to_others(self, ranks: int) -> float:
        """Bytes that one device sends to the others of its group of `ranks`, in a ring algorithm."""
        others = {"all-gather": ranks - 1, "all-reduce": 2 * (ranks - 1) / ranks, "collective-permute": 1}
        return self.sent * others.get(self.name, (ranks - 1) / ranks)


def collectives(text: str) -> list[Collective]:
    """The collectives of an optimised HLO module, as `jitted.lower(...).compile().as_text()` prints it.

    A loop's body is listed once.
    """
    types = dict(re.findall(r"(%[\w.-]+) = (\(.*?\)|\S+) ", text))
    found = []
    for match in _OP.finditer(text):
        operands = re.findall(r"%[\w.-]+", match["operands"])
        arrays = [_ARRAY.search(types[operand]) for operand in operands]
        shapes = tuple(tuple(int(n) for n in a[2].split(",") if n) for a in arrays if a is not None)
        kinds = [a[1] for a in arrays if a is not None]
        sent = sum(_size(kind) * math.prod(shape) for kind, shape in zip(kinds, shapes, strict=True))
        found.append(Collective(match["name"], kinds[0], sent, shapes, match.start() > text.index("\nENTRY")))
    return found


def _size(kind: str) -> int:
    return _BYTES.get(kind) or int(kind[1:]) // 8
