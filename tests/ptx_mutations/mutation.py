"""What a mutation is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Generic, TypeVar

from ptx_mutations.text import Text

T = TypeVar("T", bound=Text)

WRONG = "wrong result"
"""What finds a mutation beside the emulator's own kinds of faults: numbers that differ, or results never written."""


@dataclasses.dataclass(frozen=True)
class Mutation(Generic[T]):
    """One fault put into a kernel."""

    name: str
    description: str
    apply: Callable[[T], None]
    """Edits the text in place."""
    kinds: frozenset[str]
    """Faults that may rightly be reported for it: at least one of them must be."""
    beds: tuple[str, ...]
    """The test beds that it is tried on."""


class Mutations(Generic[T]):
    """A list that grows by decorated functions, for the test beds that it is made with."""

    def __init__(self, beds: tuple[str, ...]):
        self.all: list[Mutation[T]] = []
        self._beds = beds

    def add(
        self, *kinds: str, beds: tuple[str, ...] | None = None
    ) -> Callable[[Callable[[T], None]], Callable[[T], None]]:
        """Adds the decorated function, which edits a text; its docstring says what the fault is."""

        def decorate(apply: Callable[[T], None]) -> Callable[[T], None]:
            assert apply.__doc__ is not None
            name = apply.__name__.strip("_")
            assert all(other.name != name for other in self.all), name
            self.all.append(Mutation(name, apply.__doc__.strip(), apply, frozenset(kinds), beds or self._beds))
            return apply

        return decorate
