"""Checks that every acknowledged group was trained exactly once, and no other group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from tests.soak.journal import Delivered, Outcome, Submission, TrainedBatch

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
