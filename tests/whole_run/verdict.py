"""The verdict on a run: nothing was lost, nothing trained twice, no step is missing, and the
servers served what was trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from tests.whole_run.journal import Entry, Outcome, Submission

NOISE = 1e-4
"""Bound on |served - trained logprob| in float32: sixty times the measured value."""
_NAMED = 5


@dataclass(frozen=True)
class Evidence:
    """Args:
    taken: the batches that trainers took, with those that a kill undid
    submissions: of all environments
    queued: groups in run-api's queue at a moment when every batch was acknowledged
    sequences: of every batch, if it is known
    records: the metrics of each step; the trainer of the soak has none
    """

    taken: Sequence[Entry]
    submissions: Sequence[Submission]
    queued: int | None = None
    sequences: int | None = None
    records: Sequence[Entry] = ()

    def digests(self, outcome: Outcome) -> set[str]:
        return {entry.digest for entry in self.submissions if entry.outcome == outcome}

    def line(self) -> dict[int, Entry]:
        """The surviving steps: for each number the last one taken."""
        return {entry["step"]: entry for entry in self.taken}

    def trained(self) -> list[str]:
        """All trained groups in order, with repeats."""
        return [group for entry in self.line().values() for group in entry["groups"]]


def judge(evidence: Evidence) -> list[str]:
    """A sentence for every broken promise; empty if none was broken."""
    found = (_on_groups, _on_queue, _on_batches, _on_versions, _on_records)
    # One wrong batch usually makes all later ones wrong.
    return [problem for look in found for problem in islice(look(evidence), _NAMED)]


def _on_groups(evidence: Evidence) -> Iterator[str]:
    trained = Counter(evidence.trained())
    submitted = Counter(entry.digest for entry in evidence.submissions)
    yield from _listed("submitted under one digest twice", _repeated(submitted))
    yield from _listed("doubled: trained more than once", _repeated(trained))
    invented = trained.keys() - submitted.keys()
    yield from _listed("invented: trained and never submitted", invented)
    refused = evidence.digests(Outcome.REFUSED)
    yield from _listed("refused and trained", refused & trained.keys())


def _on_queue(evidence: Evidence) -> Iterator[str]:
    """It holds what is acknowledged and not trained, and perhaps what is unanswered."""
    queued, trained = evidence.queued, set(evidence.trained())
    if queued is None:
        return
    waiting = evidence.digests(Outcome.ACKNOWLEDGED) - trained
    unanswered = len(evidence.digests(Outcome.UNANSWERED) - trained)
    if queued < len(waiting):
        yield from _listed(f"lost: not trained, and the queue holds {queued} groups", waiting)
    if queued > len(waiting) + unanswered:
        yield (
            f"the queue holds {queued} groups, but {len(waiting)} acknowledged and {unanswered} "
            "unanswered ones are not trained"
        )


def _on_batches(evidence: Evidence) -> Iterator[str]:
    line = evidence.line()
    yield from _listed("steps that are missing", set(range(1, max(line, default=0))) - line.keys())
    size = {entry.digest: entry.sequences for entry in evidence.submissions}
    contents: dict[int, object] = {}
    for entry in evidence.taken:
        batch, content = entry["batch"], (entry["groups"], entry.get("content"))
        if batch != entry["step"]:
            yield f"batch {batch} was trained as step {entry['step']}"
        if contents.setdefault(batch, content) != content:
            yield f"batch {batch} was delivered again with another content"
        held = sum(size.get(group, 0) for group in entry["groups"])
        if evidence.sequences not in (None, held):
            yield f"batch {batch} holds {held} sequences instead of {evidence.sequences}"


def _on_versions(evidence: Evidence) -> Iterator[str]:
    """A trainer of this run published the weights that sampled each completion."""
    epochs = {entry.get("epoch") for entry in evidence.taken}
    for entry in evidence.taken:
        versions = entry.get("versions")
        foreign = [v for v in versions or () if v[0] not in epochs or v[1] > entry["step"]]
        if foreign or versions == []:
            yield f"step {entry['step']} trains on completions of versions {foreign}"


def _on_records(evidence: Evidence) -> Iterator[str]:
    steps = [record["step"] for record in evidence.records]
    if steps != list(range(1, len(steps) + 1)):
        yield f"the recorded steps are {steps}"
    for record in evidence.records:
        if not (difference := record.get("alignment/probe_max", 0.0)) < NOISE:  # or NaN
            yield f"the served weights were others than the trained: {difference}"


def _repeated(counts: Counter[str]) -> set[str]:
    return {digest for digest, count in counts.items() if count > 1}


def _listed(what: str, found: Collection[object]) -> Iterator[str]:
    if found:
        named = ", ".join(map(str, sorted(found)[:_NAMED]))
        more = ", …" if len(found) > _NAMED else ""
        yield f"{what}: {len(found)} ({named}{more})"
