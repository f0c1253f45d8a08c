"""One instruction of PTX to the fixed fields that the core executes."""

from __future__ import annotations

import dataclasses
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ptx_emulator.opcodes import NAMES
from ptx_emulator.syntax import UnsupportedInstructionError, split_operands

_OP, _FLAG, _SPACE = NAMES["OP"], NAMES["FLAG"], NAMES["SPACE"]
_REGISTER, _CONSTANT, _SINK, _ADDRESS, _CONSTANT_ADDRESS = range(5)
_GUARD = re.compile(r"@(!?)\s*([%\w$]+)\s+(.*)", re.S)
_TYPE = re.compile(r"^([busf])(\d+)$")
_OFFSET = re.compile(r"(.+?)\s*([+-])\s*(0[xX][0-9a-fA-F]+|\d+)$")
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
            self.flags |= 1 << _FLAG[name]


def _type_of(parts: Sequence[str]) -> tuple[str, int]:
    """(kind, bits) of the last type among the parts of an opcode."""
    for part in reversed(parts):
        match = _TYPE.match(part)
        if match:
            return match.group(1), int(match.group(2))
        if part == "pred":
            return "p", 1
    raise KeyError("no type")


def _space(parts: Sequence[str]) -> int:
    for part in parts:
        if part.startswith("shared"):
            return _SPACE["shared"]
        if part in ("global", "const"):
            return _SPACE["global"]
        if part.startswith("param"):
            return _SPACE["param"]
    return _SPACE["generic"]


def _vector(parts: Sequence[str]) -> int:
    for part in parts:
        if part in ("v2", "v4", "v8"):
            return int(part[1:])
    return 1


