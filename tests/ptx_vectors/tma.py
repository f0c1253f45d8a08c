"""Boxes that the TMA unit loads, stores and adds: every rank, swizzle and element, in and out of bounds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from ptx_vectors.program import (
    ELEMENT_BYTES,
    Buffer,
    Program,
    TensorMap,
    copy_from_shared,
    copy_to_shared,
    output,
    program,
    wait,
)

THREADS = 128
_TILE = 1024
"""Where a box goes in shared memory; barriers lie before it."""


def swizzled(address: np.ndarray, swizzle: int) -> np.ndarray:
    """Where the swizzle pattern of a number of bytes puts a byte of shared memory."""
    return address ^ (((address >> 7) & (swizzle // 16 - 1)) << 4) if swizzle else address


def _box(tensor_map: TensorMap, at: Sequence[int], chunk: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each element of a box: its byte in the box and in the tensor, and whether it, or its chunk, is in bounds."""
    size = ELEMENT_BYTES[tensor_map.element]
    index = np.stack(np.meshgrid(*map(np.arange, tensor_map.box), indexing="ij")).reshape(len(tensor_map.box), -1)
    in_box = size * np.ravel_multi_index(tuple(index[::-1]), tensor_map.box[::-1])
    place = index + np.array(at)[:, None]
    first = place.copy()
    first[0] = place[0] * size // chunk * chunk // size
    inside = ((first >= 0) & (first < np.array(tensor_map.extents)[:, None])).all(0)
    strides = [size, *tensor_map.strides]
    byte = [sum(int(s) * int(p) for s, p in zip(strides, column, strict=True)) % 2**64 for column in place.T]
    return in_box, np.where(inside, np.array(byte, np.uint64), 0).astype(np.int64), inside


_NAN = {"bf16": b"\xf7\x7f"}
"""What fills a box where NaN is asked for: as an H200 does."""

_CHUNK = 16
"""Stores are clipped in whole pieces of so many bytes along the contiguous axis (seen on an H200)."""


def _instruction(
    tensor_map: TensorMap, at: Sequence[int], argument: int = 0, action: str = "load", to: str = ""
) -> str:
    """One TMA instruction, in the words that the compiled kernels use."""
    rank = len(tensor_map.box)
    coordinates = ", ".join(map(str, at))
    if action == "load":
        return (
            f"cp.async.bulk.tensor.{rank}d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
            f" [{to}], [%a{argument}, {{{coordinates}}}], [%base];"
        )
    operation = {"store": "cp.async", "add": "cp.reduce.async"}[action]
    add = ".add" if action == "add" else ""
    return (
        f"{operation}.bulk.tensor.{rank}d.global.shared::cta{add}.tile.bulk_group"
        f" [%a{argument}, {{{coordinates}}}], [{to}];"
    )


