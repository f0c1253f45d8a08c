"""What a probe is: a PTX kernel of one launch, what its memory holds before, and how its text is put together."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np

ELEMENT_BYTES = {"u8": 1, "u16": 2, "u32": 4, "s32": 4, "f16": 2, "bf16": 2, "f32": 4}


@dataclasses.dataclass(frozen=True, eq=False)
class Buffer:
    """Global memory that a kernel is given a pointer to."""

    before: np.ndarray
    """What it holds before the launch."""
    written: bool = False
    """Whether the kernel writes it: what it holds afterwards is recorded."""


def output(count: int, dtype: type[np.generic] = np.uint32) -> Buffer:
    """Memory for results, filled with a pattern that a test would notice."""
    return Buffer(np.full(count * np.dtype(dtype).itemsize, 0xA5, np.uint8).view(dtype), written=True)


@dataclasses.dataclass(frozen=True, eq=False)
class TensorMap:
    """A tensor map (CUtensorMap) of a buffer, without interleave or element strides."""

    buffer: Buffer
    element: str
    """A key of `ELEMENT_BYTES`."""
    extents: tuple[int, ...]
    """In elements, the contiguous axis first."""
    strides: tuple[int, ...]
    """In bytes, of every axis but the first."""
    box: tuple[int, ...]
    swizzle: int = 0
    """Bytes of a row of the swizzle pattern: 0, 32, 64 or 128."""
    fill_nan: bool = False
    """Whether elements out of bounds read as NaN instead of zero."""

    @property
    def box_bytes(self) -> int:
        """Bytes of one box in shared memory."""
        return int(np.prod(self.box)) * ELEMENT_BYTES[self.element]


Argument: TypeAlias = Buffer | TensorMap | np.uint32 | np.uint64


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """One kernel, "probe", and one launch of it."""

    name: str
    ptx: str
    arguments: tuple[Argument, ...]
    threads: int
    blocks: int
    cluster: int
    shared_bytes: int
    expected: Mapping[int, np.ndarray] = dataclasses.field(default_factory=dict)
    """By argument, what the reading of the manuals says that written buffers hold: a check of the probe itself."""

    def buffers(self) -> Iterator[tuple[int, Buffer]]:
        """(argument, buffer) of every pointer."""
        return ((i, a) for i, a in enumerate(self.arguments) if isinstance(a, Buffer))

    def digest(self) -> str:
        """Of everything that determines the result: a record of anything else is out of date."""
        digest = hashlib.sha256(self.ptx.encode())
        digest.update(repr((self.threads, self.blocks, self.cluster, self.shared_bytes)).encode())
        for argument in self.arguments:
            match argument:
                case Buffer():
                    digest.update(np.ascontiguousarray(argument.before).tobytes())
                case TensorMap():
                    fields = {f.name: getattr(argument, f.name) for f in dataclasses.fields(argument)}
                    fields["buffer"] = [b for _, b in self.buffers()].index(argument.buffer)
                    digest.update(repr(fields).encode())
                case _:
                    digest.update(repr(int(argument)).encode())
        return digest.hexdigest()[:16]


_HEADER = """\
.version 8.6
.target sm_90a
.address_size 64

.extern .shared .align 1024 .b8 dynamic_shared[];

