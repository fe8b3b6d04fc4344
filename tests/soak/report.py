"""The report at the end of a soak, as a table or JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from pydantic import BaseModel

from tests.soak.hits import HITS
from tests.soak.journal import Noted, Outcome, Records
from tests.soak.sending import OTHER_BODY_REFUSED, REPEATED
from tests.soak.verdict import Evidence, judge

_REDELIVERED, _UNANSWERED = "batches delivered again", "groups unanswered"
_UNANSWERED_TRAINED = "groups unanswered and trained"


class Report(BaseModel):
    """Numbers of a soak. `seconds`: time with hits, without start and drain."""

    seed: int
    appendfsync: str
    seconds: float
    problems: list[str]
    counts: dict[str, int]
    hits: dict[str, int]

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{self.seconds:.0f} s, seed {self.seed}, appendfsync {self.appendfsync}"
        for title, values in (("counts", self.counts), ("hits", self.hits)):
            yield f"  {title}"
            yield from (f"    {name:<46}{count:>7}" for name, count in values.items())
        if not self.problems:
            yield "every acknowledged group was trained exactly once"
            return
        yield "FAILED:"
        yield from (f"- {problem}" for problem in self.problems)


def count(evidence: Evidence, records: Records) -> dict[str, int]:
    trained = evidence.trained()
    unanswered = evidence.digests(Outcome.UNANSWERED)
    ids = [delivery.id for delivery in evidence.deliveries]
    left = evidence.left_over
    return {
        "groups submitted": len(evidence.submissions),
        "groups acknowledged": len(evidence.digests(Outcome.ACKNOWLEDGED)),
        _UNANSWERED: len(unanswered),
        _UNANSWERED_TRAINED: len(unanswered & set(trained)),
        "groups refused on purpose": len(evidence.digests(Outcome.REFUSED)),
        "groups trained": len(trained),
        "groups left in the queue, then trained": left.queued if left else 0,
        "batches trained": len(evidence.line),
        _REDELIVERED: len(ids) - len(set(ids)),
        **Counter(entry.what for entry in records.of_kind(Noted)),
    }


def missing(counts: Mapping[str, int], hits: Mapping[str, int]) -> list[str]:
    """Events that have not happened yet and that a soak must include."""
    wanted = (_REDELIVERED, _UNANSWERED, _UNANSWERED_TRAINED, REPEATED, OTHER_BODY_REFUSED)
    happened = {**counts, **hits}
    return [name for name in (*wanted, *(hit.kind for hit in HITS)) if not happened.get(name)]


def problems(evidence: Evidence, counts: Mapping[str, int], hits: Mapping[str, int]) -> list[str]:
    return [*judge(evidence), *(f"never happened: {name}" for name in missing(counts, hits))]
