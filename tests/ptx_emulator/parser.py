"""From the text of a PTX module to the arrays that the core executes.

A kernel becomes a list of instructions with fixed fields (see core/program.h), a list of operands, and the constants.
Registers have a place in a warp's register file: 32 lanes of 4 bytes, of 8 bytes, or a mask for predicates.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import struct
from collections.abc import Iterator

import numpy as np

from ptx_emulator.decoder import Decoder
from ptx_emulator.opcodes import NAMES
from ptx_emulator.syntax import UnsupportedInstructionError, split_operands

RESERVED_SHARED = 0x400
"""The first bytes of the shared window belong to the system: seen on an H200."""


@dataclasses.dataclass(frozen=True)
class Param:
    """One .param of a kernel."""

    name: str
    offset: int
    size: int
    kind: str
    """Of its type: b, u, s or f."""


@dataclasses.dataclass
class Statement:
    """One instruction as text."""

    line: int
    text: str
    scope: int
    used_bytes: int = 0
    """Of a load: which bytes of it are used, or 0 for all (.pragma "used_bytes_mask")."""


@dataclasses.dataclass
class Kernel:
    """One decoded entry of a module."""

    name: str
    target: str
    params: list[Param]
    reqntid: tuple[int, ...]
    static_shared: int
    min_ctas: int = 1
    """Of a multiprocessor (.minnctapersm)."""
    maxntid: tuple[int, ...] = ()
    reqnctapercluster: tuple[int, ...] = ()
    statements: list[Statement] = dataclasses.field(default_factory=list)
    instructions: list[list[int]] = dataclasses.field(default_factory=list)
    operands: list[tuple[int, int, int, int]] = dataclasses.field(default_factory=list)
    register_bytes: int = 0
    constants: bytearray = dataclasses.field(default_factory=bytearray)
    param_constants: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    """(offset in the constants, bits, offset in the parameters): addresses of parameters, known at a launch."""
    specials: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    """(special register, place in the register file, bits)."""
    tracked: dict[int, int] = dataclasses.field(default_factory=dict)
    """Operands that are registers which something may read before it is written: 1 read, 2 written (registers.py)."""
    register_names: dict[int, str] = dataclasses.field(default_factory=dict)
    """By place, for reports."""

    @property
    def param_bytes(self) -> int:
        """Size of the parameter block."""
        return max((param.offset + param.size for param in self.params), default=0)

    def instruction_array(self) -> np.ndarray:
        """(instructions, fields) int32."""
        return np.array(self.instructions, np.int32)

    def operand_array(self) -> np.ndarray:
        """(operands, 5) int64."""
        operands = np.zeros((len(self.operands), 5), np.int64)
        operands[:, :4] = np.array(self.operands, np.int64).reshape(-1, 4)
        for at, how in self.tracked.items():
            operands[at, 4] = how
        return operands


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*(?:\((.*?)\))?\s*([^{]*)\{", re.S)
_LABEL = re.compile(r"([\w$]+)\s*:(?!:)")
_TYPE_BITS = re.compile(r"\.[busf](\d+)")
_SHARED = re.compile(r"\.shared\s+(?:\.align\s+(\d+)\s+)?\.([busf])(\d+)\s+([\w$]+)\s*(?:\[\s*(\d*)\s*\])?")


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match.group(0))


@functools.lru_cache(maxsize=64)
def parse(ptx: str) -> dict[str, Kernel]:
    """Decodes every entry of a module.

    Args:
      ptx: its text.

    Returns:
      The kernels by name.

    Raises:
      UnsupportedInstructionError: for an instruction that the emulator does not know.
      ValueError: for text that is not PTX.
    """
    text = _COMMENT.sub(_blank, ptx)
    target = re.search(r"\.target\s+(\w+)", text)
    kernels = {}
    for match in _ENTRY.finditer(text):
        kernel = _Parser(text, match, target.group(1) if target else "").run()
        kernels[kernel.name] = kernel
    if not kernels:
        raise ValueError("the PTX has no .entry")
    return kernels


def _params(declarations: str) -> list[Param]:
    params, offset = [], 0
    for declaration in declarations.split(","):
        words = declaration.strip()
        if not words.startswith(".param"):
            continue
        size_match = re.search(r"\[\s*(\d+)\s*\]\s*$", words)
        bits = int(_TYPE_BITS.search(words).group(1))  # type: ignore[union-attr]
        size = int(size_match.group(1)) * bits // 8 if size_match else bits // 8
        align_match = re.search(r"\.align\s+(\d+)\s+\.b8", words)
        # Tensor maps are read in place: whatever is declared, a block starts at a multiple of its natural alignment.
        align = int(align_match.group(1)) if align_match else bits // 8
        offset = -(-offset // align) * align
        name = re.search(r"([\w$]+)\s*(?:\[\s*\d+\s*\])?\s*$", words).group(1)  # type: ignore[union-attr]
        kind = _TYPE_BITS.search(words).group(0)[1]  # type: ignore[union-attr]
        params.append(Param(name, offset, size, kind))
        offset += size
    return params


class _Parser:
    """Decodes one entry."""

    def __init__(self, text: str, match: re.Match[str], target: str):

        def directive(name: str) -> tuple[int, ...]:
            found = re.search(rf"\.{name}\s+([\d\s,]+)", match.group(3))
            return tuple(int(x) for x in found.group(1).split(",") if x.strip()) if found else ()

        self.kernel = Kernel(
            match.group(1),
            target,
            _params(match.group(2) or ""),
            directive("reqntid"),
            0,
            *(directive("minnctapersm") or (1,)),
            directive("maxntid"),
            directive("reqnctapercluster"),
        )
        self.text, self.start = text, match.end()
        self.params = {param.name: param for param in self.kernel.params}
        self.shared: dict[str, int] = {}
        self.registers: dict[str, tuple[int, int]] = {}
        self.special_registers: dict[tuple[str, int], tuple[int, int]] = {}
        self.known_constants: dict[tuple[int, int], int] = {}
        self.declared: list[dict[str, int]] = [{}]
        self.numbered: dict[tuple[int, str], int] = {}
        self.parents: list[int] = [-1]
        self.labels: dict[tuple[int, str], int] = {}
        self._static_shared(text[: match.start()])

    def _static_shared(self, text: str) -> None:
        for align, _, bits, name, length in _SHARED.findall(text):
            # Dynamic shared memory lies behind all static: its symbol is resolved when the size is known.
            if length == "" and "[" in text[text.index(name) :][: len(name) + 3]:
                self.shared[name] = -1
                continue
            size = int(bits) // 8 * int(length or 1)
            alignment = int(align or int(bits) // 8)
            start = -(-self.kernel.static_shared // alignment) * alignment
            self.shared[name] = start
            self.kernel.static_shared = start + size

    def run(self) -> Kernel:
        targets = list(self._scan())
        dynamic = -(-self.kernel.static_shared // 1024) * 1024 if self.kernel.static_shared else 0
        self.kernel.static_shared = dynamic
        self.shared = {name: dynamic if at < 0 else at for name, at in self.shared.items()}
        decode = Decoder(self)
        for statement in targets:
            self.kernel.instructions.append(decode.instruction(statement))
            self.kernel.statements.append(statement)
        decode.finish()
        return self.kernel

    def _scan(self) -> Iterator[Statement]:
        """Statements in order; notes declarations and labels on the way."""
        text, at, scopes, count, used = self.text, self.start, [0], 0, 0
        line = text.count("\n", 0, at) + 1
        while True:
            at, line = self._next(at, line)
            if text[at] == "{":
                self.declared.append({})
                self.parents.append(scopes[-1])
                scopes.append(len(self.declared) - 1)
                at += 1
                continue
            if text[at] == "}":
                scopes.pop()
                at += 1
                if not scopes:
                    return
                continue
            label = _LABEL.match(text, at)
            if label:
                self._label(scopes[-1], label.group(1), count, line)
                line += text.count("\n", at, label.end())
                at = label.end()
                continue
            end = self._end(at, line)
            statement = " ".join(text[at:end].split())
            if statement.startswith(".reg"):
                self._declare(scopes[-1], statement)
            elif statement.startswith(".shared"):
                self._static_shared(statement)
            elif statement and not statement.startswith("."):
                yield Statement(line, statement, scopes[-1], used)
                used = 0
                count += 1
            elif statement.startswith('.pragma "used_bytes_mask'):
                used = int(statement.split()[-1].strip('"'), 16)
            elif statement and not statement.startswith((".pragma", ".loc")):
                raise UnsupportedInstructionError(line, statement)
            line += text.count("\n", at, end)
            at = end + 1

    def _next(self, at: int, line: int) -> tuple[int, int]:
        """The next character that is no space, and its line."""
        while at < len(self.text) and self.text[at].isspace():
            line += self.text[at] == "\n"
            at += 1
        if at == len(self.text):
            raise ValueError(f"line {line}: kernel {self.kernel.name} has no closing brace")
        return at, line

    def _end(self, at: int, line: int) -> int:
        """Of the statement that begins here."""
        end = self.text.find(";", at)
        if end < 0:
            raise ValueError(f"line {line}: a statement of kernel {self.kernel.name} has no semicolon")
        return end

    def _label(self, scope: int, name: str, at: int, line: int) -> None:
        if (scope, name) in self.labels:
            raise ValueError(f"line {line}: there is a label {name} already")
        self.labels[scope, name] = at

    def _declare(self, scope: int, statement: str) -> None:
        _, kind, names = statement.split(None, 2)
        bits = 1 if kind == ".pred" else int(kind[2:])
        for name in split_operands(names):
            many = re.fullmatch(r"(.*?)<(\d+)>", name)
            self.declared[scope][many.group(1) + "#" if many else name] = bits
            if many:
                self.numbered[scope, many.group(1) + "#"] = int(many.group(2))

    def find_label(self, scope: int, name: str) -> int:
        """The instruction that a label stands before."""
        while scope >= 0:
            if (scope, name) in self.labels:
                return self.labels[scope, name]
            scope = self.parents[scope]
        raise ValueError(f"no label {name}")

    def register(self, scope: int, name: str) -> tuple[int, int] | None:
        """(place, bits) of a register, or None where no such name is declared."""
        while scope >= 0:
            bits = self.declared[scope].get(name) or self._numbered_bits(scope, name)
            if bits:
                key = f"{scope}:{name}"
                if key not in self.registers:
                    self.registers[key] = (self.place(bits), bits)
                    self.kernel.register_names[self.registers[key][0]] = name
                return self.registers[key]
            scope = self.parents[scope]
        return None

    def _numbered_bits(self, scope: int, name: str) -> int:
        """Of one of the registers that `%r<64>` declares: %r0 to %r63; 0 for any other."""
        digits = re.search(r"\d+$", name)
        if digits is None:
            return 0
        many = name[: digits.start()] + "#"
        return self.declared[scope].get(many, 0) if int(digits.group()) < self.numbered.get((scope, many), 0) else 0

    def place(self, bits: int) -> int:
        """Room for one more register."""
        size = {1: 32, 64: 256, 128: 512}.get(bits, 128)
        at = self.kernel.register_bytes
        self.kernel.register_bytes += size
        return at

    def special(self, name: str, bits: int) -> tuple[int, int] | None:
        """(place, bits) of a special register, or None where the name is not one."""
        wide = 64 if bits == 64 else 32
        if (name, wide) not in self.special_registers:
            number = NAMES["SPECIAL"].get(name.lstrip("%").replace(".", "_"))
            if number is None:
                return None
            self.special_registers[name, wide] = (self.place(wide), wide)
            self.kernel.specials.append((number, self.special_registers[name, wide][0], wide))
        return self.special_registers[name, wide]

    def constant(self, value: int, bits: int) -> int:
        """Place of a constant, the same in every lane."""
        wide = 1 if bits == 1 else 64 if bits >= 64 else 32
        value &= (1 << bits) - 1
        key = (value, wide)
        if key not in self.known_constants:
            self.known_constants[key] = len(self.kernel.constants)
            if wide == 1:
                self.kernel.constants += struct.pack("<I", 0xFFFFFFFF if value else 0) + bytes(28)
            else:
                self.kernel.constants += struct.pack("<Q" if wide == 64 else "<I", value) * 32
        return self.known_constants[key]

    def param_constant(self, offset: int, bits: int) -> int:
        """Place of the address of a parameter."""
        at = len(self.kernel.constants)
        self.kernel.constants += bytes(256 if bits == 64 else 128)
        self.kernel.param_constants.append((at, bits, offset))
        return at