def load(name: str, tensor_map: TensorMap, at: Sequence[int], shift: int = 0) -> Program:
    """A box is loaded to shared memory that held a pattern, of which 2 KiB more than the box are copied out."""
    size = -(-tensor_map.box_bytes // 128) * 128 + 2048
    pattern = Buffer((np.arange(size // 4) * 0x01010101 ^ 0x5A000000).astype(np.uint32))
    body = f"""
{copy_to_shared("%a1", _TILE, size, THREADS)}
	setp.ne.b32 	%p0, %thread, 0;
	@%p0 bra 	READY;
	mov.b32 	%r0, 1;
	mbarrier.init.shared.b64 	[%base], %r0;
	fence.mbarrier_init.release.cluster;
READY:
	fence.proxy.async.shared::cta;
	bar.sync 	0;
	@%p0 bra 	ISSUED;
	mov.b32 	%r1, {tensor_map.box_bytes};
	mbarrier.arrive.expect_tx.shared.b64 	%d0, [%base], %r1;
	{_instruction(tensor_map, at, to=f"%base+{_TILE + shift}")}
ISSUED:
{wait("%base")}
{copy_from_shared("%a2", _TILE, size, THREADS)}
"""
    expected = pattern.before.view(np.uint8).copy()
    element = ELEMENT_BYTES[tensor_map.element]
    in_box, byte, inside = _box(tensor_map, at)
    data = tensor_map.buffer.before.view(np.uint8)
    fill = np.frombuffer(_NAN[tensor_map.element] if tensor_map.fill_nan else bytes(element), np.uint8)
    for i in range(element):
        target = swizzled(in_box + shift + i, tensor_map.swizzle)
        expected[target] = np.where(inside, data[byte + i * inside], fill[i])
    arguments = (tensor_map, pattern, output(size // 4), tensor_map.buffer)
    return program(
        f"load_{name}",
        arguments,
        body,
        threads=THREADS,
        shared_bytes=_TILE + size,
        expected={2: expected.view(np.uint32)},
    )


def store(
    name: str, tensor_map: TensorMap, at: Sequence[int], *, add: bool = False, whole_warp: bool = False
) -> Program:
    """A box of shared memory is stored, or added, to a tensor."""
    size = -(-tensor_map.box_bytes // 16) * 16
    rng = np.random.RandomState(len(name))
    element = tensor_map.element
    source = Buffer(_values(rng, element, size // ELEMENT_BYTES[element]).view(np.uint32))
    others = "setp.gt.u32 	%p0, %thread, 31;" if whole_warp else "setp.ne.b32 	%p0, %thread, 0;"
    body = f"""
{copy_to_shared("%a1", _TILE, size, THREADS)}
	fence.proxy.async.shared::cta;
	bar.sync 	0;
	{others}
	@%p0 bra 	STORED;
	{_instruction(tensor_map, at, action="add" if add else "store", to=f"%base+{_TILE}")}
	cp.async.bulk.commit_group;
	cp.async.bulk.wait_group.read 	0;
STORED:
	bar.sync 	0;
"""
    expected = {}
    if not add:
        result = tensor_map.buffer.before.view(np.uint8).copy()
        in_box, byte, inside = _box(tensor_map, at, _CHUNK)
        for i in range(ELEMENT_BYTES[element]):
            taken = swizzled(in_box + i, tensor_map.swizzle)
            result[(byte + i)[inside]] = source.before.view(np.uint8)[taken[inside]]
        expected = {2: result.view(tensor_map.buffer.before.dtype)}
    arguments = (tensor_map, source, tensor_map.buffer)
    kind = "add" if add else "store"
    return program(f"{kind}_{name}", arguments, body, threads=THREADS, shared_bytes=_TILE + size, expected=expected)


def _values(rng: np.random.RandomState, element: str, count: int) -> np.ndarray:
    """Random values of an element, as bytes; floats of every sign over a few binades, so that sums are rounded."""
    match element:
        case "f32":
            return (rng.randn(count) * 2.0 ** rng.randint(-6, 6, count)).astype(np.float32).view(np.uint8)
        case "f16":
            return (rng.randn(count) * 2.0 ** rng.randint(-4, 4, count)).astype(np.float16).view(np.uint8)
        case "bf16":
            wide = (rng.randn(count) * 2.0 ** rng.randint(-4, 4, count)).astype(np.float32)
            return (wide.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        case _:
            return rng.randint(0, 256, count * ELEMENT_BYTES[element], np.uint8)


def tensor(
    element: str, extents: Sequence[int], box: Sequence[int], *, pad: int = 0, written: bool = False, **fields: object
) -> TensorMap:
    """A tensor of random values, rows padded to 16 bytes and by `pad` bytes more."""
    size = ELEMENT_BYTES[element]
    row = -(-extents[0] * size // 16) * 16 + pad
    strides = [row * int(np.prod(extents[1:i])) for i in range(1, len(extents))]
    count = row * int(np.prod(extents[1:])) // size
    data = Buffer(_values(np.random.RandomState([count, len(box)]), element, count), written)
    return TensorMap(data, element, tuple(extents), tuple(strides), tuple(box), **fields)  # type: ignore[arg-type]


def _loads() -> Iterator[Program]:
    for swizzle in (0, 32, 64, 128):
        columns = swizzle // 2 or 64
        at = {
            "inside": (16, 3),
            "last_columns": (104 - columns // 2, 3),
            "last_rows": (16, 29),
            "before_the_first": (-8, -3),
            "corner": (104 - columns // 4, 36),
        }
        for name, place in at.items():
            yield load(
                f"bf16_swizzle_{swizzle}_{name}", tensor("bf16", (104, 40), (columns, 16), swizzle=swizzle), place
            )
        for shift in (128, 256, 512) if swizzle else (128,):
            yield load(
                f"bf16_swizzle_{swizzle}_at_{shift}",
                tensor("bf16", (104, 40), (columns, 12), swizzle=swizzle),
                (8, 2),
                shift,
            )
    for name, place in {"past_columns": (104, 0), "past_rows": (0, 40), "far": (2**31 - 64, -(2**31))}.items():
        yield load(f"nothing_{name}", tensor("bf16", (104, 40), (64, 8), swizzle=128), place)
    for element, columns in {"u8": 48, "u16": 24, "f16": 24, "u32": 12, "s32": 12, "f32": 12}.items():
        yield load(f"{element}", tensor(element, (3 * columns + columns // 3, 20), (columns, 8)), (3 * columns - 4, 14))
    yield load("f32_swizzle_128", tensor("f32", (70, 20), (32, 8), swizzle=128), (50, 15))
    yield load("u8_swizzle_64", tensor("u8", (170, 20), (64, 8), swizzle=64), (130, -2))
    yield load("padded_rows", tensor("bf16", (52, 20), (32, 8), pad=32, swizzle=64), (32, 6))
    yield load("fill_nan", tensor("bf16", (52, 20), (32, 8), swizzle=64, fill_nan=True), (32, 15))
    for column in (-8, -4, 1, 2, 4, 12):
        yield load(f"from_column_{column}", tensor("bf16", (52, 20), (32, 8), pad=16), (column, 3))
    yield load("last_chunk", tensor("bf16", (51, 20), (32, 8), pad=16, swizzle=64), (24, 3))
    yield load("rank_1", tensor("f32", (100,), (64,)), (68,))
    yield load("rank_3", tensor("bf16", (72, 10, 5), (64, 4, 3), swizzle=128), (16, 8, 3))
    yield load("rank_4", tensor("f16", (40, 6, 5, 4), (32, 2, 3, 2), swizzle=64), (16, 5, -1, 3))
    yield load("rank_5", tensor("u16", (24, 4, 3, 3, 3), (16, 2, 2, 2, 2), swizzle=32), (16, 3, 2, -1, 1))
    yield load("one_row", tensor("bf16", (136, 1), (64, 8), swizzle=128), (128, -2))


def ragged(rows: int, columns: int, box: Sequence[int]) -> TensorMap:
    """The view of a ragged operand in which the rows of any group end at the end of an axis.

    It has (column, 2^30 rows, turn, end); strides step back to the same address after 2^30 rows, modulo 2^64.
    """
    plain = tensor("bf16", (columns, rows), box)
    row = 2 * columns
    turn = 2**35 - row
    extents = (columns, 2**30, 2**31 - 1, 2**31 - 1)
    return TensorMap(plain.buffer, "bf16", extents, (row, turn, row), (*box, 1, 1), swizzle=128)


def _ragged_loads() -> Iterator[Program]:
    for first, size, column in ((0, 20, 0), (13, 40, 8), (50, 3, 32), (90, 1, 72), (5, 91, 0)):
        for tile in (0, 1):
            view = ragged(96, 104, (64, 16))
            at = (column, 2**30 - size + 16 * tile, 2**30, first + size)
            yield load(f"ragged_{first}_{size}_{tile}", view, at)


def _stores() -> Iterator[Program]:
    for swizzle in (0, 32, 64, 128):
        columns = swizzle // 2 or 32
        for name, place in {"inside": (8, 3), "end": (52 - columns // 2, 15), "start": (-8, -3)}.items():
            target = tensor("bf16", (52, 20), (columns, 8), pad=16, written=True, swizzle=swizzle)
            yield store(f"swizzle_{swizzle}_{name}", target, place)
    for column, row in ((-8, 3), (0, -3), (0, -8), (24, 15), (48, 3), (56, 3), (0, 20), (4, 3), (12, 3), (-4, 3)):
        target = tensor("bf16", (51, 20), (32, 8), pad=16, written=True)
        yield store(f"at_{column}_{row}", target, (column, row))
        yield store(f"bf16_at_{column}_{row}", target, (column, row), add=True)
    yield store("nothing", tensor("bf16", (52, 20), (32, 8), written=True), (52, 0))
    yield store("rank_3", tensor("f16", (40, 12, 3), (32, 8, 1), written=True, swizzle=64), (16, 8, 1))
    yield store("rank_4", tensor("f32", (20, 6, 3, 2), (16, 4, 2, 1), written=True), (8, 4, 2, 1))
    yield store("u8", tensor("u8", (52, 20), (32, 8), written=True), (36, -2))
    yield store("whole_warp", tensor("f32", (24, 12), (16, 8), written=True), (4, 2), whole_warp=True)
    for element, columns in {"f32": 16, "bf16": 32, "f16": 32, "s32": 16, "u32": 16}.items():
        target = tensor(element, (2 * columns + 8, 20), (columns, 8), written=True)
        yield store(element, target, (columns + 16, 14), add=True)
    yield store("swizzle_128", tensor("f32", (72, 20), (32, 16), written=True, swizzle=128), (8, 3), add=True)
    yield store("before", tensor("f32", (72, 20), (16, 16), written=True), (-4, -5), add=True)
    # The compiler leaves plain stores to a whole warp: is such an instruction one store, or one of each lane?
    yield store("whole_warp", tensor("s32", (24, 12), (16, 8), written=True), (4, 2), add=True, whole_warp=True)


def _counts() -> Program:
    """Three boxes, two of them partly out of bounds, complete a phase with the bytes of whole boxes, in any split."""
    view = tensor("bf16", (104, 40), (64, 16), swizzle=128)
    places = ((0, 0), (64, 32), (-64, 5))
    size = view.box_bytes
    loads = "\n".join(
        f"	{_instruction(view, place, to=f'%base+{_TILE + i * size}')}" for i, place in enumerate(places)
    )
    body = f"""
	setp.ne.b32 	%p0, %thread, 0;
	@%p0 bra 	READY;
	mov.b32 	%r0, 2;
	mbarrier.init.shared.b64 	[%base], %r0;
	fence.mbarrier_init.release.cluster;
READY:
	bar.sync 	0;
	@%p0 bra 	ISSUED;
	mov.b32 	%r1, {size + 16};
	mbarrier.arrive.expect_tx.shared.b64 	%d0, [%base], %r1;
{loads}
	mov.b32 	%r1, {2 * size - 16};
	mbarrier.arrive.expect_tx.shared.b64 	%d0, [%base], %r1;
ISSUED:
{wait("%base")}
{copy_from_shared("%a1", _TILE, 3 * size, THREADS)}
"""
    arguments = (view, output(3 * size // 4), view.buffer)
    return program("load_three_boxes", arguments, body, threads=THREADS, shared_bytes=_TILE + 3 * size)


def programs() -> Iterator[Program]:
    """Every program of this module."""
    seen = set()
    for probe in itertools.chain(_loads(), _ragged_loads(), _stores(), [_counts()]):
        assert probe.name not in seen, probe.name
        seen.add(probe.name)
        yield probe
