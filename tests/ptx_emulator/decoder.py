"""One instruction of PTX to the fixed fields that the core executes."""

from __future__ import annotations

import re
from typing import Any

from ptx_emulator import decode_async, decode_basic
from ptx_emulator.operands import FLAG, OP, REGISTER, Decoded, Operands
from ptx_emulator.syntax import UnsupportedInstructionError, split_operands

_GUARD = re.compile(r"@(!?)\s*([%\w$]+)\s+(.*)", re.S)
_HEADS = decode_basic.HEADS | decode_async.HEADS


class Decoder(Operands):
    """Decodes the instructions of one kernel."""

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
        if decoded.op == OP["ld"]:
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
        """Marks the instructions that touch registers which an asynchronous instruction writes while others go on."""
        kernel = self.parser.kernel

        def registers(fields: list[int], count: int) -> set[int]:
            operands = kernel.operands[fields[5] : fields[5] + count]
            return {place for kind, place, _, _ in operands if kind == REGISTER}

        loads = [fields for fields in kernel.instructions if fields[0] == OP["tc_ld"]]
        loaded = {place for fields in loads for place in registers(fields, fields[11])}
        for fields in kernel.instructions:
            own = registers(fields, fields[6])
            if fields[0] != OP["wgmma_mma"] and own & self.accumulators:
                fields[13] |= 1 << FLAG["touches_accumulators"]
            if fields[0] != OP["tc_ld"] and own & loaded:
                fields[13] |= 1 << FLAG["touches_loads"]
