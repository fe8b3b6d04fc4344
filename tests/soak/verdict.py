"""Was every acknowledged group trained exactly once, and nothing else? Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from tests.soak.journal import Delivered, Outcome
from tests.soak.trained_line import TrainedBatch

_NAMED = 5


@dataclass(frozen=True)
class Submission:
    """One group on its way to run-api, as its environment saw it."""

    digest: str
    sequences: int
    outcome: Outcome


@dataclass(frozen=True)
class LeftOver:
    """The queue when the trainer could form no more batches, in groups."""

    queued: int
    """What `/status` says."""
    acknowledged: int
    """Acknowledged and not trained: each of them must be in the queue."""
    unanswered: int
    """Sent without an answer and not trained: each of them may be."""

    def problems(self) -> Iterator[str]:
        if not self.acknowledged <= self.queued <= self.acknowledged + self.unanswered:
            yield (
                f"the queue held {self.queued} groups while {self.acknowledged} acknowledged and "
                f"{self.unanswered} unanswered ones were not trained"
            )


@dataclass(frozen=True)
class Evidence:
    """What all processes wrote down, read after the last of them ended.

    `left_over` is None where the run did not come to its end; where it did, the queue was filled up
    afterwards, and what is not trained never will be. `left_behind` is what run-api counts at the
    very end. `longest_waits_s` is by kind of call; `incidents` are things that no process may do,
    in words.
    """

    batch_size: int
    submissions: Sequence[Submission]
    line: Sequence[TrainedBatch]
    deliveries: Sequence[Delivered]
    left_over: LeftOver | None = None
    left_behind: Mapping[str, float] = field(default_factory=dict)
    longest_waits_s: Mapping[str, float] = field(default_factory=dict)
    incidents: Sequence[str] = ()

    def digests(self, *outcomes: Outcome) -> set[str]:
        return {entry.digest for entry in self.submissions if entry.outcome in outcomes}

    def look_at_queue(self, queued: int) -> LeftOver:
        """Args: queued: what `/status` says, once the trainer has saved all that it can get."""
        trained = set(self.trained())
        return LeftOver(
            queued=queued,
            acknowledged=len(self.digests(Outcome.ACKNOWLEDGED) - trained),
            unanswered=len(self.digests(Outcome.UNANSWERED) - trained),
        )

    def trained(self) -> list[str]:
        """In order, and as often as it happened."""
        return [name for batch in self.line for name in batch.digests]


def judge(evidence: Evidence, wait_bound_s: float) -> list[str]:
    """Every way in which the promise was broken, in words; empty where it was kept."""
    return [
        *_on_groups(evidence),
        *_first(_on_batches(evidence)),
        *_first(_on_deliveries(evidence.deliveries)),
        *_on_waits(evidence.longest_waits_s, wait_bound_s),
        *evidence.incidents,
    ]


def _on_groups(evidence: Evidence) -> Iterator[str]:
    trained = Counter(evidence.trained())
    submitted = Counter(entry.digest for entry in evidence.submissions)
    yield from _listed("submitted under one digest twice", _repeated(submitted))
    if evidence.left_over:
        yield from evidence.left_over.problems()
        lost = evidence.digests(Outcome.ACKNOWLEDGED) - trained.keys()
        yield from _listed("lost: acknowledged and never trained", lost)
    else:
        yield "the run ended early: whether groups were lost is not known"
    yield from _listed("doubled: trained more than once", _repeated(trained))
    yield from _listed("invented: trained and never submitted", trained.keys() - submitted.keys())
    refused = evidence.digests(Outcome.REFUSED, Outcome.WANTED_REFUSAL)
    yield from _listed("refused and trained", refused & trained.keys())
    yield from _listed("refused without need", evidence.digests(Outcome.REFUSED))
    for what, count in evidence.left_behind.items():
        if count:
            yield f"{what} is {count:g} after everything was trained and acknowledged"


def _on_batches(evidence: Evidence) -> Iterator[str]:
    ids = [batch.id for batch in evidence.line]
    if ids != list(range(1, len(ids) + 1)):
        wrong = next(i for i, id_ in enumerate(ids, start=1) if i != id_)
        yield f"batch {ids[wrong - 1]} was trained as step {wrong}: ids are not 1, 2, 3, …"
    sequences = {entry.digest: entry.sequences for entry in evidence.submissions}
    for batch in evidence.line:
        held = sum(sequences.get(name, 0) for name in batch.digests)
        if held != evidence.batch_size:
            yield f"batch {batch.id} holds {held} sequences instead of {evidence.batch_size}"


def _on_deliveries(deliveries: Sequence[Delivered]) -> Iterator[str]:
    contents: dict[int, str] = {}
    for delivery in deliveries:
        if delivery.id != delivery.after + 1:
            yield f"asked for the batch after {delivery.after}, the trainer got {delivery.id}"
        if contents.setdefault(delivery.id, delivery.content) != delivery.content:
            yield f"batch {delivery.id} was delivered again with another content"


def _on_waits(longest_s: Mapping[str, float], bound_s: float) -> Iterator[str]:
    for kind, seconds in longest_s.items():
        if seconds > bound_s:
            yield f"{kind}: a wait of {seconds:.1f} s, beyond {bound_s:g} s"


def _first(problems: Iterator[str]) -> Iterator[str]:
    """One broken batch tends to break all that follow."""
    yield from islice(problems, _NAMED)
    if more := len(list(problems)):
        yield f"and {more} more of this kind"


def _repeated(counts: Counter[str]) -> set[str]:
    return {name for name, count in counts.items() if count > 1}


def _listed(what: str, digests: Collection[str]) -> Iterator[str]:
    if digests:
        named = ", ".join(sorted(digests)[:_NAMED])
        more = ", …" if len(digests) > _NAMED else ""
        yield f"{what}: {len(digests)} groups ({named}{more})"