class Decoder:
    """Decodes the instructions of one kernel."""

    def __init__(self, scope: Scope):
        self.parser = scope
        self.scope = 0
        self.accumulators: set[int] = set()

    # ---- operands ----

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

    def value(self, text: str, bits: int) -> Operand:
        """A register, immediate, symbol or sink."""
        if text == "_":
            return (_SINK, 0, 0, bits)
        found = self.parser.register(self.scope, text)
        if found:
            return (_REGISTER, found[0], 0, found[1])
        if text == "WARP_SZ":
            text = "32"
        value = self.number(text, bits)
        if value is not None:
            return (_CONSTANT, self.parser.constant(value, bits), 0, bits)
        if text.startswith("%"):
            special = self.parser.special(text, bits)
            if special:
                return (_REGISTER, special[0], 0, special[1])
        addend = 0
        offset = _OFFSET.match(text)
        if offset:
            text, addend = offset.group(1), int(offset.group(2) + offset.group(3), 0)
        if text in self.parser.params:
            place = self.parser.param_constant(self.parser.params[text].offset + addend, bits)
            return (_CONSTANT, place, 0, bits)
        if text in self.parser.shared and addend + self.parser.shared[text] == 0:
            base = self.parser.special("%shared_base", bits)
            assert base is not None
            return (_REGISTER, base[0], 0, base[1])
        raise KeyError(text)

    def symbol_address(self, text: str, bits: int) -> tuple[str, int] | None:
        """(symbol, addend) where a `mov` takes the address of a shared variable that is not the first."""
        offset = _OFFSET.match(text)
        name, addend = (offset.group(1), int(offset.group(2) + offset.group(3), 0)) if offset else (text, 0)
        if name in self.parser.shared:
            return name, addend + self.parser.shared[name]
        return None

    def values(self, text: str, bits: int) -> list[Operand]:
        """The members of a `{...}`, or the one operand."""
        inner = split_operands(text[1:-1]) if text.startswith("{") else [text]
        return [self.value(item, bits) for item in inner]

    def address(self, text: str) -> Operand:
        """A `[...]`."""
        if not text.startswith("["):
            raise KeyError(text)
        inner, addend = text[1:-1].strip(), 0
        found = self.parser.register(self.scope, inner)
        if not found:
            offset = _OFFSET.match(inner)
            if offset:
                inner, addend = offset.group(1).strip(), int(offset.group(2) + offset.group(3), 0)
                found = self.parser.register(self.scope, inner)
        if found:
            return (_ADDRESS, found[0], addend, found[1])
        if inner in self.parser.shared:
            base = self.parser.special("%shared_base", 32)
            assert base is not None
            return (_ADDRESS, base[0], addend + self.parser.shared[inner], base[1])
        if inner in self.parser.params:
            place = self.parser.param_constant(self.parser.params[inner].offset, 64)
            return (_CONSTANT_ADDRESS, place, addend, 64)
        value = self.number(inner, 64)
        if value is None:
            raise KeyError(inner)
        return (_CONSTANT_ADDRESS, self.parser.constant(value, 64), addend, 64)

    def pair(self, text: str, bits: int) -> list[Operand]:
        """`d|p`, or `d` with nowhere for p to go."""
        first, _, second = text.partition("|")
        return [self.value(first.strip(), bits), self.value(second.strip() or "_", 1)]

    # ---- instructions ----

    def instruction(self, statement: Any) -> list[int]:
        """The fields of one statement."""
        self.scope = statement.scope
        text, guard, negated = statement.text, -1, 0
        match = _GUARD.match(text)
        if match:
            found = self.parser.register(self.scope, match.group(2))
            if found is None:
                raise UnsupportedInstructionError(statement.line, statement.text)
            guard, negated, text = found[0], int(match.group(1) == "!"), match.group(3)
        opcode, _, rest = text.partition(" ")
        parts = opcode.split(".")
        arguments = split_operands(rest)
        decoded = Decoded()
        try:
            head = _HEADS[parts[0]]
            head(self, decoded, parts, arguments)
        except (KeyError, IndexError, ValueError, StopIteration) as error:
            raise UnsupportedInstructionError(statement.line, statement.text) from error
        if decoded.op == _OP["ld"]:
            decoded.extra = statement.used_bytes
        first = len(self.parser.kernel.operands)
        self.parser.kernel.operands += decoded.operands
        return [
            decoded.op,
            statement.line,
            guard,
            negated,
            decoded.target,
            first,
            len(decoded.operands),
            ord(decoded.kind),
            decoded.bits,
            decoded.kind2,
            decoded.bits2,
            decoded.count,
            decoded.variant,
            decoded.flags,
            decoded.space,
            decoded.extra,
        ]

    def finish(self) -> None:
        """Marks the instructions that touch registers which a wgmma writes while other instructions go on."""
        operands = self.parser.kernel.operands
        for fields in self.parser.kernel.instructions:
            if fields[0] == _OP["wgmma_mma"]:
                continue
            own = operands[fields[5] : fields[5] + fields[6]]
            if any(kind == _REGISTER and place in self.accumulators for kind, place, _, _ in own):
                fields[13] |= 1 << _FLAG["touches_accumulators"]

    def simple(self, d: Decoded, parts: Sequence[str], arguments: Sequence[str], name: str) -> None:
        """An operation on registers of one type."""
        d.op = _OP[name]
        d.kind, d.bits = _type_of(parts)
        d.operands = [self.value(argument, d.bits) for argument in arguments]


_Head = Callable[[Decoder, Decoded, Sequence[str], Sequence[str]], None]


