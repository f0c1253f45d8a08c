"""Decodes barriers, fences and bulk copies."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ptx_emulator.opcodes import NAMES
from ptx_emulator.operands import OP, Decoded, Head, Operand, Operands, only, space, take, type_of
from ptx_emulator.syntax import split_operands

_SCOPES = "cta|cluster|gpu|sys"
_SHARED = "shared|shared::cta|shared::cluster"


def _bar(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    if parts[1] == "cluster":
        what = "release|relaxed" if "arrive" in parts else "acquire"
        only(parts[2:], "arrive|wait!", what, "aligned")
        take(arguments, 0)
        d.op = OP["cluster_arrive" if "arrive" in parts else "cluster_wait"]
        if "relaxed" in parts:
            d.flag("relaxed")
        return
    if parts[1] == "warp":
        only(parts[2:], "sync!")
        take(arguments, 1)
        d.op = OP["bar_warp_sync"]
        d.operands = [self.value(arguments[0], 32)]
        return
    only(parts[1:], "cta", "sync|arrive!", "aligned" if parts[0] == "barrier" else "")
    if "arrive" in parts:
        take(arguments, 2)
    else:
        take(arguments, 1, 2)
    d.op = OP["bar_arrive" if "arrive" in parts else "bar_sync"]
    if parts[0] == "bar" or "aligned" in parts:
        d.flag("aligned")
    d.operands = [self.value(argument, 32) for argument in arguments]


_PROXY_SPACES = {"shared::cta": 1, "shared::cluster": 3, "global": 4}
_TENSOR_MAPS = 8
"""Bits: shared memory of the CTA, of others, global memory, tensor maps (`SpaceClass` in core/clocks.h)."""


def _fence(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    d.op = OP["fence"]
    if parts[0] == "membar":
        only(parts[1:], "cta|gl|sys!")
    elif parts[1] == "mbarrier_init":
        only(parts[2:], "release!", "cluster!")
        d.op = OP["fence_mbarrier_init"]
    elif parts[1] == "proxy" and "tensormap::generic" in parts:
        only(parts[2:], "tensormap::generic!", "acquire|release!", f"{_SCOPES}!")
        take(arguments, *((2,) if "acquire" in parts else (0,)))
        if "acquire" in parts:
            d.op, d.extra = OP["fence_proxy_async"], _TENSOR_MAPS
        return
    elif parts[1] == "proxy":
        only(parts[2:], "async|alias!", "|".join(_PROXY_SPACES) if "async" in parts else "")
        if "async" in parts:
            d.op = OP["fence_proxy_async"]
            d.extra = _PROXY_SPACES.get(parts[-1], 7)
    else:
        only(parts[1:], "sc|acq_rel|acquire|release!", f"{_SCOPES}!")
    take(arguments, 0)


def _mbarrier(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    what = parts[1]
    end = (_SHARED, "b64!")
    if "relaxed" in parts:
        d.flag("relaxed")
    if what in ("init", "inval"):
        only(parts[2:], *end)
        take(arguments, 2 if what == "init" else 1)
        d.op = OP[f"mbarrier_{what}"]
        d.operands = [self.address(arguments[0])] + [self.value(argument, 32) for argument in arguments[1:]]
    elif what in ("expect_tx", "complete_tx"):
        only(parts[2:], "relaxed", "cta|cluster", *end)
        take(arguments, 2)
        d.op = OP[f"mbarrier_{what}"]
        d.operands = [self.address(arguments[0]), self.value(arguments[1], 32)]
    elif what in ("arrive", "arrive_drop"):
        only(parts[2:], "expect_tx|noComplete", "release|relaxed", "cta|cluster", *end)
        d.op = OP["mbarrier_arrive"]
        if what == "arrive_drop":
            d.flag("drop")
        if "expect_tx" in parts:
            d.flag("expect_tx")
        if "noComplete" in parts:
            d.flag("no_complete")
        if arguments[0].startswith("["):
            arguments = ["_", *arguments]
        take(arguments, *((3,) if "expect_tx" in parts or "noComplete" in parts else (2, 3)))
        d.operands = [self.value(arguments[0], 64), self.address(arguments[1])]
        d.operands += [self.value(arguments[2] if len(arguments) > 2 else "1", 32)]
    elif what in ("try_wait", "test_wait"):
        only(parts[2:], "parity", "acquire|relaxed", "cta|cluster", *end)
        take(arguments, *((3, 4) if what == "try_wait" else (3,)))
        d.op = OP["mbarrier_wait"]
        if what == "try_wait":
            d.flag("suspends")
        width = 32 if "parity" in parts else 64
        d.operands = [self.value(arguments[0], 1), self.address(arguments[1]), self.value(arguments[2], width)]
    else:
        raise KeyError(what)


def _tensor_operand(self: Operands, text: str, dimensions: int) -> list[Operand]:
    """`[map, {coordinates}]`: the map's address, then the coordinates."""
    tensor_map, coordinates = split_operands(text[1:-1])
    values = self.values(coordinates, 32)
    if len(values) != dimensions:
        raise KeyError(f"{len(values)} coordinates")
    return [self.value(tensor_map, 64), *values]


