"""Warpgroup products: operands in every canonical layout, shapes, signs, and how sums are rounded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from ptx_vectors.program import Buffer, Program, copy_to_shared, output, program
from ptx_vectors.tma import swizzled

M, STEP = 64, 16
_LAYOUT_BITS = {0: 0, 128: 1, 64: 2, 32: 3}


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a (rows, k) operand of 16-bit elements lies in shared memory."""

    k_major: bool
    swizzle: int

    def _strides(self, rows: int, depth: int) -> tuple[int, int]:
        """(leading, stride) byte offsets of the descriptor."""
        pitch = self.swizzle
        if self.k_major:
            return (16, 8 * pitch) if pitch else (16 * rows, 128)
        if pitch:
            return depth * pitch, 8 * pitch  # blocks of rows lie behind each other, k runs within
        return 128, 16 * depth

    def offsets(self, rows: int, depth: int) -> np.ndarray:
        """The byte of each element, (rows, depth), swizzled."""
        leading, stride = self._strides(rows, depth)
        mn, k = np.meshgrid(np.arange(rows), np.arange(depth), indexing="ij")
        pitch = self.swizzle
        if self.k_major and pitch:
            per = pitch // 2  # elements of k in a row of the pattern
            byte = mn % 8 * pitch + mn // 8 * stride + k % per * 2 + k // per * (rows * pitch)
        elif self.k_major:
            byte = mn % 8 * 16 + mn // 8 * stride + k // 8 * leading + k % 8 * 2
        elif pitch:
            per = pitch // 2
            byte = mn % per * 2 + k % 8 * pitch + k // 8 * stride + mn // per * leading
        else:
            byte = mn % 8 * 2 + k % 8 * 16 + mn // 8 * stride + k // 8 * leading
        return swizzled(byte, pitch)

    def descriptor(self, rows: int, depth: int) -> int:
        """The matrix descriptor, without a start address."""
        leading, stride = self._strides(rows, depth)
        return leading >> 4 << 16 | stride >> 4 << 32 | _LAYOUT_BITS[self.swizzle] << 62

    def step(self, index: int, rows: int, depth: int) -> int:
        """By how many bytes the start address moves to a step of 16 along k."""
        k = STEP * index
        leading, stride = self._strides(rows, depth)
        if self.k_major and self.swizzle:
            per = self.swizzle // 2
            return k % per * 2 + k // per * (rows * self.swizzle)
        if self.k_major:
            return k // 8 * leading
        return k // 8 * (stride if self.swizzle else leading)


