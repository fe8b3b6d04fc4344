"""The verdict on evidence made up by hand: promises kept, and every way in which they may break."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.soak.journal import Delivered, Outcome
from tests.soak.trained_line import TrainedBatch
from tests.soak.verdict import Evidence, LeftOver, Submission, judge

BOUND_S = 30.0


def submission(digest: str, outcome: Outcome = Outcome.ACKNOWLEDGED) -> Submission:
    return Submission(digest, sequences=2, outcome=outcome)


def delivered(after: int, id_: int, content: str) -> Delivered:
    return Delivered(life=1, after=after, id=id_, content=content)


KEPT = Evidence(
    batch_size=4,
    submissions=[
        *map(submission, "abcd"),
        submission("e", Outcome.UNANSWERED),
        submission("f", Outcome.UNANSWERED),
        submission("g"),
        submission("h", Outcome.WANTED_REFUSAL),
    ],
    line=[
        TrainedBatch(id=1, digests=["a", "b"]),
        TrainedBatch(id=2, digests=["c", "e"]),
        TrainedBatch(id=3, digests=["d", "g"]),
    ],
    deliveries=[
        delivered(0, 1, "ab"),
        delivered(1, 2, "ce"),
        delivered(0, 1, "ab"),
        delivered(1, 2, "ce"),
        delivered(2, 3, "dg"),
    ],
    left_over=LeftOver(queued=1, acknowledged=1, unanswered=1),
    longest_waits_s={"submit": 29.0},
)
"""Two batches were delivered again; of two groups without an answer, one was trained."""


def line(*batches: str) -> list[TrainedBatch]:
    return [TrainedBatch(id=i, digests=list(b)) for i, b in enumerate(batches, start=1)]


def test_kept() -> None:
    assert judge(KEPT, BOUND_S) == []


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        pytest.param(
            replace(KEPT, line=line("ab", "ce")),
            "lost: acknowledged and never trained: 2 groups (d, g)",
            id="lost at the end",
        ),
        pytest.param(
            replace(KEPT, line=line("ab", "ce", "df")),
            "lost: acknowledged and never trained: 1 groups (g)",
            id="lost, another in its place",
        ),
        pytest.param(
            replace(KEPT, line=line("ab", "ce", "dg", "ab")),
            "doubled: trained more than once: 2 groups (a, b)",
            id="a batch twice",
        ),
        pytest.param(
            replace(KEPT, line=line("ab", "ce", "dg", "ee")),
            "doubled: trained more than once: 1 groups (e)",
            id="a group without an answer twice",
        ),
        pytest.param(
            replace(KEPT, line=line("ab", "ce", "dg", "xy")),
            "invented: trained and never submitted: 2 groups (x, y)",
            id="invented",
        ),
        pytest.param(
            replace(KEPT, line=line("ab", "ce", "dg", "fh")),
            "refused and trained: 1 groups (h)",
            id="refused and trained",
        ),
        pytest.param(
            replace(KEPT, submissions=[*KEPT.submissions, submission("z", Outcome.REFUSED)]),
            "refused without need: 1 groups (z)",
            id="refused",
        ),
        pytest.param(
            replace(KEPT, submissions=[*KEPT.submissions, submission("a", Outcome.UNANSWERED)]),
            "submitted under one digest twice: 1 groups (a)",
            id="groups that are not unique prove nothing",
        ),
        pytest.param(
            replace(KEPT, left_behind={"queued_groups": 3, "queued_bytes": 0}),
            "queued_groups is 3 after everything was trained and acknowledged",
            id="left in the queue",
        ),
        pytest.param(
            replace(KEPT, line=[KEPT.line[0], KEPT.line[2], KEPT.line[1]]),
            "batch 3 was trained as step 2: ids are not 1, 2, 3, …",
            id="out of order",
        ),
        pytest.param(
            replace(KEPT, line=line("ab", "ceg", "d")),
            "batch 2 holds 6 sequences instead of 4",
            id="a batch too large",
        ),
        pytest.param(
            replace(KEPT, deliveries=[*KEPT.deliveries, delivered(3, 2, "ce")]),
            "asked for the batch after 3, the trainer got 2",
            id="handed out after it was acknowledged",
        ),
        pytest.param(
            replace(KEPT, deliveries=[*KEPT.deliveries, delivered(3, 5, "xy")]),
            "asked for the batch after 3, the trainer got 5",
            id="a batch left out",
        ),
        pytest.param(
            replace(KEPT, deliveries=[*KEPT.deliveries, delivered(1, 2, "ec")]),
            "batch 2 was delivered again with another content",
            id="delivered again, changed",
        ),
        pytest.param(
            replace(KEPT, longest_waits_s={"submit": 29.0, "register": 30.5}),
            "register: a wait of 30.5 s, beyond 30 s",
            id="a long wait",
        ),
        pytest.param(
            replace(KEPT, left_over=LeftOver(queued=0, acknowledged=1, unanswered=5)),
            "the queue held 0 groups while 1 acknowledged and 5 unanswered ones were not trained",
            id="missing in the queue",
        ),
        pytest.param(
            replace(KEPT, left_over=None),
            "the run ended early: whether groups were lost is not known",
            id="no end",
        ),
        pytest.param(
            replace(KEPT, incidents=["run-api-1 ended with status 1"]),
            "run-api-1 ended with status 1",
            id="an incident",
        ),
    ],
)
def test_broken(broken: Evidence, problem: str) -> None:
    assert problem in judge(broken, BOUND_S)


def test_many_lost_groups_are_counted_and_some_of_them_named() -> None:
    submissions = [submission(f"{number:02}") for number in range(40)]
    evidence = replace(KEPT, submissions=submissions, line=[], deliveries=[])
    assert judge(evidence, BOUND_S) == [
        "lost: acknowledged and never trained: 40 groups (00, 01, 02, 03, 04, …)"
    ]


@pytest.mark.parametrize(("queued", "is_right"), [(1, False), (2, True), (3, True), (4, False)])
def test_the_rest_of_the_queue(queued: int, is_right: bool) -> None:
    left_over = replace(KEPT, line=line("ab", "ce")).look_at_queue(queued)
    assert left_over == LeftOver(queued, acknowledged=2, unanswered=1)
    assert (list(left_over.problems()) == []) is is_right


def test_broken_batches_are_counted_and_some_of_them_named() -> None:
    evidence = replace(KEPT, line=line(*["a"] * 10))
    problems = judge(evidence, BOUND_S)
    assert [problem for problem in problems if problem.startswith("batch")] == [
        f"batch {id_} holds 2 sequences instead of 4" for id_ in range(1, 6)
    ]
    assert "and 5 more of this kind" in problems
