"""The table at the end of a soak; as JSON it is the record itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pydantic import BaseModel

from tests.soak.evidence import Records
from tests.soak.faults import KINDS
from tests.soak.journal import Outcome
from tests.soak.producer import ANSWERED_FROM_RECORD
from tests.soak.verdict import Evidence, LeftOver

_FULL_COVERAGE_S = 60.0
"""A plan of this length holds every kind of hit."""
_REDELIVERY_S = 300.0
"""A trainer has to be killed with a batch that it has not saved: a minute may hold no such hit."""


class Report(BaseModel):
    """Everything is counted in groups where the name does not say otherwise."""

    seed: int
    appendfsync: str
    seconds: float
    """During which processes were hit, as long as planned at least; the drain comes on top."""
    problems: list[str]
    submitted: int
    acknowledged: int
    unanswered: int
    unanswered_and_trained: int
    refused_on_purpose: int
    trained: int
    sequences_trained: int
    batches_trained: int
    batches_redelivered: int
    left_over: LeftOver | None
    """When the trainer could form no more batches, before fillers were sent."""
    fillers: int
    notes: dict[str, int]
    hits: dict[str, int]
    redis_killed_with_fsync_pending: int
    redis_killed_while_rewriting: int
    aof_tails_cut: int
    aof_delayed_fsyncs: int
    longest_waits_s: dict[str, float]

    def __str__(self) -> str:
        return "\n".join([*_table(self), "", *_verdict(self)])


def tally(evidence: Evidence, records: Records) -> dict[str, int]:
    """The counts of a report."""
    trained = evidence.trained()
    unanswered = evidence.digests(Outcome.UNANSWERED)
    ids = [delivery.id for delivery in evidence.deliveries]
    return {
        "submitted": len(evidence.submissions),
        "acknowledged": len(evidence.digests(Outcome.ACKNOWLEDGED)),
        "unanswered": len(unanswered),
        "unanswered_and_trained": len(unanswered & set(trained)),
        "refused_on_purpose": len(evidence.digests(Outcome.WANTED_REFUSAL)),
        "trained": len(trained),
        "sequences_trained": len(evidence.line) * evidence.batch_size,
        "batches_trained": len(evidence.line),
        "batches_redelivered": len(ids) - len(set(ids)),
        "fillers": records.fillers(),
    }


def missing_coverage(report: Report, planned_s: float) -> list[str]:
    """What a soak of this length meets and this one did not: one that hit nothing shows nothing."""
    if planned_s < _FULL_COVERAGE_S:
        return []
    met: Mapping[str, int] = {
        **{kind: report.hits.get(kind, 0) for kind in KINDS},
        "a trained group per second": int(report.trained / report.seconds),
        "a group without an answer": report.unanswered,
        ANSWERED_FROM_RECORD: report.notes.get(ANSWERED_FROM_RECORD, 0),
    }
    if planned_s >= _REDELIVERY_S:
        met = {**met, "a batch delivered again": report.batches_redelivered}
    return [f"never happened: {what}" for what, count in met.items() if not count]


def _table(report: Report) -> Iterator[str]:
    yield f"soak of {report.seconds:g} s, seed {report.seed}, appendfsync {report.appendfsync}"
    yield from _rows("groups", _groups(report))
    yield from _rows("repeats under one key", report.notes)
    yield from _rows("hits", report.hits)
    yield from _rows(
        "Redis, when it was killed",
        {
            "with a background fsync pending": report.redis_killed_with_fsync_pending,
            "while it rewrote its file": report.redis_killed_while_rewriting,
            "in the middle of a command, cut off at start": report.aof_tails_cut,
            "fsyncs it had waited for (aof_delayed_fsync)": report.aof_delayed_fsyncs,
        },
    )
    yield from _rows("longest wait, seconds", report.longest_waits_s)


def _groups(report: Report) -> dict[str, float]:
    left = report.left_over
    return {
        "submitted": report.submitted,
        "acknowledged": report.acknowledged,
        "without an answer": report.unanswered,
        "  of these trained": report.unanswered_and_trained,
        "refused on purpose": report.refused_on_purpose,
        "trained": report.trained,
        "  per second": report.trained / report.seconds,
        "batches trained": report.batches_trained,
        "batches delivered again": report.batches_redelivered,
        "left in the queue, acknowledged": left.acknowledged if left else 0,
        "fillers to flush them out": report.fillers,
    }


def _rows(title: str, values: Mapping[str, float]) -> Iterator[str]:
    yield f"  {title}"
    for name, value in values.items():
        yield f"    {name:<46}{value:>10.2f}" if value % 1 else f"    {name:<46}{value:>7.0f}"


def _verdict(report: Report) -> Iterator[str]:
    if not report.problems:
        yield "every acknowledged group was trained exactly once"
        return
    yield "FAILED:"
    yield from (f"- {problem}" for problem in report.problems)