def _bits(values: np.ndarray, element: str) -> np.ndarray:
    if element == "f16":
        return values.astype(np.float16).view(np.uint16)
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def _image(values: np.ndarray, element: str, layout: Layout) -> np.ndarray:
    """Shared memory that holds an operand."""
    offsets = layout.offsets(*values.shape)
    image = np.zeros(-(-(offsets.max() + 2) // 1024) * 512, np.uint16)
    image[offsets // 2] = _bits(values, element)
    return image


@dataclasses.dataclass(frozen=True)
class Case:
    """A product of one tile."""

    name: str
    a: np.ndarray
    """(64, k)"""
    b: np.ndarray
    """(n, k)"""
    element: str = "bf16"
    layouts: tuple[Layout, Layout] = (Layout(True, 128), Layout(True, 128))
    initial: np.ndarray | None = None
    """(64, n) in the accumulators beforehand; without it, the first step does not accumulate."""
    signs: tuple[int, int] = (1, 1)
    groups: int = 1
    """Steps are committed in as many groups."""
    exact: bool = True


def _place(n: int) -> tuple[np.ndarray, np.ndarray]:
    """(row, column) of each accumulator, (thread, register)."""
    thread, register = np.meshgrid(np.arange(128), np.arange(n // 2), indexing="ij")
    row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (register >> 1 & 1)
    return row, 8 * (register >> 2) + 2 * (thread % 4) + (register & 1)


def _program(case: Case) -> Program:
    n, depth = case.b.shape
    a, b = (_image(v, case.element, layout) for v, layout in zip((case.a, case.b), case.layouts, strict=True))
    registers = n // 2
    row, column = _place(n)
    initial = np.zeros((M, n), np.float32) if case.initial is None else case.initial.astype(np.float32)
    accumulators = ", ".join(f"%f{i}" for i in range(registers))
    loads = "\n".join(f"	ld.global.b32 	%f{i}, [%d1+{4 * i}];" for i in range(registers))
    stores = "\n".join(f"	st.global.b32 	[%d2+{4 * i}], %f{i};" for i in range(registers))
    steps = []
    for i in range(depth // STEP):
        accumulate = int(i > 0 or case.initial is not None)
        for j, (layout, rows) in enumerate(zip(case.layouts, (M, n), strict=True)):
            steps.append(f"	add.s64 	%d{6 + j}, %d{4 + j}, {layout.step(i, rows, depth) >> 4};")
        transposed = ", ".join(str(int(not layout.k_major)) for layout in case.layouts)
        steps.append(
            f"	setp.ne.b32 	%p1, %r2, {1 - accumulate};\n"
            f"	wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{case.element}.{case.element} {{{accumulators}}},"
            f" %d6, %d7, %p1, {case.signs[0]}, {case.signs[1]}, {transposed};"
        )
        if (i + 1) % max(1, depth // STEP // case.groups) == 0:
            steps.append("	wgmma.commit_group.sync.aligned;")
    all_steps = "\n".join(steps)
    body = f"""
{copy_to_shared("%a0", 0, a.nbytes, 128)}
{copy_to_shared("%a1", a.nbytes, b.nbytes, 128)}
	mul.wide.u32 	%d0, %thread, {4 * registers};
	add.s64 	%d1, %a2, %d0;
	add.s64 	%d2, %a3, %d0;
{loads}
	shr.u32 	%r0, %base, 4;
	cvt.u64.u32 	%d3, %r0;
	or.b64 	%d4, %d3, %a4;
	add.s64 	%d3, %d3, {a.nbytes >> 4};
	or.b64 	%d5, %d3, %a5;
	mov.b32 	%r2, 1;
	fence.proxy.async.shared::cta;
	bar.sync 	0;
	wgmma.fence.sync.aligned;
{all_steps}
	wgmma.wait_group.sync.aligned 	0;
{stores}
"""
    arguments = (
        Buffer(a),
        Buffer(b),
        Buffer(initial[row, column]),
        output(128 * registers, np.float32),
        np.uint64(case.layouts[0].descriptor(M, depth)),
        np.uint64(case.layouts[1].descriptor(n, depth)),
    )
    expected = {}
    if case.exact:
        product = initial + case.signs[0] * case.signs[1] * (case.a @ case.b.T)
        expected = {3: product.astype(np.float32)[row, column]}
    return program(
        f"wgmma_{case.name}",
        arguments,
        body,
        threads=128,
        shared_bytes=a.nbytes + b.nbytes,
        expected=expected,
    )


def _integers(n: int, depth: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Operands whose sums are exact in float32."""
    rng = np.random.RandomState(seed)
    return rng.randint(-8, 9, (M, depth)).astype(np.float64), rng.randint(-8, 9, (n, depth)).astype(np.float64)


def _layout_name(layout: Layout) -> str:
    return f"{'k' if layout.k_major else 'mn'}{layout.swizzle}"


def _exact() -> Iterator[Case]:
    for n in (8, 16, 24, 32, 64, 96, 128, 192, 256):
        yield Case(f"n{n}", *_integers(n, 64, n))
    for swizzle in (0, 32, 64, 128):
        for k_major in (True, False):
            layout = Layout(k_major, swizzle)
            other = Layout(True, 128)
            yield Case(f"a_{_layout_name(layout)}", *_integers(32, 64, 1), layouts=(layout, other))
            yield Case(f"b_{_layout_name(layout)}", *_integers(128, 64, 2), "f16", layouts=(other, layout))
    both = Layout(False, 128)
    yield Case("both_mn128", *_integers(256, 64, 3), layouts=(both, both))
    yield Case("both_mn128_f16", *_integers(128, 64, 4), "f16", layouts=(both, both))
    a, b = _integers(32, 32, 5)
    initial = np.random.RandomState(6).randint(-1000, 1000, (M, 32)).astype(np.float64)
    yield Case("accumulates", a, b, initial=initial)
    yield Case("minus_a", a, b, initial=initial, signs=(-1, 1))
    yield Case("minus_b", a, b, "f16", initial=initial, signs=(1, -1))
    yield Case("minus_both", a, b, initial=initial, signs=(-1, -1))
    yield Case("four_groups", *_integers(64, 128, 7), layouts=(Layout(True, 64), Layout(False, 64)), groups=4)


def _rounded() -> Iterator[Case]:
    """Sums of which float32 does not hold every bit: what hardware does with the rest."""
    power = 2.0 ** -np.arange(64)

    def terms(*rows: tuple[int, np.ndarray | float, np.ndarray | float]) -> tuple[np.ndarray, np.ndarray]:
        a, b = np.zeros((M, STEP)), np.zeros((32, STEP))
        for k, of_row, of_column in rows:
            a[:, k], b[:, k] = of_row, of_column
        return a, b

    m, n = power[:M] * 2.0**16, power[:32] * 2.0**-16  # products 2^-(m + n), as exponents of bf16
    yield Case("one_plus_small", *terms((0, 1, 1), (1, m, n)), exact=False)
    yield Case("one_minus_small", *terms((0, 1, 1), (1, m, -n)), exact=False)
    yield Case("one_plus_small_far", *terms((0, 1, 1), (15, m, n)), exact=False)
    yield Case("small_before_one", *terms((15, 1, 1), (0, m, n)), exact=False)
    yield Case("two_small", *terms((0, 1, 1), (1, m, n), (2, m, n)), exact=False)
    yield Case("two_small_apart", *terms((0, 1, 1), (3, m, n), (12, m, n)), exact=False)
    yield Case("three_small", *terms((0, 1, 1), (1, m, n), (2, m, n), (9, m, n)), exact=False)
    yield Case("many_small", *terms((0, 1, 1), *((k, m, n) for k in range(1, 16))), exact=False)
    yield Case("cancelled", *terms((0, 1, 1), (1, m, n), (2, -1, 1)), exact=False)
    yield Case("cancelled_apart", *terms((0, 1, 1), (7, m, n), (15, -1, 1)), exact=False)
    yield Case("odd_mantissa", *terms((0, 1.9921875, 1.9921875), (1, 1.5 * m, 1.25 * n)), exact=False)
    ones = np.ones((M, 32))
    yield Case("on_one", *terms((0, m, n)), initial=ones, exact=False)
    yield Case("on_one_two", *terms((0, m, n), (8, m, n)), initial=ones, exact=False)
    yield Case("on_minus_one", *terms((0, m, n)), initial=-ones, exact=False)
    yield Case("small_on_product", *terms((0, 1, 1)), initial=np.outer(m, n), exact=False)
    yield Case("small_on_product_minus", *terms((0, 1, 1)), initial=-np.outer(m, n), exact=False)
    yield Case(
        "large_initial", *terms((0, 1.5, 1.0)), initial=np.outer(power[:M][::-1][:M], 1 / power[:32]), exact=False
    )
    tiny = np.outer(power, power[:32])
    yield Case(
        "denormal",
        *terms((0, 2.0**-100 * np.ones(M), 2.0**-20 * power[:32])),
        initial=tiny * 2.0**-100,
        exact=False,
    )
    yield from _special()
    for element, seed in (("bf16", 8), ("f16", 9)):
        rng = np.random.RandomState(seed)
        a, b = rng.randn(M, 64), rng.randn(32, 64)
        if element == "bf16":
            a, b = (
                ((v.astype(np.float32).view(np.uint32) >> 16) << 16).view(np.float32).astype(np.float64) for v in (a, b)
            )
        else:
            a, b = (v.astype(np.float16).astype(np.float64) for v in (a, b))
        yield Case(
            f"normal_{element}_one_step", a[:, :STEP], b[:, :STEP], element, (Layout(True, 32),) * 2, exact=False
        )
        yield Case(f"normal_{element}", a, b, element, exact=False)
        wide = 2.0 ** rng.randint(-6, 7, (M, 64))
        yield Case(f"wide_{element}", a * wide, b, element, initial=rng.randn(M, 32), exact=False)


def _special() -> Iterator[Case]:
    """Infinities, NaN, sums past the largest float32, denormal operands and zeros of either sign."""
    values = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 2.0**127, -(2.0**127), 2.0**-126, 2.0**-130, -(2.0**-133)]
    a, b = np.zeros((M, STEP)), np.zeros((32, STEP))
    for i in range(M):
        a[i, 0], a[i, 9] = values[i % 12], values[i // 12]
    for j in range(32):
        b[j, 0], b[j, 9] = values[j % 12], (1.0, 0.0, -0.0)[j // 12]
    yield Case("special", a, b, exact=False)
    initial = np.array([values[(i + j) % 12] for i in range(M) for j in range(32)]).reshape(M, 32)
    yield Case("special_initial", a, b, initial=initial, exact=False)
    largest = float(np.finfo(np.float32).max)
    a, b = np.zeros((M, STEP)), np.ones((32, STEP))
    a[:, 0] = 2.0 ** (np.arange(M) + 64.0)
    b[:, 0] = 2.0 ** np.arange(32)
    yield Case("overflow", a, b, initial=np.full((M, 32), largest), exact=False)
    yield Case("overflow_minus", -a, b, initial=np.full((M, 32), -largest), exact=False)
    halves = [0.0, 2.0**-24, 2.0**-20, 1023 * 2.0**-24, -(2.0**-24), 2.0**-14, 65504.0, np.inf]
    a, b = np.zeros((M, STEP)), np.zeros((32, STEP))
    for i in range(M):
        a[i, 0], a[i, 3] = halves[i % 8], halves[i // 8]
    for j in range(32):
        b[j, 0], b[j, 3] = halves[j % 8], (1.0, 2.0**-24, -65504.0, 2.0**-15)[j // 8]
    yield Case("special_f16", a, b, "f16", exact=False)


def programs() -> Iterator[Program]:
    """Every program of this module."""
    for case in _exact():
        yield _program(case)
    for case in _rounded():
        yield _program(case)
