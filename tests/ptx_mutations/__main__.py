"""`python -m ptx_mutations [--seeds N] [--only NAME]` in tests/: the table of mutations and what caught them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ptx_mutations.catalogue import beds
from ptx_mutations.harness import all_of, investigate, table


def main() -> None:
    """Reads the command line; prints findings as they come, then writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="orders of events to try for each")
    parser.add_argument("--only", default="", help="mutations whose names, after that of the kernel, hold this")
    parser.add_argument("--table", type=Path, help="file to write the table to")
    arguments = parser.parse_args()
    findings = []
    for bed, mutation in all_of(beds()):
        if arguments.only in f"{bed.name}: {mutation.name}":
            finding = investigate(bed, mutation, range(arguments.seeds), compare=arguments.table is not None)
            findings.append(finding)
            print(("" if finding.caught else "NOT CAUGHT ") + str(finding), flush=True)
    missed = [finding for finding in findings if not finding.caught]
    print(f"{len(findings)} mutations, {len(missed)} not caught: {[finding.mutation.name for finding in missed]}")
    if arguments.table:
        arguments.table.write_text(table(findings))
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