def _arithmetic(self: Decoder, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    head = parts[0]
    names = {"and": "and_", "or": "or_", "xor": "xor_", "not": "not_"}
    if head in ("mul", "mad") and _type_of(parts)[0] != "f":
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


def _popc_like(self: Decoder, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    self.simple(d, parts, [], parts[0])
    width = d.bits if parts[0] == "brev" else 32
    d.operands = [self.value(arguments[0], width), self.value(arguments[1], d.bits)]


def _mov(self: Decoder, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    d.kind, d.bits = _type_of(parts)
    destination, source = arguments
    if destination.startswith("{"):
        d.op = _OP["unpack"]
        members = split_operands(destination[1:-1])
        d.count = len(members)
        d.operands = [self.value(member, d.bits // d.count) for member in members] + [self.value(source, d.bits)]
    elif source.startswith("{"):
        d.op = _OP["pack"]
        members = split_operands(source[1:-1])
        d.count = len(members)
        d.operands = [self.value(destination, d.bits)] + [self.value(member, d.bits // d.count) for member in members]
    else:
        symbol = self.symbol_address(source, d.bits)
        if symbol is not None and symbol[1] != 0:
            d.op = _OP["add"]
            base = self.parser.special("%shared_base", d.bits)
            assert base is not None
            d.operands = [
                self.value(destination, d.bits),
                (_REGISTER, base[0], 0, base[1]),
                self.value(str(symbol[1]), d.bits),
            ]
        else:
            d.op = _OP["mov"]
            d.operands = [self.value(destination, d.bits), self.value(source, d.bits)]


def _setp(self: Decoder, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    d.op = _OP["setp"]
    d.kind, d.bits = _type_of(parts)
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


def _selp(self: Decoder, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    self.simple(d, parts, arguments[:3], "selp")
    d.operands.append(self.value(arguments[3], 1))


_PACKED = {
    "bf16x2": "bf16",
    "f16x2": "f16",
    "e4m3x2": "e4m3",
    "e5m2x2": "e5m2",
}


def _cvt(self: Decoder, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    destination, source = parts[-2], parts[-1]
    if destination in _PACKED and source == "f32":
        d.op = _OP["cvt_pack"]
        d.variant = NAMES["FORMAT"][_PACKED[destination]]
        if "rn" not in parts or "rz" in parts:
            raise KeyError("rounding")
        if "relu" in parts:
            d.flag("relu")
        d.bits = 16 if destination.startswith("e") else 32
        d.operands = [self.value(arguments[0], d.bits)] + [self.value(argument, 32) for argument in arguments[1:]]
        return
    d.op = _OP["cvt"]

    def kind_of(part: str) -> tuple[str, int]:
        special = {"f16": ("h", 16), "bf16": ("x", 16), "tf32": ("t", 32)}
        match = _TYPE.match(part)
        if part in special:
            return special[part]
        if match is None:
            raise KeyError(part)
        return match.group(1), int(match.group(2))

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


def _cvta(self: Decoder, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    if _space(parts) == _SPACE["shared"]:
        self.simple(d, parts, arguments, "cvta_to_shared" if "to" in parts else "cvta_shared")
    else:
        self.simple(d, parts, arguments, "mov")


def _mapa(self: Decoder, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    if not parts[1].startswith("shared"):
        raise KeyError("generic mapa")
    self.simple(d, parts, arguments[:2], "mapa")
    d.operands.append(self.value(arguments[2], 32))


_CACHE = re.compile(r"^(L1|L2)::|^(nc|weak|volatile|relaxed|acquire|release|cta|cluster|gpu|sys|mmio|unified|const)$")


def _load_store(self: Decoder, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    d.op = _OP[parts[0]]
    d.kind, d.bits = _type_of(parts)
    d.count = _vector(parts)
    d.space = _space(parts)
    if "async" in parts:
        known = ("async", "weak", "shared::cluster", "mbarrier::complete_tx::bytes", "v2", "v4")
        if parts[0] != "st" or not all(part in known for part in parts[1:-1]):
            raise KeyError("asynchronous")
        d.op = _OP["st_async"]
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


def _atom(self: Decoder, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    d.op = _OP["atom"]
    d.kind, d.bits = _type_of(parts)
    d.space = _space(parts)
    name = next(part for part in parts[1:] if part in ("and", "or", "xor") or part in NAMES["ATOMIC"])
    d.variant = NAMES["ATOMIC"][name + "_" if name in ("and", "or", "xor") else name]
    if parts[0] == "red":
        arguments = ["_", *arguments]
    d.operands = [self.value(arguments[0], d.bits), self.address(arguments[1])]
    d.operands += [self.value(argument, d.bits) for argument in arguments[2:4]]


def _shfl(self: Decoder, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    d.op = _OP["shfl"]
    d.variant = NAMES["SHUFFLE"][parts[2]]
    d.operands = self.pair(arguments[0], 32) + [self.value(argument, 32) for argument in arguments[1:]]


def _vote(self: Decoder, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    d.op = _OP["vote"]
    d.variant = NAMES["VOTE"][parts[2]]
    negated = arguments[1].startswith("!")
    d.extra = int(negated)
    d.operands = [
        self.value(arguments[0], 32 if parts[2] == "ballot" else 1),
        self.value(arguments[1].lstrip("!"), 1),
        self.value(arguments[2], 32),
    ]


def _elect(self: Decoder, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    d.op = _OP["elect"]
    d.operands = [*self.pair(arguments[0], 32), self.value(arguments[1], 32)]


def _activemask(self: Decoder, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    d.op = _OP["activemask"]
    d.operands = [self.value(arguments[0], 32)]


def _bra(self: Decoder, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    d.op = _OP["bra"]
    d.target = self.parser.find_label(self.scope, arguments[0])


def _named(name: str) -> _Head:
    def head(self: Decoder, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
        d.op = _OP[name]

    return head


def _setmaxnreg(self: Decoder, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    d.op = _OP["setmaxnreg"]
    d.variant = int(parts[1] == "inc")
    d.operands = [self.value(arguments[0], 32)]


def _bar(self: Decoder, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    if parts[1] == "cluster":
        d.op = _OP["cluster_arrive" if parts[2] == "arrive" else "cluster_wait"]
        if "relaxed" in parts:
            d.flag("relaxed")
        return
    if parts[1] == "warp":
        d.op = _OP["bar_warp_sync"]
        d.operands = [self.value(arguments[0], 32)]
        return
    what = "sync" if "sync" in parts else "arrive"
    if "red" in parts:
        raise KeyError("red")
    d.op = _OP[f"bar_{what}"]
    d.operands = [self.value(argument, 32) for argument in arguments]


def _fence(self: Decoder, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    if "mbarrier_init" in parts:
        d.op = _OP["fence_mbarrier_init"]
    elif "proxy" in parts and "async" in parts:
        d.op = _OP["fence_proxy_async"]
    else:
        d.op = _OP["fence"]


def _mbarrier(self: Decoder, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    what = parts[1]
    if "relaxed" in parts:
        d.flag("relaxed")
    if what in ("init", "inval"):
        d.op = _OP[f"mbarrier_{what}"]
        d.operands = [self.address(arguments[0])] + [self.value(argument, 32) for argument in arguments[1:]]
    elif what in ("expect_tx", "complete_tx"):
        d.op = _OP[f"mbarrier_{what}"]
        d.operands = [self.address(arguments[0]), self.value(arguments[1], 32)]
    elif what in ("arrive", "arrive_drop"):
        d.op = _OP["mbarrier_arrive"]
        if what == "arrive_drop":
            d.flag("drop")
        if "expect_tx" in parts:
            d.flag("expect_tx")
        if "noComplete" in parts:
            d.flag("no_complete")
        if arguments[0].startswith("["):
            arguments = ["_", *arguments]
        d.operands = [self.value(arguments[0], 64), self.address(arguments[1])]
        d.operands += [self.value(arguments[2] if len(arguments) > 2 else "1", 32)]
    elif what in ("try_wait", "test_wait"):
        d.op = _OP["mbarrier_wait"]
        if len(arguments) > 3:
            d.flag("looped")
        width = 32 if "parity" in parts else 64
        d.operands = [self.value(arguments[0], 1), self.address(arguments[1]), self.value(arguments[2], width)]
    else:
        raise KeyError(what)


def _tensor_operand(self: Decoder, text: str) -> list[Operand]:
    """`[map, {coordinates}]`: the map's address, then the coordinates."""
    inner = split_operands(text[1:-1])
    return [self.value(inner[0], 64), *self.values(inner[1], 32)]


_SILENT = ("tile", "bulk_group", "mbarrier::complete_tx::bytes", "L2::cache_hint", "cta_group::1", "async", "bulk")


def _bulk_tensor(self: Decoder, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    d.count = int(next(part for part in parts if re.fullmatch(r"[1-5]d", part))[0])
    for part in parts[1:]:
        ok = part in _SILENT or part.startswith("shared") or part in ("tensor", "global", "reduce", "add", "min", "max")
        if not ok and not re.fullmatch(r"[1-5]d", part) and part not in ("multicast::cluster", "cta_group::2"):
            raise KeyError(part)
    if parts.index("global") < next(i for i, part in enumerate(parts) if part.startswith("shared")):
        d.op = _OP["tma_store"]
        if parts[1] == "reduce":
            d.flag("reduce")
            d.variant = NAMES["ATOMIC"][next(part for part in parts if part in ("add", "min", "max"))]
        d.operands = [*_tensor_operand(self, arguments[0]), self.address(arguments[1])]
        return
    d.op = _OP["tma_load"]
    d.operands = [self.address(arguments[0]), *_tensor_operand(self, arguments[1]), self.address(arguments[2])]
    if "multicast::cluster" in parts:
        d.flag("multicast")
        d.operands.append(self.value(arguments[3], 32))
    if "cta_group::2" in parts:
        d.flag("pair")


def _cp(self: Decoder, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    if "commit_group" in parts:
        d.op = _OP["bulk_commit"]
    elif "wait_group" in parts:
        d.op = _OP["bulk_wait"]
        if "read" in parts:
            d.flag("read")
        d.operands = [self.value(arguments[0], 32)]
    elif "tensor" in parts:
        _bulk_tensor(self, d, parts, arguments)
    elif parts[:3] == ["cp", "async", "bulk"] and "multicast::cluster" not in parts:
        if parts[3].startswith("shared") and parts[4] == "global":
            d.op = _OP["bulk_load"]
            d.operands = [self.address(arguments[0]), self.address(arguments[1])]
            d.operands += [self.value(arguments[2], 32), self.address(arguments[3])]
        elif parts[3] == "global":
            d.op = _OP["bulk_store"]
            d.operands = [self.address(arguments[0]), self.address(arguments[1]), self.value(arguments[2], 32)]
        else:
            raise KeyError("bulk")
    else:
        raise KeyError("cp")


def _prefetch(self: Decoder, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    if "tensormap" not in parts:
        d.op = _OP["nop"]
        return
    d.op = _OP["prefetch_tensormap"]
    d.operands = [self.address(arguments[0])]


def _tensormap(self: Decoder, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    d.op = _OP["tensormap_replace"]
    d.variant = NAMES["FIELD"][parts[3]]
    d.space = _space(parts)
    d.kind, d.bits = _type_of(parts)
    if len(arguments) > 2:
        d.extra = int(arguments[1])
    d.operands = [self.address(arguments[0]), self.value(arguments[-1], d.bits)]


def _matrix(self: Decoder, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    d.op = _OP[parts[0]]
    if "m8n8" not in parts or "b16" not in parts:
        raise KeyError("shape")
    d.count = int(next(part for part in parts if part in ("x1", "x2", "x4"))[1:])
    if "trans" in parts:
        d.flag("trans")
    if parts[0] == "stmatrix":
        d.operands = [self.address(arguments[0]), *self.values(arguments[1], 32)]
    else:
        d.operands = [*self.values(arguments[0], 32), self.address(arguments[1])]


def _wgmma(self: Decoder, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    if parts[1] in ("fence", "commit_group", "wait_group"):
        d.op = _OP[{"fence": "wgmma_fence", "commit_group": "wgmma_commit", "wait_group": "wgmma_wait"}[parts[1]]]
        d.operands = [self.value(argument, 32) for argument in arguments]
        return
    if parts[1] != "mma_async":
        raise KeyError(parts[1])
    d.op = _OP["wgmma_mma"]
    shape = next(match for match in (re.fullmatch(r"m64n(\d+)k(\d+)", part) for part in parts) if match)
    d.count, d.bits2 = int(shape.group(1)), int(shape.group(2))
    result, a, b = parts[-3:]
    d.kind, d.bits = {"f32": ("f", 32), "f16": ("h", 16), "s32": ("s", 32)}[result]
    if d.kind != "f":
        raise KeyError("only float32 accumulators")
    d.kind2, d.variant = NAMES["FORMAT"][a], NAMES["FORMAT"][b]
    accumulators = self.values(arguments[0], 32)
    if len(accumulators) != d.count // 2:
        raise KeyError("accumulators")
    self.accumulators |= {place for kind, place, _, _ in accumulators if kind == _REGISTER}
    if arguments[1].startswith("{"):
        raise KeyError("A in registers")
    immediates = [int(argument) for argument in arguments[4:]]
    scale_a, scale_b, trans_a, trans_b = (*immediates, 0, 0)[:4] if immediates else (1, 1, 0, 0)
    d.extra = (scale_a < 0) | (scale_b < 0) << 1 | trans_a << 2 | trans_b << 3
    d.operands = [
        *accumulators,
        self.value(arguments[1], 64),
        self.value(arguments[2], 64),
        self.value(arguments[3], 1),
    ]


def _tcgen05(self: Decoder, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    what = parts[1]
    if "cta_group::2" in parts:
        d.flag("pair")
    if what == "alloc":
        d.op = _OP["tc_alloc"]
        d.space = _space(parts)
        d.operands = [self.address(arguments[0]), self.value(arguments[1], 32)]
    elif what == "dealloc":
        d.op = _OP["tc_dealloc"]
        d.operands = [self.value(argument, 32) for argument in arguments]
    elif what == "relinquish_alloc_permit":
        d.op = _OP["tc_relinquish"]
    elif what.startswith("wait"):
        d.op = _OP["tc_wait"]
    elif what.startswith("fence"):
        d.op = _OP["tc_fence"]
    elif what == "commit":
        d.op = _OP["tc_commit"]
        d.operands = [self.address(arguments[0])]
        if "multicast::cluster" in parts:
            d.flag("multicast")
            d.operands.append(self.value(arguments[1], 32))
    elif what == "cp":
        d.op = _OP["tc_cp"]
        if "32x128b" not in parts or "warpx4" not in parts:
            raise KeyError("shape")
        d.operands = [self.address(arguments[0]), self.value(arguments[1], 64)]
    elif what in ("ld", "st"):
        d.op = _OP[f"tc_{what}"]
        shape = next(part for part in parts if f"x{part}" in NAMES["TMEM_SHAPE"])
        d.variant = NAMES["TMEM_SHAPE"][f"x{shape}"]
        if "pack::16b" in parts or "unpack::16b" in parts:
            d.flag("pack16")
        if what == "ld":
            registers, address = self.values(arguments[0], 32), self.address(arguments[1])
            d.extra = int(arguments[2], 0) if len(arguments) > 2 else 0
            d.operands = [*registers, address]
        else:
            registers, address = self.values(arguments[-1], 32), self.address(arguments[0])
            d.extra = int(arguments[1], 0) if len(arguments) > 2 else 0
            d.operands = [address, *registers]
        d.count = len(registers)
    elif what == "mma":
        _tcgen05_mma(self, d, parts, arguments)
    else:
        raise KeyError(what)


def _tcgen05_mma(self: Decoder, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    d.op = _OP["tc_mma"]
    if "ws" in parts or "sp" in parts:
        raise KeyError("variant")
    d.variant = NAMES["KIND"][next(part for part in parts if part.startswith("kind::"))[6:]]
    d.operands = [self.address(arguments[0])]
    if arguments[1].startswith("["):
        d.flag("a_in_tmem")
        d.operands.append(self.address(arguments[1]))
    else:
        d.operands.append(self.value(arguments[1], 64))
    d.operands += [self.value(arguments[2], 64), self.value(arguments[3], 32)]
    rest = list(arguments[4:])
    if "block_scale" in parts:
        blocks = [
            part for part in parts if part in ("block16", "block32", "scale_vec::1X", "scale_vec::2X", "scale_vec::4X")
        ]
        size = {"block16": 16, "block32": 32, "scale_vec::1X": 32, "scale_vec::2X": 32, "scale_vec::4X": 16}
        d.extra = size[blocks[0]]
        d.operands += [self.value(rest[2], 1), self.address(rest[0]), self.address(rest[1])]
        return
    disabled = self.values(rest.pop(0), 32) if rest[0].startswith("{") else []
    if len(rest) > 1:
        raise KeyError("scale-input-d")
    d.count = len(disabled)
    d.operands += [self.value(rest[0], 1), *disabled]


def _clc(self: Decoder, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    if parts[1] == "try_cancel":
        d.op = _OP["clc_try_cancel"]
        if any(part.startswith("multicast") for part in parts):
            d.flag("multicast")
        d.operands = [self.address(arguments[0]), self.address(arguments[1])]
    elif "is_canceled" in parts:
        d.op = _OP["clc_is_canceled"]
        d.operands = [self.value(arguments[0], 1), self.value(arguments[1], 128)]
    else:
        d.op = _OP["clc_first_ctaid"]
        axis = next(part for part in parts if part.startswith("get_first_ctaid"))
        d.extra = "xyz".index(axis[-1])
        d.operands = [self.value(arguments[0], 32), self.value(arguments[1], 128)]


_HEADS: dict[str, _Head] = {
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
    "bar": _bar,
    "barrier": _bar,
    "fence": _fence,
    "membar": _named("fence"),
    "nanosleep": _named("nop"),
    "griddepcontrol": _named("nop"),
    "mbarrier": _mbarrier,
    "cp": _cp,
    "prefetch": _prefetch,
    "prefetchu": _named("nop"),
    "tensormap": _tensormap,
    "stmatrix": _matrix,
    "ldmatrix": _matrix,
    "wgmma": _wgmma,
    "tcgen05": _tcgen05,
    "clusterlaunchcontrol": _clc,
}
