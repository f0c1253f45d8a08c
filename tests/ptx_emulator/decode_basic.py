"""Decodes what stays within a warp: arithmetic, conversions, shuffles, branches."""

from __future__ import annotations

from collections.abc import Sequence

from ptx_emulator.opcodes import NAMES
from ptx_emulator.operands import OP, REGISTER, Decoded, Head, Operands, only, take, type_of
from ptx_emulator.syntax import split_operands

_MODIFIERS = {
    **dict.fromkeys(("add", "sub"), ("rn", "ftz", "sat")),
    **dict.fromkeys(("mul", "mad"), ("lo|hi|wide", "rn", "ftz", "sat")),
    "fma": ("rn!", "ftz", "sat"),
    "div": ("rn", "ftz"),
    **dict.fromkeys(("min", "max"), ("relu", "ftz")),
    **dict.fromkeys(("neg", "abs"), ("ftz",)),
}
_COUNTS = {
    **dict.fromkeys(("mad", "fma", "prmt", "bfe"), 4),
    **dict.fromkeys(("neg", "abs", "not"), 2),
    **dict.fromkeys(("bfi", "lop3"), 5),
}


def _arithmetic(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    head = parts[0]
    names = {"and": "and_", "or": "or_", "xor": "xor_", "not": "not_"}
    only(parts[1:-1], *_MODIFIERS.get(head, ()))
    take(arguments, _COUNTS.get(head, 3))
    kind, bits = type_of(parts[-1:])
    if kind == "p" and head not in names:
        raise KeyError("predicates")
    if "relu" in parts and (kind, bits) != ("s", 32):
        raise KeyError("relu")
    if "ftz" in parts and (kind, bits) != ("f", 32):
        raise KeyError("ftz")
    if "sat" in parts and (kind, bits) != ("f", 32) and ((kind, bits) != ("s", 32) or head not in ("add", "sub")):
        raise KeyError("sat")
    if (kind == "f") != ("rn" in parts) and "rn" in parts:
        raise KeyError("rn")
    for modifier, flag in (("relu", "relu"), ("sat", "saturate"), ("ftz", "ftz")):
        if modifier in parts:
            d.flag(flag)
    if head in ("mul", "mad") and kind != "f":
        mode = next((part for part in parts if part in ("lo", "hi", "wide")), None)
        if mode is None:
            raise KeyError("neither lo, hi nor wide")
        self.simple(d, parts, [], f"{head}_{mode}")
        wide = 2 * d.bits if mode == "wide" else d.bits
        widths = [wide, d.bits, d.bits, wide]
        d.operands = [self.value(argument, width) for argument, width in zip(arguments, widths, strict=False)]
        return
    if any(part in ("lo", "hi", "wide") for part in parts):
        raise KeyError("half of a product")
    if kind == "f" and bits == 16:
        raise KeyError("f16 arithmetic")
    narrow = {"shl": (2,), "shr": (2,), "bfe": (2, 3), "bfi": (3, 4), "lop3": (4,)}.get(head, ())
    d.op = OP[{"mul": "mul_lo", "mad": "fma"}.get(head, names.get(head, head))]
    d.kind, d.bits = kind, bits
    if bits == 8:
        raise KeyError("8 bits")
    d.operands = [self.value(argument, 32 if i in narrow else bits) for i, argument in enumerate(arguments)]


def _popc_like(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    only(parts[1:-1])
    take(arguments, 2)
    self.simple(d, parts, [], parts[0])
    width = d.bits if parts[0] == "brev" else 32
    d.operands = [self.value(arguments[0], width), self.value(arguments[1], d.bits)]


def _members(members: Sequence[str], bits: int) -> int:
    """How many registers of 16 bits or more a wide one falls into."""
    if (bits, len(members)) not in ((32, 2), (64, 2), (64, 4), (128, 2)):
        raise KeyError(f"{len(members)} parts of {bits} bits")
    return len(members)


def _mov(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    only(parts[1:-1])
    take(arguments, 2)
    d.kind, d.bits = type_of(parts)
    destination, source = arguments
    if d.bits == 8:
        raise KeyError("8 bits")
    if destination.startswith("{"):
        d.op = OP["unpack"]
        members = split_operands(destination[1:-1])
        d.count = _members(members, d.bits)
        d.operands = [self.value(member, d.bits // d.count) for member in members] + [self.value(source, d.bits)]
    elif source.startswith("{"):
        d.op = OP["pack"]
        members = split_operands(source[1:-1])
        d.count = _members(members, d.bits)
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
    only(parts[2:-1], "and|or|xor", "ftz")
    d.op = OP["setp"]
    d.kind, d.bits = type_of(parts[-1:])
    if d.kind == "p" or d.bits == 8 or ("ftz" in parts and (d.kind, d.bits) != ("f", 32)):
        raise KeyError("type")
    if "ftz" in parts:
        d.flag("ftz")
    compare = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(parts[1], parts[1])
    d.variant = NAMES["COMPARE"][compare]
    if d.kind != "f" and compare not in ("eq", "ne", "lt", "le", "gt", "ge"):
        raise KeyError("a comparison of floating point")
    if parts[1] in ("lo", "ls", "hi", "hs"):
        d.kind = "u"
    booleans = {"and": 1, "or": 2, "xor": 3}
    d.extra = next((booleans[part] for part in parts[2:-1] if part in booleans), 0)
    take(arguments, 4 if d.extra else 3)
    d.operands = self.pair(arguments[0], 1) + [self.value(argument, d.bits) for argument in arguments[1:3]]
    if d.extra:
        negated = arguments[3].startswith("!")
        d.count = -1 if negated else 1
        d.operands.append(self.value(arguments[3].lstrip("!"), 1))


def _selp(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    only(parts[1:-1])
    take(arguments, 4)
    self.simple(d, parts, arguments[:3], "selp")
    d.operands.append(self.value(arguments[3], 1))


_PACKED = {
    "bf16x2": "bf16",
    "f16x2": "f16",
    "e4m3x2": "e4m3",
    "e5m2x2": "e5m2",
}


_KINDS = {"f16": ("h", 16), "bf16": ("x", 16)}
_INTEGER_ROUNDS = ("rni", "rzi", "rmi", "rpi")


def _cvt(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    destination, source = parts[-2], parts[-1]
    if destination in _PACKED and source == "f32":
        byte = destination.startswith("e")
        only(parts[1:-2], "rn!", "satfinite!" if byte else "", "relu")
        take(arguments, 3)
        d.op = OP["cvt_pack"]
        d.variant = NAMES["FORMAT"][_PACKED[destination]]
        if "relu" in parts:
            d.flag("relu")
        d.bits = 16 if byte else 32
        d.operands = [self.value(arguments[0], d.bits)] + [self.value(argument, 32) for argument in arguments[1:]]
        return
    d.op = OP["cvt"]
    only(parts[1:-2], "|".join(name for name in NAMES["ROUND"] if name != "none"), "ftz", "sat")
    take(arguments, 2)
    d.kind, d.bits = _KINDS[destination] if destination in _KINDS else type_of([destination])
    kind2, d.bits2 = _KINDS[source] if source in _KINDS else type_of([source])
    d.kind2 = ord(kind2)
    rounding = next((part for part in parts[1:-2] if part in NAMES["ROUND"]), "none")
    _check_rounding((d.kind, d.bits), (kind2, d.bits2), rounding)
    d.variant = NAMES["ROUND"][rounding]
    if "sat" in parts:
        d.flag("saturate")
    if "ftz" in parts:
        if "f32" not in (destination, source):
            raise KeyError("ftz")
        d.flag("ftz")
    integer = d.kind not in "fhx"
    d.operands = [
        self.value(arguments[0], d.bits, wider=integer),
        self.value(arguments[1], d.bits2, wider=kind2 not in "fhx"),
    ]


def _check_rounding(to: tuple[str, int], source: tuple[str, int], rounding: str) -> None:
    """Refuses conversions that would be rounded twice here, or that no GPU has."""
    to_float, from_float = to[0] in "fhx", source[0] in "fhx"
    if to_float and not from_float:
        known = to[0] == "f" and rounding == "rn"
    elif not to_float:
        known = (rounding in _INTEGER_ROUNDS) if from_float else rounding == "none"
    elif to == source:
        known = to[0] == "f" and rounding in ("none", *_INTEGER_ROUNDS)
    elif to[1] > source[1]:
        known = rounding == "none"
    else:
        known = rounding == "rn" and (to[1] == 32 or source == ("f", 32))
    if not known:
        raise KeyError("this rounding of this conversion")


def _shfl(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    only(parts[1:], "sync!", "up|down|bfly|idx!", "b32!")
    take(arguments, 5)
    d.op = OP["shfl"]
    d.variant = NAMES["SHUFFLE"][parts[2]]
    d.operands = self.pair(arguments[0], 32) + [self.value(argument, 32) for argument in arguments[1:]]


def _vote(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    only(parts[1:], "sync!", "ballot|any|all|uni!", "b32!" if "ballot" in parts else "pred!")
    take(arguments, 3)
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
    only(parts[1:], "sync!")
    take(arguments, 2)
    d.op = OP["elect"]
    d.operands = [*self.pair(arguments[0], 32), self.value(arguments[1], 32)]


def _activemask(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    only(parts[1:], "b32!")
    take(arguments, 1)
    d.op = OP["activemask"]
    d.operands = [self.value(arguments[0], 32)]


def _bra(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    only(parts[1:], "uni")
    take(arguments, 1)
    d.op = OP["bra"]
    d.target = self.parser.find_label(self.scope, arguments[0])


def _named(name: str, *groups: str, operands: int = 0) -> Head:
    def head(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
        only(parts[1:], *groups)
        take(arguments, operands)
        d.op = OP[name]

    return head


def _setmaxnreg(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    only(parts[1:], "inc|dec!", "sync!", "aligned!", "u32!")
    take(arguments, 1)
    d.op = OP["setmaxnreg"]
    d.variant = int(parts[1] == "inc")
    d.operands = [self.value(arguments[0], 32)]


HEADS: dict[str, Head] = {
    **dict.fromkeys(
        (
            *("add", "sub", "mul", "mad", "fma", "min", "max", "div", "rem", "neg", "abs", "and", "or", "xor", "not"),
            *("shl", "shr", "bfe", "bfi", "prmt", "lop3"),
        ),
        _arithmetic,
    ),
    **dict.fromkeys(("popc", "clz", "brev"), _popc_like),
    "mov": _mov,
    "setp": _setp,
    "selp": _selp,
    "cvt": _cvt,
    "shfl": _shfl,
    "vote": _vote,
    "elect": _elect,
    "activemask": _activemask,
    "bra": _bra,
    "ret": _named("ret", "uni"),
    "exit": _named("ret"),
    "trap": _named("trap"),
    "setmaxnreg": _setmaxnreg,
    "nanosleep": _named("nop", "u32!", operands=1),
    "griddepcontrol": _named("nop", "wait|launch_dependents!"),
    "prefetchu": _named("nop", "L1!", operands=1),
}
"""By the first word of the opcode."""
