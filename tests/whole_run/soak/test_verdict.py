"""The verdict on invented journals: a kept promise, and every way to break it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from tests.whole_run.journal import Entry, Outcome, Submission
from tests.whole_run.soak.test_soak import HITS, missing
from tests.whole_run.verdict import Evidence, judge


def submission(digest: str, outcome: Outcome = Outcome.ACKNOWLEDGED) -> Submission:
    return Submission(digest, sequences=2, outcome=outcome)


def taken(*batches: str, **changes: Any) -> list[Entry]:
    return [
        {"step": n, "batch": n, "epoch": 1, "groups": list(b), "versions": [[1, 0]]} | changes
        for n, b in enumerate(batches, start=1)
    ]


def record(step: int, probe_max: float = 1e-6) -> Entry:
    return {"step": step, "alignment/probe_max": probe_max}


FIRST, SECOND, THIRD = taken("ab", "ce", "dg")
KEPT = Evidence(
    sequences=4,
    submissions=[
        *map(submission, "abcdg"),
        submission("e", Outcome.UNANSWERED),
        submission("f", Outcome.UNANSWERED),
        submission("h", Outcome.REFUSED),
    ],
    taken=[FIRST, SECOND, SECOND, THIRD],
    queued=0,
    records=[record(1), record(2), record(3)],
)
"""One batch was delivered twice, and one of two unanswered groups was trained."""


def test_a_kept_promise_has_no_problems() -> None:
    assert judge(KEPT) == []


OTHER = SECOND | {"groups": ["e", "c"]}
TWICE = [*KEPT.submissions, submission("a", Outcome.UNANSWERED)]
OTHER_WEIGHTS = "the served weights were others than the trained"
FOREIGN = "step 3 trains on completions of versions"
BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"taken": [FIRST, SECOND]}, "lost: not trained, and the queue holds 0 groups: 2 (d, g)"),
    ({"taken": taken("ab", "ce", "dg", "ab")}, "doubled: trained more than once: 2 (a, b)"),
    ({"taken": taken("ab", "ce", "dg", "ee")}, "doubled: trained more than once: 1 (e)"),
    ({"taken": taken("ab", "ce", "dg", "xy")}, "invented: trained and never submitted: 2 (x, y)"),
    ({"submissions": []}, "invented: trained and never submitted: 6 (a, b, c, d, e, …)"),
    ({"taken": taken("ab", "ce", "dg", "fh")}, "refused and trained: 1 (h)"),
    ({"taken": [FIRST, THIRD]}, "steps that are missing: 1 (2)"),
    ({"taken": [FIRST, SECOND, THIRD | {"batch": 5}]}, "batch 5 was trained as step 3"),
    ({"taken": taken("ab", "ceg", "d")}, "batch 2 holds 6 sequences instead of 4"),
    ({"taken": [FIRST, SECOND, OTHER, THIRD]}, "batch 2 was delivered again with another content"),
    ({"submissions": TWICE}, "submitted under one digest twice: 1 (a)"),
    ({"taken": [FIRST, SECOND, THIRD | {"versions": [[2, 0]]}]}, f"{FOREIGN} [[2, 0]]"),
    ({"taken": [FIRST, SECOND, THIRD | {"versions": [[1, 4]]}]}, f"{FOREIGN} [[1, 4]]"),
    ({"taken": [FIRST, SECOND, THIRD | {"versions": []}]}, f"{FOREIGN} []"),
    ({"records": [record(1), record(3)]}, "the recorded steps are [1, 3]"),
    ({"records": [record(1, 0.5)]}, f"{OTHER_WEIGHTS}: 0.5"),
    ({"records": [record(1), record(2, math.nan)]}, f"{OTHER_WEIGHTS}: nan"),
]


@pytest.mark.parametrize(("changes", "problem"), BROKEN)
def test_what_is_wrong_is_named(changes: dict[str, Any], problem: str) -> None:
    assert problem in judge(replace(KEPT, **changes))


@pytest.mark.parametrize(("queued", "is_right"), [(1, False), (2, True), (3, True), (4, False)])
def test_the_queue_holds_what_is_acknowledged_and_perhaps_what_is_unanswered(
    queued: int, is_right: bool
) -> None:
    found = judge(replace(KEPT, taken=[FIRST, SECOND], queued=queued))
    assert any("the queue holds" in problem for problem in found) is not is_right


def test_a_soak_without_a_kind_of_hit_or_a_redelivery_shows_nothing() -> None:
    counts = dict.fromkeys(missing({}, {}), 1)
    assert {hit.kind for hit in HITS} < counts.keys()
    assert missing(counts, {}) == []
    assert missing(counts | {"batches delivered again": 0}, {}) == ["batches delivered again"]
