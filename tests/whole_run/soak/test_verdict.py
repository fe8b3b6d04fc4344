"""The verdict on invented records: a kept promise, and every way to break it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.whole_run.soak.hits import HITS
from tests.whole_run.soak.journal import Delivered, Outcome, Submission, TrainedBatch
from tests.whole_run.soak.verdict import Evidence, LeftOver, judge, missing


def submission(digest: str, outcome: Outcome = Outcome.ACKNOWLEDGED) -> Submission:
    return Submission(digest, sequences=2, outcome=outcome)


def line(*batches: str) -> list[TrainedBatch]:
    return [TrainedBatch(id=step, digests=list(b)) for step, b in enumerate(batches, start=1)]


KEPT = Evidence(
    batch_size=4,
    submissions=[
        *map(submission, "abcdg"),
        submission("e", Outcome.UNANSWERED),
        submission("f", Outcome.UNANSWERED),
        submission("h", Outcome.REFUSED),
    ],
    line=line("ab", "ce", "dg"),
    deliveries=[
        Delivered(after=0, id=1, content="ab"),
        Delivered(after=1, id=2, content="ce"),
        Delivered(after=1, id=2, content="ce"),
        Delivered(after=2, id=3, content="dg"),
    ],
    left_over=LeftOver(queued=1, acknowledged=1, unanswered=1),
)
"""One batch was delivered twice, and one of two unanswered groups was trained."""


def test_a_kept_promise_has_no_problems() -> None:
    assert judge(KEPT) == []


def delivered(after: int, batch: int, content: str) -> list[Delivered]:
    return [*KEPT.deliveries, Delivered(after=after, id=batch, content=content)]


TWICE = [*KEPT.submissions, submission("a", Outcome.UNANSWERED)]
BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"line": line("ab", "ce")}, "lost: acknowledged and never trained: 2 groups (d, g)"),
    ({"line": line("ab", "ce", "dg", "ab")}, "doubled: trained more than once: 2 groups (a, b)"),
    ({"line": line("ab", "ce", "dg", "ee")}, "doubled: trained more than once: 1 groups (e)"),
    (
        {"line": line("ab", "ce", "dg", "xy")},
        "invented: trained and never submitted: 2 groups (x, y)",
    ),
    ({"line": line("ab", "ce", "dg", "fh")}, "refused and trained: 1 groups (h)"),
    ({"line": [*line("ab"), *line("", "ce")[1:], *line("dg")]}, "batch 1 was trained as step 3"),
    ({"line": line("ab", "ceg", "d")}, "batch 2 holds 6 sequences instead of 4"),
    ({"deliveries": delivered(3, 5, "xy")}, "asked for the batch after 3, the trainer got 5"),
    ({"deliveries": delivered(1, 2, "ec")}, "batch 2 was delivered again with another content"),
    ({"submissions": TWICE}, "submitted under one digest twice: 1 groups (a)"),
    ({"left_over": None}, "the soak ended early: whether groups were lost is unknown"),
    (
        {"left_behind": {"queued_groups": 3, "queued_bytes": 0}},
        "queued_groups is 3 after everything was trained and acknowledged",
    ),
]


@pytest.mark.parametrize(("changes", "problem"), BROKEN)
def test_what_is_wrong_is_named(changes: dict[str, Any], problem: str) -> None:
    assert problem in judge(replace(KEPT, **changes))


@pytest.mark.parametrize(("queued", "is_right"), [(1, False), (2, True), (3, True), (4, False)])
def test_the_queue_holds_what_is_acknowledged_and_perhaps_what_is_unanswered(
    queued: int, is_right: bool
) -> None:
    evidence = replace(KEPT, line=line("ab", "ce"))
    left_over = evidence.look_at_queue(queued)
    assert left_over == LeftOver(queued, acknowledged=2, unanswered=1)
    found = judge(replace(evidence, left_over=left_over))
    assert any(problem.startswith("the queue held") for problem in found) is not is_right


def test_a_soak_without_a_kind_of_hit_or_a_redelivery_shows_nothing() -> None:
    counts = dict.fromkeys(missing({}, {}), 1)
    assert {hit.kind for hit in HITS} < counts.keys()
    assert missing(counts, {}) == []
    assert missing(counts | {"batches delivered again": 0}, {}) == ["batches delivered again"]
