"""Decodes loads, stores, atomics and what makes addresses."""

from __future__ import annotations

from collections.abc import Sequence

from ptx_emulator.opcodes import NAMES
from ptx_emulator.operands import OP, SPACE, Decoded, Head, Operands, only, space, take, type_of, vector


def _cvta(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    only(parts[1:], "to", "shared|shared::cta|shared::cluster|global|param|const!", "u64|u32!")
    take(arguments, 2)
    if space(parts) == SPACE["shared"]:
        self.simple(d, parts, arguments, "cvta_to_shared" if "to" in parts else "cvta_shared")
    else:
        self.simple(d, parts, arguments, "mov")


def _mapa(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    only(parts[1:], "shared::cluster!", "u32|u64!")
    take(arguments, 3)
    self.simple(d, parts, arguments[:2], "mapa")
    d.operands.append(self.value(arguments[2], 32))


_SCOPES = "cta|cluster|gpu|sys"
_SHARED = "shared|shared::cta|shared::cluster"
_LEVEL1 = "|".join(
    f"L1::{name}" for name in ("evict_normal", "evict_unchanged", "evict_first", "evict_last", "no_allocate")
)
_TYPE = "|".join(f"{kind}{bits}" for kind in "busf" for bits in (8, 16, 32, 64)) + "!"
_COMMON = (
    _SCOPES,
    "mmio",
    _LEVEL1,
    "L2::evict_last|L2::evict_normal|L2::evict_first",
    "L2::cache_hint",
    "v2|v4|v8",
    _TYPE,
)
_LOADS = (
    "weak|volatile|relaxed|acquire",
    f"global|const|param|param::entry|{_SHARED}",
    "nc",
    "ca|cg|cs|lu",
    "L2::64B|L2::128B|L2::256B",
    *_COMMON,
)
_STORES = ("weak|volatile|relaxed|release", f"global|{_SHARED}", "wb|cg|cs|wt", *_COMMON)


def _order(d: Decoded, parts: Sequence[str]) -> None:
    """What a memory access does to the order of others."""
    if "acquire" in parts or "acq_rel" in parts:
        d.flag("acquire")
    if "release" in parts or "acq_rel" in parts:
        d.flag("release")
    if any(part in ("relaxed", "acquire", "release", "acq_rel", "volatile") for part in parts):
        d.flag("strong")


def _load_store(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    d.op = OP[parts[0]]
    d.kind, d.bits = type_of(parts[-1:])
    d.count = vector(parts)
    d.space = space(parts)
    if "async" in parts:
        groups = ("async!", "weak", "shared::cluster!", "mbarrier::complete_tx::bytes!", "v2|v4")
        only(parts[1:], *groups, "b32|u32|s32|f32|b64|u64|s64|f64!")
        take(arguments, 3)
        if parts[0] != "st":
            raise KeyError("asynchronous")
        d.op = OP["st_async"]
        d.operands = [self.address(arguments[0]), *self.values(arguments[1], d.bits), self.address(arguments[2])]
        if len(d.operands) != d.count + 2 or d.bits * d.count > 128:
            raise KeyError("vector")
        return
    only(parts[1:], *(_LOADS if parts[0] == "ld" else _STORES))
    take(arguments, 3 if "L2::cache_hint" in parts else 2)
    _order(d, parts)
    if "nc" in parts:
        if d.space != SPACE["global"]:
            raise KeyError("nc")
        d.flag("nc")
    if parts[0] == "ld":
        d.operands = [*self.values(arguments[0], d.bits, wider=True), self.address(arguments[1])]
    else:
        d.operands = [self.address(arguments[0]), *self.values(arguments[1], d.bits, wider=True)]
    if len(d.operands) != d.count + 1 or d.bits * d.count > 256:
        raise KeyError("vector")
    self.cache_policy(d, parts, arguments)


_ATOMIC_TYPES = {
    "add": ("u32", "s32", "u64", "f32", "f64"),
    **dict.fromkeys(("min", "max"), ("u32", "s32", "u64", "s64")),
    **dict.fromkeys(("and", "or", "xor", "exch", "cas"), ("b32", "b64")),
    **dict.fromkeys(("inc", "dec"), ("u32",)),
}


def _atom(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    d.op = OP["atom"]
    d.kind, d.bits = type_of(parts[-1:])
    d.space = space(parts)
    name = next((part for part in parts[1:] if part in _ATOMIC_TYPES), "")
    order = "relaxed|acquire|release|acq_rel"
    only(
        parts[1:],
        order,
        _SCOPES,
        f"global|{_SHARED}",
        "|".join(_ATOMIC_TYPES) + "!",
        "|".join(_ATOMIC_TYPES[name]) + "!",
    )
    d.variant = NAMES["ATOMIC"][name + "_" if name in ("and", "or", "xor") else name]
    if parts[0] == "red":
        if name in ("exch", "cas"):
            raise KeyError(name)
        arguments = ["_", *arguments]
    take(arguments, 4 if name == "cas" else 3)
    _order(d, parts)
    d.flag("strong")
    d.operands = [self.value(arguments[0], d.bits), self.address(arguments[1])]
    d.operands += [self.value(argument, d.bits) for argument in arguments[2:4]]


HEADS: dict[str, Head] = {
    "cvta": _cvta,
    "mapa": _mapa,
    "ld": _load_store,
    "st": _load_store,
    "atom": _atom,
    "red": _atom,
}
"""By the first word of the opcode."""
