"""Decodes barriers, fences, bulk copies and the tensor cores."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ptx_emulator.opcodes import NAMES
from ptx_emulator.operands import OP, REGISTER, Decoded, Head, Operand, Operands, space, type_of
from ptx_emulator.syntax import split_operands


def _bar(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    if parts[1] == "cluster":
        d.op = OP["cluster_arrive" if parts[2] == "arrive" else "cluster_wait"]
        if "relaxed" in parts:
            d.flag("relaxed")
        return
    if parts[1] == "warp":
        d.op = OP["bar_warp_sync"]
        d.operands = [self.value(arguments[0], 32)]
        return
    what = "sync" if "sync" in parts else "arrive"
    if "red" in parts:
        raise KeyError("red")
    d.op = OP[f"bar_{what}"]
    d.operands = [self.value(argument, 32) for argument in arguments]


def _fence(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    if "mbarrier_init" in parts:
        d.op = OP["fence_mbarrier_init"]
    elif "proxy" in parts and "async" in parts:
        d.op = OP["fence_proxy_async"]
    else:
        d.op = OP["fence"]


def _mbarrier(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    what = parts[1]
    if "relaxed" in parts:
        d.flag("relaxed")
    if what in ("init", "inval"):
        d.op = OP[f"mbarrier_{what}"]
        d.operands = [self.address(arguments[0])] + [self.value(argument, 32) for argument in arguments[1:]]
    elif what in ("expect_tx", "complete_tx"):
        d.op = OP[f"mbarrier_{what}"]
        d.operands = [self.address(arguments[0]), self.value(arguments[1], 32)]
    elif what in ("arrive", "arrive_drop"):
        d.op = OP["mbarrier_arrive"]
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
        d.op = OP["mbarrier_wait"]
        if len(arguments) > 3:
            d.flag("looped")
        width = 32 if "parity" in parts else 64
        d.operands = [self.value(arguments[0], 1), self.address(arguments[1]), self.value(arguments[2], width)]
    else:
        raise KeyError(what)


def _tensor_operand(self: Operands, text: str) -> list[Operand]:
    """`[map, {coordinates}]`: the map's address, then the coordinates."""
    inner = split_operands(text[1:-1])
    return [self.value(inner[0], 64), *self.values(inner[1], 32)]


_SILENT = ("tile", "bulk_group", "mbarrier::complete_tx::bytes", "L2::cache_hint", "cta_group::1", "async", "bulk")


