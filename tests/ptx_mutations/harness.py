"""Puts faults into kernels, runs them in the emulator and says what found each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from ptx_emulator import Report

from ptx_mutations.mutation import WRONG, Mutation
from ptx_mutations.no_faults import NO_FAULTS
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


class TestBed(Protocol):
    """A kernel with inputs that reach all of its paths. Another kernel joins by being one of these."""

    __test__ = False  # not a class of tests, whatever pytest thinks of its name

    name: str
    mutations: Sequence[Mutation[Any]]
    """What may be done to it."""

    def text(self) -> Text:
        """The kernel's PTX, to be edited."""
        ...

    def run(self, ptx: str, seed: int, races: bool = True) -> Outcome:
        """Runs an edited text on the bed's inputs; without `races`, these are not looked for."""
        ...


@dataclasses.dataclass(frozen=True)
class Finding:
    """What became of a mutation."""

    bed: str
    mutation: Mutation[Any]
    by_seed: tuple[Outcome, ...]
    without_races: tuple[Outcome, ...] = ()
    """The same, where races are not looked for."""

    @property
    def kinds(self) -> frozenset[str]:
        """What found it, with any seed."""
        return frozenset().union(*(outcome.kinds for outcome in self.by_seed))

    @property
    def caught(self) -> bool:
        """Whether it was found for a right reason with every seed."""
        return all(outcome.kinds & self.mutation.kinds for outcome in self.by_seed)

    def __str__(self) -> str:
        first = next((fault for outcome in self.by_seed for fault in outcome.report.faults), None)
        return f"{self.bed}: {self.mutation.name}: {', '.join(sorted(self.kinds)) or 'NOTHING'}\n{first or ''}"


def investigate(bed: TestBed, mutation: Mutation[Any], seeds: Iterable[int], compare: bool = False) -> Finding:
    """Tries one mutation.

    Args:
      bed: the kernel.
      mutation: what is done to it.
      seeds: of the orders in which warps and engines take turns.
      compare: whether to run it without looking for races, too.

    Returns:
      What was found.
    """
    text = bed.text()
    mutation.apply(text)
    ptx = str(text)
    found = tuple(bed.run(ptx, seed) for seed in seeds)
    without = tuple(bed.run(ptx, seed, races=False) for seed in seeds) if compare else ()
    return Finding(bed.name, mutation, found, without)


def all_of(beds: Sequence[TestBed]) -> list[tuple[TestBed, Mutation[Any]]]:
    """Every mutation with the beds that it is for."""
    return [(bed, mutation) for bed in beds for mutation in bed.mutations]


def one_bed_each(beds: Sequence[TestBed]) -> list[tuple[TestBed, Mutation[Any]]]:
    """Every mutation with one of the beds that it is for, in turn."""
    of_mutation: dict[str, list[tuple[TestBed, Mutation[Any]]]] = {}
    for bed, mutation in all_of(beds):
        of_mutation.setdefault(f"{mutation.apply.__module__}.{mutation.name}", []).append((bed, mutation))
    return [choices[i % len(choices)] for i, choices in enumerate(of_mutation.values())]


def table(findings: Sequence[Finding]) -> str:
    """Findings as Markdown; they must have been compared."""
    seeds = len(findings[0].by_seed)
    hidden = sum(any(not outcome.kinds for outcome in finding.without_races) for finding in findings)
    lines = [
        "# Mutations of kernels, and what caught them",
        "",
        f"Written by `python -m ptx_mutations --seeds {seeds} --table FILE` in tests/.",
        f"{len(findings)} mutations, each run in {seeds} random orders of events.",
        "",
        "The last column is for an emulator that does not look for races: what it would have found, counting wrong and",
        "missing results, and in how many of these orders it would have found nothing at all:",
        f"that happens to {hidden} mutations.",
    ]
    for bed in dict.fromkeys(finding.bed for finding in findings):
        lines += ["", f"## {bed}", "", "| mutation | what is wrong | caught by | without races |", "|---|---|---|---|"]
        lines += [_row(finding) for finding in findings if finding.bed == bed]
    lines += ["", "## No faults", "", "What these kernels could do without, and why it is not tried above:", ""]
    lines += [f"- {what}. {why}" for what, why in NO_FAULTS]
    return "\n".join(lines) + "\n"


def _row(finding: Finding) -> str:
    mutation = finding.mutation
    kinds = ", ".join(sorted(finding.kinds & mutation.kinds)) or "**nothing**"
    without = sorted(frozenset().union(*(outcome.kinds for outcome in finding.without_races)))
    missed = sum(not outcome.kinds for outcome in finding.without_races)
    if missed:
        without.append(f"**nothing** ({missed} of {len(finding.without_races)})")
    return f"| {mutation.name} | {mutation.description} | {kinds} | {', '.join(without)} |"
