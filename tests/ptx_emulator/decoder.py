"""One instruction of PTX to the fixed fields that the core executes."""

from __future__ import annotations

import re
from typing import Any

from ptx_emulator import decode_async, decode_basic, decode_memory, decode_tensor, registers
from ptx_emulator.operands import ADDRESS, FLAG, OP, REGISTER, SINK, Decoded, Operands
from ptx_emulator.syntax import UnsupportedInstructionError, split_operands

_GUARD = re.compile(r"@(!?)\s*([%\w$]+)\s+(.*)", re.S)
_HEADS = decode_basic.HEADS | decode_memory.HEADS | decode_async.HEADS | decode_tensor.HEADS


class Decoder(Operands):
    """Decodes the instructions of one kernel."""

    def instruction(self, statement: Any) -> list[int]:
        """The fields of one statement."""
        self.scope = statement.scope
        text, guard, negated = statement.text, -1, 0
        match = _GUARD.match(text)
        if match:
            found = self.parser.register(self.scope, match.group(2))
            if found is None or found[1] != 1:
                raise UnsupportedInstructionError(statement.line, statement.text)
            guard, negated, text = found[0], int(match.group(1) == "!"), match.group(3)
        opcode, _, rest = text.partition(" ")
        parts = opcode.split(".")
        arguments = split_operands(rest)
        decoded = Decoded()
        try:
            head = _HEADS[parts[0]]
            head(self, decoded, parts, arguments)
            self._check_results(decoded)
        except (KeyError, IndexError, ValueError, StopIteration) as error:
            why = str(error.args[0]) if isinstance(error, KeyError) and " " in str(error.args[0]) else ""
            raise UnsupportedInstructionError(statement.line, statement.text, why) from error
        if "shared::cluster" not in parts and ("shared" in parts or "shared::cta" in parts):
            decoded.flag("own_shared")
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

    def _check_results(self, decoded: Decoded) -> None:
        """Results must go to registers of the program or nowhere, and no operand may come from nowhere."""
        results = registers.results(decoded.op, decoded.count)
        special = {place for _, place, _ in self.parser.kernel.specials}
        for i, (kind, place, _, _) in enumerate(decoded.operands):
            if i < results and (kind not in (REGISTER, SINK) or (kind == REGISTER and place in special)):
                raise KeyError("the result is no register")
            if i >= results and kind == SINK:
                raise KeyError("an operand is missing")

    def finish(self) -> None:
        """Marks the instructions whose registers the core must watch."""
        registers.track(self.parser.kernel)
        self._mark_asynchronous()

    def _mark_asynchronous(self) -> None:
        """Marks the instructions that touch registers which an asynchronous instruction writes while others go on."""
        kernel = self.parser.kernel

        def own_registers(fields: list[int], count: int, results: int = -1) -> set[int]:
            first = 0 if results < 0 else registers.results(fields[0], results)
            operands = kernel.operands[fields[5] + first : fields[5] + count]
            return {place for kind, place, _, _ in operands if kind == REGISTER}

        # By register: which loads it holds values of. Moves are names of the same registers to the compiler.
        loads: dict[int, set[int]] = {}
        for at, fields in enumerate(kernel.instructions):
            if fields[0] == OP["tc_ld"]:
                for place in own_registers(fields, fields[11]):
                    loads.setdefault(place, set()).add(at)
        direct = set(loads)
        moving = (OP["mov"], OP["pack"], OP["unpack"])
        for fields in kernel.instructions:
            if fields[0] not in moving:
                continue
            sources, all_registers = own_registers(fields, fields[6], fields[11]), own_registers(fields, fields[6])
            held = set().union(*(loads.get(place, set()) for place in sources))
            if held:
                for place in all_registers - sources:
                    loads.setdefault(place, set()).update(held)
        for fields in kernel.instructions:
            own = own_registers(fields, fields[6])
            if fields[0] != OP["wgmma_mma"] and own & self.accumulators:
                fields[13] |= 1 << FLAG["touches_accumulators"]
            if not own.isdisjoint(loads):
                self._mark_loaded(fields, loads, direct, names=fields[0] in (*moving, OP["tc_ld"]))

    def _mark_loaded(self, fields: list[int], loads: dict[int, set[int]], direct: set[int], *, names: bool) -> None:
        """Marks the operands of an instruction that hold what loads from TMEM give."""
        kernel = self.parser.kernel
        results = registers.results(fields[0], fields[11])
        for i in range(fields[6]):
            kind, place, _, _ = kernel.operands[fields[5] + i]
            if kind not in (REGISTER, ADDRESS) or place not in loads:
                continue
            how = 0
            if place in direct:
                fields[13] |= 1 << FLAG["names_loads"]
                how = registers.WRITES_LOADED if i < results else registers.READS_LOADED
            if not names and i >= results:
                fields[13] |= 1 << FLAG["touches_loads"]
                only_one = len(loads[place]) == 1
                how |= (1 + next(iter(loads[place])) if only_one else registers.MANY_LOADS) << registers.LOAD_SHIFT
            kernel.tracked[fields[5] + i] = kernel.tracked.get(fields[5] + i, 0) | how
