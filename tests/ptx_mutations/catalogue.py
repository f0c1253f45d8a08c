"""Every test bed. A new kernel joins here."""

from __future__ import annotations

from ptx_mutations import blackwell, hopper, tcgen05
from ptx_mutations.harness import TestBed


def beds() -> list[TestBed]:
    """All of them."""
    return [*hopper.beds(), *tcgen05.beds(), *blackwell.beds()]