def _bulk_tensor(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    d.count = int(next(part for part in parts if re.fullmatch(r"[1-5]d", part))[0])
    for part in parts[1:]:
        ok = part in _SILENT or part.startswith("shared") or part in ("tensor", "global", "reduce", "add", "min", "max")
        if not ok and not re.fullmatch(r"[1-5]d", part) and part not in ("multicast::cluster", "cta_group::2"):
            raise KeyError(part)
    if parts.index("global") < next(i for i, part in enumerate(parts) if part.startswith("shared")):
        d.op = OP["tma_store"]
        if parts[1] == "reduce":
            d.flag("reduce")
            d.variant = NAMES["ATOMIC"][next(part for part in parts if part in ("add", "min", "max"))]
        d.operands = [*_tensor_operand(self, arguments[0]), self.address(arguments[1])]
        return
    d.op = OP["tma_load"]
    d.operands = [self.address(arguments[0]), *_tensor_operand(self, arguments[1]), self.address(arguments[2])]
    if "multicast::cluster" in parts:
        d.flag("multicast")
        d.operands.append(self.value(arguments[3], 32))
    if "cta_group::2" in parts:
        d.flag("pair")


def _cp(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    if "commit_group" in parts:
        d.op = OP["bulk_commit"]
    elif "wait_group" in parts:
        d.op = OP["bulk_wait"]
        if "read" in parts:
            d.flag("read")
        d.operands = [self.value(arguments[0], 32)]
    elif "tensor" in parts:
        _bulk_tensor(self, d, parts, arguments)
    elif parts[:3] == ["cp", "async", "bulk"] and "multicast::cluster" not in parts:
        if parts[3].startswith("shared") and parts[4] == "global":
            d.op = OP["bulk_load"]
            d.operands = [self.address(arguments[0]), self.address(arguments[1])]
            d.operands += [self.value(arguments[2], 32), self.address(arguments[3])]
        elif parts[3] == "global":
            d.op = OP["bulk_store"]
            d.operands = [self.address(arguments[0]), self.address(arguments[1]), self.value(arguments[2], 32)]
        else:
            raise KeyError("bulk")
    else:
        raise KeyError("cp")


def _prefetch(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    if "tensormap" not in parts:
        d.op = OP["nop"]
        return
    d.op = OP["prefetch_tensormap"]
    d.operands = [self.address(arguments[0])]


def _tensormap(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    d.op = OP["tensormap_replace"]
    d.variant = NAMES["FIELD"][parts[3]]
    d.space = space(parts)
    d.kind, d.bits = type_of(parts)
    if len(arguments) > 2:
        d.extra = int(arguments[1])
    d.operands = [self.address(arguments[0]), self.value(arguments[-1], d.bits)]


def _matrix(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    d.op = OP[parts[0]]
    if "m8n8" not in parts or "b16" not in parts:
        raise KeyError("shape")
    d.count = int(next(part for part in parts if part in ("x1", "x2", "x4"))[1:])
    if "trans" in parts:
        d.flag("trans")
    if parts[0] == "stmatrix":
        d.operands = [self.address(arguments[0]), *self.values(arguments[1], 32)]
    else:
        d.operands = [*self.values(arguments[0], 32), self.address(arguments[1])]


def _wgmma(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    if parts[1] in ("fence", "commit_group", "wait_group"):
        d.op = OP[{"fence": "wgmma_fence", "commit_group": "wgmma_commit", "wait_group": "wgmma_wait"}[parts[1]]]
        d.operands = [self.value(argument, 32) for argument in arguments]
        return
    if parts[1] != "mma_async":
        raise KeyError(parts[1])
    d.op = OP["wgmma_mma"]
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
    self.accumulators |= {place for kind, place, _, _ in accumulators if kind == REGISTER}
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


_TCGEN05_PLAIN = {
    "relinquish_alloc_permit": "tc_relinquish",
    "wait::ld": "tc_wait",
    "wait::st": "tc_wait",
    "fence::before_thread_sync": "tc_fence",
    "fence::after_thread_sync": "tc_fence",
}


def _tcgen05(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    what = parts[1]
    if "cta_group::2" in parts:
        d.flag("pair")
    if what == "alloc":
        d.op = OP["tc_alloc"]
        d.space = space(parts)
        d.operands = [self.address(arguments[0]), self.value(arguments[1], 32)]
    elif what == "dealloc":
        d.op = OP["tc_dealloc"]
        d.operands = [self.value(argument, 32) for argument in arguments]
    elif what in _TCGEN05_PLAIN:
        d.op = OP[_TCGEN05_PLAIN[what]]
        d.variant = int(what == "wait::st")
    elif what == "commit":
        d.op = OP["tc_commit"]
        d.operands = [self.address(arguments[0])]
        if "multicast::cluster" in parts:
            d.flag("multicast")
            d.operands.append(self.value(arguments[1], 32))
    elif what == "cp":
        d.op = OP["tc_cp"]
        if "32x128b" not in parts or "warpx4" not in parts:
            raise KeyError("shape")
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


def _tcgen05_mma(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    d.op = OP["tc_mma"]
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


def _clc(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    if parts[1] == "try_cancel":
        d.op = OP["clc_try_cancel"]
        if any(part.startswith("multicast") for part in parts):
            d.flag("multicast")
        d.operands = [self.address(arguments[0]), self.address(arguments[1])]
    elif "is_canceled" in parts:
        d.op = OP["clc_is_canceled"]
        d.operands = [self.value(arguments[0], 1), self.value(arguments[1], 128)]
    else:
        d.op = OP["clc_first_ctaid"]
        axis = next(part for part in parts if part.startswith("get_first_ctaid"))
        d.extra = "xyz".index(axis[-1])
        d.operands = [self.value(arguments[0], 32), self.value(arguments[1], 128)]


HEADS: dict[str, Head] = {
    "bar": _bar,
    "barrier": _bar,
    "fence": _fence,
    "membar": _fence,
    "mbarrier": _mbarrier,
    "cp": _cp,
    "prefetch": _prefetch,
    "tensormap": _tensormap,
    "stmatrix": _matrix,
    "ldmatrix": _matrix,
    "wgmma": _wgmma,
    "tcgen05": _tcgen05,
    "clusterlaunchcontrol": _clc,
}
"""By the first word of the opcode."""