def _bulk_tensor(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    dimensions = "1d|2d|3d|4d|5d!"
    d.count = int(next(part for part in parts if re.fullmatch(r"[1-5]d", part))[0])
    hint = "L2::cache_hint" in parts
    if parts[-1] == "bulk_group" or (hint and parts[-2] == "bulk_group"):
        reduces = parts[1] == "reduce"
        how = ("reduce!", "add|min|max!") if reduces else ()
        only(parts[1:], "async!", "bulk!", "tensor!", dimensions, "global!", "shared::cta!", "tile", "bulk_group!",
             "L2::cache_hint", *how)  # fmt: skip
        take(arguments, 3 if hint else 2)
        d.op = OP["tma_store"]
        if reduces:
            d.flag("reduce")
            d.variant = NAMES["ATOMIC"][next(part for part in parts if part in ("add", "min", "max"))]
        d.operands = [*_tensor_operand(self, arguments[0], d.count), self.address(arguments[1])]
    else:
        only(parts[1:], "async!", "bulk!", "tensor!", dimensions, "shared::cta|shared::cluster!", "global!", "tile",
             "mbarrier::complete_tx::bytes!", "multicast::cluster", "cta_group::1|cta_group::2",
             "L2::cache_hint")  # fmt: skip
        multicast = "multicast::cluster" in parts
        take(arguments, 3 + hint + multicast)
        d.op = OP["tma_load"]
        tensor = _tensor_operand(self, arguments[1], d.count)
        d.operands = [self.address(arguments[0]), *tensor, self.address(arguments[2])]
        if multicast:
            d.flag("multicast")
            d.operands.append(self.value(arguments[3], 16))
        if "cta_group::2" in parts:
            d.flag("pair")
    self.cache_policy(d, parts, arguments)


def _cp(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    if parts[1:3] not in (["async", "bulk"], ["reduce", "async"]):
        raise KeyError("not a bulk copy")
    if "commit_group" in parts:
        only(parts[1:], "async!", "bulk!", "commit_group!")
        take(arguments, 0)
        d.op = OP["bulk_commit"]
    elif "wait_group" in parts:
        only(parts[1:], "async!", "bulk!", "wait_group!", "read")
        take(arguments, 1)
        d.op = OP["bulk_wait"]
        if "read" in parts:
            d.flag("read")
        d.operands = [self.value(arguments[0], 32)]
    elif "tensor" in parts:
        _bulk_tensor(self, d, parts, arguments)
    elif parts[3].startswith("shared"):
        only(parts[3:], "shared::cta|shared::cluster!", "global!", "mbarrier::complete_tx::bytes!", "L2::cache_hint")
        take(arguments, 5 if "L2::cache_hint" in parts else 4)
        d.op = OP["bulk_load"]
        d.operands = [self.address(arguments[0]), self.address(arguments[1])]
        d.operands += [self.value(arguments[2], 32), self.address(arguments[3])]
        self.cache_policy(d, parts, arguments)
    else:
        only(parts[3:], "global!", "shared::cta!", "bulk_group!", "L2::cache_hint")
        take(arguments, 4 if "L2::cache_hint" in parts else 3)
        d.op = OP["bulk_store"]
        d.operands = [self.address(arguments[0]), self.address(arguments[1]), self.value(arguments[2], 32)]
        self.cache_policy(d, parts, arguments)


def _prefetch(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    take(arguments, 1)
    if "tensormap" not in parts:
        only(parts[1:], "global", "L1|L2|L2::evict_last|L2::evict_normal!")
        d.op = OP["nop"]
        return
    only(parts[1:], "param|const", "tensormap!")
    d.op = OP["prefetch_tensormap"]
    d.operands = [self.address(arguments[0])]


def _tensormap(self: Operands, d: Decoded, parts: Sequence[str], arguments: Sequence[str]) -> None:
    only(parts[1:3], "replace!", "tile!")
    only(parts[4:], "global|shared::cta", "b1024!", "b32|b64!")
    ordinal = parts[3] in ("box_dim", "global_dim", "global_stride", "element_stride")
    take(arguments, 3 if ordinal else 2)
    d.op = OP["tensormap_replace"]
    d.variant = NAMES["FIELD"][parts[3]]
    d.space = space(parts)
    d.kind, d.bits = type_of(parts)
    if ordinal:
        d.extra = int(arguments[1])
        if not 0 <= d.extra < (4 if parts[3] == "global_stride" else 5):
            raise KeyError("ordinal")
    d.operands = [self.address(arguments[0]), self.value(arguments[-1], d.bits)]


HEADS: dict[str, Head] = {
    "bar": _bar,
    "barrier": _bar,
    "fence": _fence,
    "membar": _fence,
    "mbarrier": _mbarrier,
    "cp": _cp,
    "prefetch": _prefetch,
    "tensormap": _tensormap,
}
"""By the first word of the opcode."""
