"""Faults that other tests inject, and those that need hardware which nobody ran: the rows of
`elsewhere.tsv`."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from tests.whole_run.matrix.declared import Fault, Kind

TABLE = Path(__file__).with_suffix(".tsv")


def faults() -> Iterator[Fault]:
    with TABLE.open(newline="") as file:
        for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
            yield Fault(
                Kind[row["kind"]],
                row["fault"],
                row["injected"],
                tests=(row["test"],) if row["test"] else (),
                happens=row["happens"],
                error=row["logged"],
            )
