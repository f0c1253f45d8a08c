"""PTX text in which instructions are found by what they are, and changed. What is not found is an error."""

from __future__ import annotations

import re
from collections.abc import Iterator

_SUM = re.compile(r"add\.[su](?:32|64)\s+(%\w+), (%\w+), (%\w+|-?\d+);")


class NotFoundError(LookupError):
    """A mutation does not apply to this text: it must be written anew, never skipped."""


class Text:
    """Lines of PTX that can be edited; line numbers are those of the text as it is at the moment."""

    def __init__(self, ptx: str):
        self.lines = ptx.split("\n")

    def __str__(self) -> str:
        return "\n".join(self.lines)

    def all(self, pattern: str, within: range | None = None) -> list[int]:
        """The lines that a regular expression matches."""
        expression = re.compile(pattern)
        where = range(len(self.lines)) if within is None else within
        return [i for i in where if expression.search(self.lines[i])]

    def find(self, pattern: str, within: range | None = None, nth: int = 0) -> int:
        """The nth line that a regular expression matches.

        Args:
          pattern: the expression.
          within: lines to look at.
          nth: which of the matches; negative ones count from the end.

        Returns:
          The line's index.

        Raises:
          NotFoundError: if there are not so many.
        """
        found = self.all(pattern, within)
        try:
            return found[nth]
        except IndexError:
            raise NotFoundError(f"{len(found)} lines match {pattern!r}, none is number {nth}") from None

    def substitute(self, line: int, pattern: str, replacement: str) -> None:
        """Replaces the first match of a regular expression in a line."""
        changed, count = re.subn(pattern, replacement, self.lines[line], count=1)
        if not count or changed == self.lines[line]:
            raise NotFoundError(f"nothing to change of {pattern!r} in: {self.lines[line].strip()}")
        self.lines[line] = changed

    def drop(self, line: int) -> None:
        """Removes an instruction; its line stays, so that line numbers do."""
        if not self.lines[line].strip().endswith(";"):
            raise NotFoundError(f"no instruction of one line: {self.lines[line].strip()}")
        self.lines[line] = f"	// dropped: {self.lines[line].strip()}"

    def drop_block(self, line: int) -> None:
        """Removes the block { } of inline assembly around a line."""
        for i in self.block(line):
            self.lines[i] = f"	// dropped: {self.lines[i].strip()}"

    def block(self, line: int) -> range:
        first = next((i for i in range(line, -1, -1) if self.lines[i].strip() == "{"), None)
        last = next((i for i in range(line, len(self.lines)) if self.lines[i].strip() == "}"), None)
        if first is None or last is None or last - first > 12:
            raise NotFoundError(f"no block around: {self.lines[line].strip()}")
        return range(first, last + 1)

    def insert(self, line: int, *instructions: str) -> None:
        """Puts instructions before a line."""
        self.lines[line:line] = [f"	{instruction}" for instruction in instructions]

    def move(self, line: int, to: int) -> None:
        """Moves an instruction to before another line."""
        text = self.lines[line]
        self.drop(line)
        self.lines[to:to] = [text]

    def declare_mutant(self) -> None:
        """Declares the 32-bit register %mutant, for what a mutation computes; no line may be used from before."""
        self.insert(self.find(r"^\{") + 1, ".reg .b32 	%mutant;")

    def shift(self, line: int, operand: str, change: int) -> None:
        """Has an instruction see a register's value plus a constant."""
        self.substitute(line, rf"{operand}(?!\d)", "%mutant")
        self.insert(line, f"add.s32 	%mutant, {operand}, {change};")
        self.declare_mutant()

    def first_operand(self, line: int) -> str:
        """The first operand of an instruction: what it writes."""
        return self.lines[line].split()[1].rstrip(",")

    def last_operand(self, line: int) -> str:
        """The last operand of an instruction."""
        return self.lines[line].rstrip(";").split()[-1]

    def coordinates(self, line: int) -> list[str]:
        """The coordinates of a TMA instruction, the contiguous axis first."""
        return [coordinate.strip() for coordinate in self.lines[line].split("{")[1].split("}")[0].split(",")]

    def definitions(self, register: str) -> Iterator[str]:
        """The instructions whose first operand a register is."""
        expression = re.compile(rf"^\s*(?:@!?%\w+\s+)?[a-z][\w.:]*\s+{re.escape(register)}\b")
        # Looking for the name first is much faster.
        return (line.strip() for line in self.lines if register in line and expression.search(line))

    def constant(self, operand: str) -> int:
        """The constant that a sum of registers adds: of `%r4` or `%r4+8`, what is known to be added to the base."""
        register, _, offset = operand.partition("+")
        result = int(offset) if offset else 0
        definitions = list(self.definitions(register))
        if len(definitions) == 1 and (match := _SUM.match(definitions[0])):
            for term in match.groups()[1:]:
                result += self.constant(term) if term.startswith("%") else int(term)
        return result
