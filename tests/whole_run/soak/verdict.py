"""Checks that every acknowledged group was trained exactly once, and no other group; the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from pydantic import BaseModel

from tests.whole_run.soak.hits import HITS
from tests.whole_run.soak.journal import (
    Delivered,
    Noted,
    Outcome,
    Records,
    Submission,
    TrainedBatch,
)
from tests.whole_run.soak.sending import OTHER_BODY_REFUSED, REPEATED

_NAMED = 5


@dataclass(frozen=True)
class LeftOver:
    """The queue in groups, at a moment when checkpoints included every batch."""

    queued: int
    """According to `/status`."""
    acknowledged: int
    """Groups acknowledged but not trained; all must be in the queue."""
    unanswered: int
    """Groups unanswered and not trained; any of them may be in the queue."""


@dataclass(frozen=True)
class Evidence:
    """The records of all processes.

    `left_over` is None if the soak ended early. Otherwise the last batch was filled and the queue
    emptied afterwards. `left_behind`: run-api's counters at the very end.
    """

    batch_size: int
    submissions: Sequence[Submission]
    line: Sequence[TrainedBatch]
    deliveries: Sequence[Delivered]
    left_over: LeftOver | None = None
    left_behind: Mapping[str, float] = field(default_factory=dict)

    def digests(self, outcome: Outcome) -> set[str]:
        return {entry.digest for entry in self.submissions if entry.outcome == outcome}

    def trained(self) -> list[str]:
        """All trained groups in order, with repeats."""
        return [digest for batch in self.line for digest in batch.digests]

    def look_at_queue(self, queued: int) -> LeftOver:
        trained = set(self.trained())
        return LeftOver(
            queued=queued,
            acknowledged=len(self.digests(Outcome.ACKNOWLEDGED) - trained),
            unanswered=len(self.digests(Outcome.UNANSWERED) - trained),
        )


def judge(evidence: Evidence) -> list[str]:
    """A sentence for every broken promise; empty if none was broken."""
    return [
        *_on_groups(evidence),
        *_on_the_end(evidence),
        # One wrong batch usually makes all later ones wrong.
        *islice(_on_batches(evidence), _NAMED),
        *islice(_on_deliveries(evidence.deliveries), _NAMED),
    ]


def _on_groups(evidence: Evidence) -> Iterator[str]:
    trained = Counter(evidence.trained())
    submitted = Counter(entry.digest for entry in evidence.submissions)
    yield from _listed("submitted under one digest twice", _repeated(submitted))
    yield from _listed("doubled: trained more than once", _repeated(trained))
    yield from _listed("invented: trained and never submitted", trained.keys() - submitted.keys())
    refused = evidence.digests(Outcome.REFUSED)
    yield from _listed("refused and trained", refused & trained.keys())


def _on_the_end(evidence: Evidence) -> Iterator[str]:
    left = evidence.left_over
    if left is None:
        yield "the soak ended early: whether groups were lost is unknown"
        return
    if not left.acknowledged <= left.queued <= left.acknowledged + left.unanswered:
        yield (
            f"the queue held {left.queued} groups while {left.acknowledged} acknowledged and "
            f"{left.unanswered} unanswered ones were not trained"
        )
    lost = evidence.digests(Outcome.ACKNOWLEDGED) - set(evidence.trained())
    yield from _listed("lost: acknowledged and never trained", lost)
    for what, count in evidence.left_behind.items():
        if count:
            yield f"{what} is {count:g} after everything was trained and acknowledged"


def _on_batches(evidence: Evidence) -> Iterator[str]:
    sequences = {entry.digest: entry.sequences for entry in evidence.submissions}
    for step, batch in enumerate(evidence.line, start=1):
        if batch.id != step:
            yield f"batch {batch.id} was trained as step {step}"
        held = sum(sequences.get(digest, 0) for digest in batch.digests)
        if held != evidence.batch_size:
            yield f"batch {batch.id} holds {held} sequences instead of {evidence.batch_size}"


def _on_deliveries(deliveries: Sequence[Delivered]) -> Iterator[str]:
    contents: dict[int, str] = {}
    for delivery in deliveries:
        if delivery.id != delivery.after + 1:
            yield f"asked for the batch after {delivery.after}, the trainer got {delivery.id}"
        if contents.setdefault(delivery.id, delivery.content) != delivery.content:
            yield f"batch {delivery.id} was delivered again with another content"


def _repeated(counts: Counter[str]) -> set[str]:
    return {digest for digest, count in counts.items() if count > 1}


def _listed(what: str, digests: Collection[str]) -> Iterator[str]:
    if digests:
        named = ", ".join(sorted(digests)[:_NAMED])
        more = ", …" if len(digests) > _NAMED else ""
        yield f"{what}: {len(digests)} groups ({named}{more})"


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
