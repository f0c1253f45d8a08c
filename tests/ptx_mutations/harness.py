"""Puts faults into kernels, runs them in the emulator and says what found each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from ptx_emulator import Report

from ptx_mutations.mutation import WRONG, Mutation
from ptx_mutations.text import Text


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one run of a kernel gave."""

    report: Report
    wrong: int
    """Elements of the result that differ from what they must be, or that were never written."""

    @property
    def kinds(self) -> frozenset[str]:
        """What was found."""
        return frozenset(fault.kind for fault in self.report.faults) | ({WRONG} if self.wrong else frozenset())

    @property
    def finished(self) -> bool:
        """Whether the kernel came to its end, so that its results mean something."""
        return all(fault.kind == "race" for fault in self.report.faults)


class TestBed(Protocol):
    """A kernel with inputs that reach all of its paths. Another kernel joins by being one of these."""

    __test__ = False  # not a class of tests, whatever pytest thinks of its name

    name: str
    mutations: Sequence[Mutation[Any]]
    """What may be done to it."""

    def text(self) -> Text:
        """The kernel's PTX, to be edited."""
        ...

    def run(self, ptx: str, seed: int) -> Outcome:
        """Runs an edited text on the bed's inputs."""
        ...


@dataclasses.dataclass(frozen=True)
class Finding:
    """What became of a mutation."""

    bed: str
    mutation: Mutation[Any]
    by_seed: tuple[Outcome, ...]

    @property
    def kinds(self) -> frozenset[str]:
        """What found it, with any seed."""
        return frozenset().union(*(outcome.kinds for outcome in self.by_seed))

    @property
    def caught(self) -> bool:
        """Whether it was found for a right reason with every seed."""
        return all(outcome.kinds & self.mutation.kinds for outcome in self.by_seed)

    @property
    def numbers_alone(self) -> bool:
        """Whether a comparison of results, or a kernel that never ends, would have shown it with every seed."""
        return all(outcome.wrong or not outcome.finished for outcome in self.by_seed)

    def __str__(self) -> str:
        first = next((fault for outcome in self.by_seed for fault in outcome.report.faults), None)
        return f"{self.bed}: {self.mutation.name}: {', '.join(sorted(self.kinds)) or 'NOTHING'}\n{first or ''}"


def investigate(bed: TestBed, mutation: Mutation[Any], seeds: Iterable[int]) -> Finding:
    """Tries one mutation.

    Args:
      bed: the kernel.
      mutation: what is done to it.
      seeds: of the orders in which warps and engines take turns.

    Returns:
      What was found.
    """
    text = bed.text()
    mutation.apply(text)
    ptx = str(text)
    return Finding(bed.name, mutation, tuple(bed.run(ptx, seed) for seed in seeds))


def all_of(beds: Sequence[TestBed]) -> list[tuple[TestBed, Mutation[Any]]]:
    """Every mutation with the beds that it is for."""
    return [(bed, mutation) for bed in beds for mutation in bed.mutations]


def table(findings: Sequence[Finding]) -> str:
    """Findings as Markdown."""
    lines = ["| kernel | mutation | what is wrong | caught by | results of the same runs |", "|---|---|---|---|---|"]
    for finding in findings:
        kinds = ", ".join(sorted(finding.kinds & finding.mutation.kinds) or ["**nothing**"])
        alone = "wrong, or none" if finding.numbers_alone else "**right**"
        mutation = finding.mutation
        lines.append(f"| {finding.bed} | {mutation.name} | {mutation.description} | {kinds} | {alone} |")
    return "\n".join(lines) + "\n"
