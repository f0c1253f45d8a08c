"""Decodes what stays within a warp: arithmetic, conversions, loads and stores, shuffles, branches."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ptx_emulator.opcodes import NAMES
from ptx_emulator.operands import OP, REGISTER, SPACE, Decoded, Head, Operands, space, type_of, vector
from ptx_emulator.syntax import split_operands


def _arithmetic(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    head = parts[0]
    names = {"and": "and_", "or": "or_", "xor": "xor_", "not": "not_"}
    if head in ("mul", "mad") and type_of(parts)[0] != "f":
        mode = next(part for part in parts if part in ("lo", "hi", "wide"))
        self.simple(d, parts, [], f"{head}_{mode}")
        wide = 2 * d.bits if mode == "wide" else d.bits
        widths = [wide, d.bits, d.bits, wide]
        d.operands = [self.value(argument, width) for argument, width in zip(arguments, widths, strict=False)]
        return
    if head == "mul":
        self.simple(d, parts, arguments, "mul_lo")
    elif head == "mad":
        self.simple(d, parts, arguments, "fma")
    else:
        self.simple(d, parts, arguments, names.get(head, head))
    if d.kind == "f" and d.bits == 16:
        raise KeyError("f16 arithmetic")
    if head in ("shl", "shr"):
        d.operands[2] = self.value(arguments[2], 32)
    if head in ("bfe", "bfi"):
        for i in (-2, -1):
            d.operands[i] = self.value(arguments[i], 32)
    if "relu" in parts:
        d.flag("relu")
    if "sat" in parts:
        d.flag("saturate")
    for part in parts[1:-1]:
        if part not in ("relu", "sat", "rn", "ftz", "lo", "hi", "wide", "approx", "full"):
            raise KeyError(part)


def _popc_like(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    self.simple(d, parts, [], parts[0])
    width = d.bits if parts[0] == "brev" else 32
    d.operands = [self.value(arguments[0], width), self.value(arguments[1], d.bits)]


def _mov(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    d.kind, d.bits = type_of(parts)
    destination, source = arguments
    if destination.startswith("{"):
        d.op = OP["unpack"]
        members = split_operands(destination[1:-1])
        d.count = len(members)
        d.operands = [self.value(member, d.bits // d.count) for member in members] + [self.value(source, d.bits)]
    elif source.startswith("{"):
        d.op = OP["pack"]
        members = split_operands(source[1:-1])
        d.count = len(members)
        d.operands = [self.value(destination, d.bits)] + [self.value(member, d.bits // d.count) for member in members]
    else:
        symbol = self.symbol_address(source, d.bits)
        if symbol is not None and symbol[1] != 0:
            d.op = OP["add"]
            base = self.parser.special("%shared_base", d.bits)
            assert base is not None
            d.operands = [
                self.value(destination, d.bits),
                (REGISTER, base[0], 0, base[1]),
                self.value(str(symbol[1]), d.bits),
            ]
        else:
            d.op = OP["mov"]
            d.operands = [self.value(destination, d.bits), self.value(source, d.bits)]


def _setp(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    d.op = OP["setp"]
    d.kind, d.bits = type_of(parts)
    compare = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(parts[1], parts[1])
    d.variant = NAMES["COMPARE"][compare]
    if parts[1] in ("lo", "ls", "hi", "hs"):
        d.kind = "u"
    booleans = {"and": 1, "or": 2, "xor": 3}
    d.extra = next((booleans[part] for part in parts[2:-1] if part in booleans), 0)
    d.operands = self.pair(arguments[0], 1) + [self.value(argument, d.bits) for argument in arguments[1:3]]
    if d.extra:
        negated = arguments[3].startswith("!")
        d.count = -1 if negated else 1
        d.operands.append(self.value(arguments[3].lstrip("!"), 1))


def _selp(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    self.simple(d, parts, arguments[:3], "selp")
    d.operands.append(self.value(arguments[3], 1))


_PACKED = {
    "bf16x2": "bf16",
    "f16x2": "f16",
    "e4m3x2": "e4m3",
    "e5m2x2": "e5m2",
}


def _cvt(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    destination, source = parts[-2], parts[-1]
    if destination in _PACKED and source == "f32":
        d.op = OP["cvt_pack"]
        d.variant = NAMES["FORMAT"][_PACKED[destination]]
        if "rn" not in parts or "rz" in parts:
            raise KeyError("rounding")
        if "relu" in parts:
            d.flag("relu")
        d.bits = 16 if destination.startswith("e") else 32
        d.operands = [self.value(arguments[0], d.bits)] + [self.value(argument, 32) for argument in arguments[1:]]
        return
    d.op = OP["cvt"]

    def kind_of(part: str) -> tuple[str, int]:
        special = {"f16": ("h", 16), "bf16": ("x", 16), "tf32": ("t", 32)}
        return special[part] if part in special else type_of([part])

    d.kind, d.bits = kind_of(destination)
    kind2, d.bits2 = kind_of(source)
    d.kind2 = ord(kind2)
    for part in parts[1:-2]:
        if part in NAMES["ROUND"]:
            d.variant = NAMES["ROUND"][part]
        elif part in ("sat", "satfinite"):
            d.flag("saturate")
        elif part not in ("ftz",):
            raise KeyError(part)
    d.operands = [self.value(arguments[0], d.bits), self.value(arguments[1], d.bits2)]


def _cvta(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    if space(parts) == SPACE["shared"]:
        self.simple(d, parts, arguments, "cvta_to_shared" if "to" in parts else "cvta_shared")
    else:
        self.simple(d, parts, arguments, "mov")


def _mapa(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    if not parts[1].startswith("shared"):
        raise KeyError("generic mapa")
    self.simple(d, parts, arguments[:2], "mapa")
    d.operands.append(self.value(arguments[2], 32))


_CACHE = re.compile(r"^(L1|L2)::|^(nc|weak|volatile|relaxed|acquire|release|cta|cluster|gpu|sys|mmio|unified|const)$")


def _load_store(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    d.op = OP[parts[0]]
    d.kind, d.bits = type_of(parts)
    d.count = vector(parts)
    d.space = space(parts)
    if "async" in parts:
        known = ("async", "weak", "shared::cluster", "mbarrier::complete_tx::bytes", "v2", "v4")
        if parts[0] != "st" or not all(part in known for part in parts[1:-1]):
            raise KeyError("asynchronous")
        d.op = OP["st_async"]
        d.operands = [self.address(arguments[0]), *self.values(arguments[1], d.bits), self.address(arguments[2])]
        return
    for part in parts[1:-1]:
        known = _CACHE.match(part) or part in ("v2", "v4", "v8", "global") or part.startswith(("shared", "param"))
        if not known:
            raise KeyError(part)
    if parts[0] == "ld":
        d.operands = [*self.values(arguments[0], d.bits), self.address(arguments[1])]
    else:
        d.operands = [self.address(arguments[0]), *self.values(arguments[1], d.bits)]
    if len(d.operands) != d.count + 1:
        raise KeyError("vector")


def _atom(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    d.op = OP["atom"]
    d.kind, d.bits = type_of(parts)
    d.space = space(parts)
    name = next(part for part in parts[1:] if part in ("and", "or", "xor") or part in NAMES["ATOMIC"])
    d.variant = NAMES["ATOMIC"][name + "_" if name in ("and", "or", "xor") else name]
    if parts[0] == "red":
        arguments = ["_", *arguments]
    d.operands = [self.value(arguments[0], d.bits), self.address(arguments[1])]
    d.operands += [self.value(argument, d.bits) for argument in arguments[2:4]]


def _shfl(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    d.op = OP["shfl"]
    d.variant = NAMES["SHUFFLE"][parts[2]]
    d.operands = self.pair(arguments[0], 32) + [self.value(argument, 32) for argument in arguments[1:]]


def _vote(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    d.op = OP["vote"]
    d.variant = NAMES["VOTE"][parts[2]]
    negated = arguments[1].startswith("!")
    d.extra = int(negated)
    d.operands = [
        self.value(arguments[0], 32 if parts[2] == "ballot" else 1),
        self.value(arguments[1].lstrip("!"), 1),
        self.value(arguments[2], 32),
    ]


def _elect(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    d.op = OP["elect"]
    d.operands = [*self.pair(arguments[0], 32), self.value(arguments[1], 32)]


def _activemask(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    d.op = OP["activemask"]
    d.operands = [self.value(arguments[0], 32)]


def _bra(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    d.op = OP["bra"]
    d.target = self.parser.find_label(self.scope, arguments[0])


def _named(name: str) -> Head:
    def head(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
        d.op = OP[name]

    return head


def _setmaxnreg(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    d.op = OP["setmaxnreg"]
    d.variant = int(parts[1] == "inc")
    d.operands = [self.value(arguments[0], 32)]


HEADS: dict[str, Head] = {
    **dict.fromkeys(
        (
            *("add", "sub", "mul", "mad", "fma", "min", "max", "div", "rem", "neg", "abs", "and", "or", "xor", "not"),
            *("shl", "shr", "bfe", "bfi", "prmt"),
        ),
        _arithmetic,
    ),
    **dict.fromkeys(("popc", "clz", "brev"), _popc_like),
    "lop3": lambda self, d, parts, arguments: self.simple(d, parts, arguments, "lop3"),
    "mov": _mov,
    "setp": _setp,
    "selp": _selp,
    "cvt": _cvt,
    "cvta": _cvta,
    "mapa": _mapa,
    "ld": _load_store,
    "st": _load_store,
    "atom": _atom,
    "red": _atom,
    "shfl": _shfl,
    "vote": _vote,
    "elect": _elect,
    "activemask": _activemask,
    "bra": _bra,
    "ret": _named("ret"),
    "exit": _named("ret"),
    "trap": _named("trap"),
    "setmaxnreg": _setmaxnreg,
    "nanosleep": _named("nop"),
    "griddepcontrol": _named("nop"),
    "prefetchu": _named("nop"),
}
"""By the first word of the opcode."""