.visible .entry probe(
{parameters}
)
.reqntid {threads}, 1, 1
.minnctapersm 1
{{
	.reg .pred 	%p<32>;
	.reg .b16 	%h<32>;
	.reg .b32 	%r<64>;
	.reg .b64 	%d<64>;
	.reg .b64 	%a<16>;
	.reg .b32 	%s<16>;
	.reg .b32 	%f<256>;
	.reg .b32 	%thread, %lane, %base;

{prologue}
{body}
	ret;
}}
"""


def program(
    name: str,
    arguments: Sequence[Argument],
    body: str,
    *,
    threads: int = 32,
    shared_bytes: int = 0,
    cluster: int = 1,
    expected: Mapping[int, np.ndarray] | None = None,
) -> Program:
    """Puts a program together.

    The body finds pointers and the addresses of tensor maps in %a0, %a1, ..., and 32-bit scalars in %s0, %s1, ..., by
    the argument's place; %thread, %lane; and the address of dynamic shared memory in %base. It may use %p, %h (16-bit),
    %r (32-bit), %f (32-bit) and %d (64-bit) registers.

    Args:
      name: of the program.
      arguments: of the kernel.
      body: its instructions.
      threads: per block.
      shared_bytes: dynamic shared memory.
      cluster: blocks of the one cluster that is launched.
      expected: of the `Program`.

    Returns:
      The program.
    """
    parameters, prologue = [], []
    for i, argument in enumerate(arguments):
        match argument:
            case Buffer():
                parameters.append(f"\t.param .u64 .ptr .global .align 16 param_{i}")
                prologue.append(f"\tld.param.b64 \t%a{i}, [param_{i}];")
            case TensorMap():
                parameters.append(f"\t.param .align 64 .b8 param_{i}[128]")
                prologue += [f"\tmov.b64 \t%a{i}, param_{i};", f"\tcvta.param.u64 \t%a{i}, %a{i};"]
            case np.uint64():
                parameters.append(f"\t.param .u64 param_{i}")
                prologue.append(f"\tld.param.b64 \t%a{i}, [param_{i}];")
            case _:
                parameters.append(f"\t.param .u32 param_{i}")
                prologue.append(f"\tld.param.b32 \t%s{i}, [param_{i}];")
    prologue += [
        "\tmov.u32 \t%thread, %tid.x;",
        "\tmov.u32 \t%lane, %laneid;",
        "\tmov.b32 \t%base, dynamic_shared;",
    ]
    ptx = _HEADER.format(
        parameters=",\n".join(parameters), threads=threads, prologue="\n".join(prologue), body=body.strip("\n")
    )
    return Program(name, ptx, tuple(arguments), threads, cluster, cluster, shared_bytes, expected or {})


WAIT = """\
	{{
	.reg .pred 	waited;
	AGAIN:
	mbarrier.try_wait.parity.shared.b64 waited, [{barrier}], {parity}, 10000000;
	@waited bra.uni 	DONE;
	bra.uni 	AGAIN;
	DONE:
	}}
"""


def wait(barrier: str, parity: int | str = 0) -> str:
    """Instructions that wait until the phase of a parity is over."""
    return WAIT.format(barrier=barrier, parity=parity)


def copy_to_shared(source: str, offset: int, size: int, threads: int) -> str:
    """Instructions with which all threads copy bytes from global memory (%aN) to shared memory; 16-byte pieces."""
    return _copy(
        size,
        threads,
        f"COPY_IN_{offset}",
        lambda: (
            f"""\
	add.s64 	%d60, {source}, %d60;
	ld.global.v4.b32 	{{%r60, %r61, %r62, %r63}}, [%d60];
	add.s32 	%r58, %base, %r59;
	st.shared.v4.b32 	[%r58+{offset}], {{%r60, %r61, %r62, %r63}};"""
        ),
    )


def copy_from_shared(target: str, offset: int, size: int, threads: int) -> str:
    """Instructions with which all threads copy bytes from shared memory to global memory (%aN); 16-byte pieces."""
    return _copy(
        size,
        threads,
        f"COPY_OUT_{offset}",
        lambda: (
            f"""\
	add.s64 	%d60, {target}, %d60;
	add.s32 	%r58, %base, %r59;
	ld.shared.v4.b32 	{{%r60, %r61, %r62, %r63}}, [%r58+{offset}];
	st.global.v4.b32 	[%d60], {{%r60, %r61, %r62, %r63}};"""
        ),
    )


def _copy(size: int, threads: int, label: str, step: object) -> str:
    assert size % 16 == 0
    return f"""\
	shl.b32 	%r59, %thread, 4;
{label}:
	setp.ge.s32 	%p31, %r59, {size};
	@%p31 bra 	{label}_END;
	cvt.u64.u32 	%d60, %r59;
{step()}
	add.s32 	%r59, %r59, {16 * threads};
	bra.uni 	{label};
{label}_END:
"""  # type: ignore[operator]
