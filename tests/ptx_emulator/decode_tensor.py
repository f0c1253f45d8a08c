"""Decodes the tensor cores: their products, their memory, what moves matrices; and cluster launch control."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ptx_emulator.opcodes import NAMES
from ptx_emulator.operands import OP, REGISTER, Decoded, Head, Operands, only, space, take


def _matrix(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    d.op = OP[parts[0]]
    only(parts[1:], "sync!", "aligned!", "m8n8!", "x1|x2|x4!", "trans", "shared|shared::cta!", "b16!")
    take(arguments, 2)
    d.count = int(next(part for part in parts if part in ("x1", "x2", "x4"))[1:])
    if "trans" in parts:
        d.flag("trans")
    if parts[0] == "stmatrix":
        d.operands = [self.address(arguments[0]), *self.values(arguments[1], 32)]
    else:
        d.operands = [*self.values(arguments[0], 32), self.address(arguments[1])]
    if len(d.operands) != d.count + 1:
        raise KeyError("registers")


_DEPTHS = {**dict.fromkeys(("f16", "bf16"), 16), "tf32": 8, **dict.fromkeys(("e4m3", "e5m2"), 32)}
"""Of the contraction, by the format of the operands of a wgmma."""


def _wgmma(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    if parts[1] in ("fence", "commit_group", "wait_group"):
        only(parts[2:], "sync!", "aligned!")
        take(arguments, int(parts[1] == "wait_group"))
        d.op = OP[{"fence": "wgmma_fence", "commit_group": "wgmma_commit", "wait_group": "wgmma_wait"}[parts[1]]]
        d.operands = [self.value(argument, 32) for argument in arguments]
        return
    if parts[1] != "mma_async":
        raise KeyError(parts[1])
    d.op = OP["wgmma_mma"]
    only(parts[2:4], "sync!", "aligned!")
    shape, result, a, b = parts[4:]
    match = re.fullmatch(r"m64n(\d+)k(\d+)", shape)
    if not match:
        raise KeyError(shape)
    d.count, d.bits2 = int(match.group(1)), int(match.group(2))
    if d.count % 8 or not 8 <= d.count <= 256 or d.bits2 != _DEPTHS[a] or d.bits2 != _DEPTHS[b]:
        raise KeyError("shape")
    if result != "f32":
        raise KeyError("only float32 accumulators")
    if d.bits2 != 32 and a != b:
        raise KeyError("operands of two formats")
    take(arguments, 8 if d.bits2 == 16 else 6)
    d.kind, d.bits = "f", 32
    d.kind2, d.variant = NAMES["FORMAT"][a], NAMES["FORMAT"][b]
    accumulators = self.values(arguments[0], 32)
    if len(accumulators) != d.count // 2:
        raise KeyError("accumulators")
    self.accumulators |= {place for kind, place, _, _ in accumulators if kind == REGISTER}
    if arguments[1].startswith("{"):
        raise KeyError("A in registers")
    immediates = [int(argument) for argument in arguments[4:]]
    scale_a, scale_b, trans_a, trans_b = (*immediates, 0, 0)[:4]
    if abs(scale_a) != 1 or abs(scale_b) != 1 or trans_a not in (0, 1) or trans_b not in (0, 1):
        raise KeyError("immediates")
    d.extra = (scale_a < 0) | (scale_b < 0) << 1 | trans_a << 2 | trans_b << 3
    d.operands = [
        *accumulators,
        self.value(arguments[1], 64),
        self.value(arguments[2], 64),
        self.value(arguments[3], 1),
    ]


_GROUP = "cta_group::1|cta_group::2!"
_TCGEN05_PLAIN = {
    "relinquish_alloc_permit": ("tc_relinquish", (_GROUP, "sync!", "aligned!")),
    "wait::ld": ("tc_wait", ("sync!", "aligned!")),
    "wait::st": ("tc_wait", ("sync!", "aligned!")),
    "fence::before_thread_sync": ("tc_fence", ()),
    "fence::after_thread_sync": ("tc_fence", ()),
}


def _tcgen05(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    what = parts[1]
    if "cta_group::2" in parts:
        d.flag("pair")
    if what == "alloc":
        only(parts[2:], _GROUP, "sync!", "aligned!", "shared::cta", "b32!")
        take(arguments, 2)
        d.op = OP["tc_alloc"]
        d.space = space(parts)
        d.operands = [self.address(arguments[0]), self.value(arguments[1], 32)]
    elif what == "dealloc":
        only(parts[2:], _GROUP, "sync!", "aligned!", "b32!")
        take(arguments, 2)
        d.op = OP["tc_dealloc"]
        d.operands = [self.value(argument, 32) for argument in arguments]
    elif what in _TCGEN05_PLAIN:
        name, groups = _TCGEN05_PLAIN[what]
        only(parts[2:], *groups)
        take(arguments, 0)
        d.op = OP[name]
        d.variant = int(what == "wait::st")
    elif what == "commit":
        multicast = "multicast::cluster" in parts
        only(parts[2:], _GROUP, "mbarrier::arrive::one!", "shared::cluster", "multicast::cluster", "b64!")
        take(arguments, 1 + multicast)
        d.op = OP["tc_commit"]
        d.operands = [self.address(arguments[0])]
        if multicast:
            d.flag("multicast")
            d.operands.append(self.value(arguments[1], 16))
    elif what == "cp":
        only(parts[2:], _GROUP, "32x128b!", "warpx4!")
        take(arguments, 2)
        d.op = OP["tc_cp"]
        d.operands = [self.address(arguments[0]), self.value(arguments[1], 64)]
    elif what in ("ld", "st"):
        _tcgen05_load_store(self, d, parts, arguments)
    elif what == "mma":
        _tcgen05_mma(self, d, parts, arguments)
    else:
        raise KeyError(what)


def _tcgen05_load_store(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    what = parts[1]
    d.op = OP[f"tc_{what}"]
    shapes = "|".join(name[1:] for name in NAMES["TMEM_SHAPE"])
    repeats = "|".join(f"x{1 << i}" for i in range(8))
    pack = "pack::16b" if what == "ld" else "unpack::16b"
    only(parts[2:], "sync!", "aligned!", f"{shapes}!", f"{repeats}!", pack, "b32!")
    shape = next(part for part in parts if f"x{part}" in NAMES["TMEM_SHAPE"])
    take(arguments, 3 if shape == "16x32bx2" else 2)
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
    times = int(next(part for part in parts if re.fullmatch(r"x\d+", part))[1:])
    if d.count != times * {"16x128b": 2, "16x256b": 4}.get(shape, 1):
        raise KeyError(f"{d.count} registers")


def _tcgen05_mma(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    d.op = OP["tc_mma"]
    scaled = "block_scale" in parts
    sizes = "block16|block32|scale_vec::1X|scale_vec::2X|scale_vec::4X!"
    uses = "|".join(f"collector::a::{use}" for use in ("fill", "use", "lastuse", "discard"))
    kinds = "|".join(f"kind::{name}" for name in NAMES["KIND"])
    only(parts[2:], _GROUP, f"{kinds}!", *(("block_scale!", sizes) if scaled else ()), uses)
    take(arguments, *((7,) if scaled else (5, 6)))
    d.variant = NAMES["KIND"][next(part for part in parts if part.startswith("kind::"))[6:]]
    d.operands = [self.address(arguments[0])]
    if arguments[1].startswith("["):
        d.flag("a_in_tmem")
        d.operands.append(self.address(arguments[1]))
    else:
        d.operands.append(self.value(arguments[1], 64))
    d.operands += [self.value(arguments[2], 64), self.value(arguments[3], 32)]
    rest = list(arguments[4:])
    if scaled:
        blocks = [
            part for part in parts if part in ("block16", "block32", "scale_vec::1X", "scale_vec::2X", "scale_vec::4X")
        ]
        size = {"block16": 16, "block32": 32, "scale_vec::1X": 32, "scale_vec::2X": 32, "scale_vec::4X": 16}
        d.extra = size[blocks[0]]
        d.operands += [self.value(rest[2], 1), self.address(rest[0]), self.address(rest[1])]
        return
    disabled = self.values(rest.pop(0), 32) if rest[0].startswith("{") else []
    if len(rest) != 1 or (disabled and len(disabled) != (8 if "cta_group::2" in parts else 4)):
        raise KeyError("scale-input-d, or lanes")
    d.count = len(disabled)
    d.operands += [self.value(rest[0], 1), *disabled]


def _clc(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    if parts[1] == "try_cancel":
        multicast = "multicast::cluster::all"
        only(parts[2:], "async!", "shared::cta", "mbarrier::complete_tx::bytes!", multicast, "b128!")
        take(arguments, 2)
        d.op = OP["clc_try_cancel"]
        if multicast in parts:
            d.flag("multicast")
        d.operands = [self.address(arguments[0]), self.address(arguments[1])]
        return
    take(arguments, 2)
    if "is_canceled" in parts:
        only(parts[1:], "query_cancel!", "is_canceled!", "pred!", "b128!")
        d.op = OP["clc_is_canceled"]
        d.operands = [self.value(arguments[0], 1), self.value(arguments[1], 128)]
    else:
        axes = "|".join(f"get_first_ctaid::{axis}" for axis in "xyz")
        only(parts[1:], "query_cancel!", f"{axes}!", "b32!", "b128!")
        d.op = OP["clc_first_ctaid"]
        axis = next(part for part in parts if part.startswith("get_first_ctaid"))
        d.extra = "xyz".index(axis[-1])
        d.operands = [self.value(arguments[0], 32), self.value(arguments[1], 128)]


HEADS: dict[str, Head] = {
    "stmatrix": _matrix,
    "ldmatrix": _matrix,
    "wgmma": _wgmma,
    "tcgen05": _tcgen05,
    "clusterlaunchcontrol": _clc,
}
"""By the first word of the opcode."""
