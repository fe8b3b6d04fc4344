"""The report: its table, its JSON, and whether the soak met what it is for."""

from __future__ import annotations

from typing import Any

import pytest

from tests.soak.faults import KINDS
from tests.soak.producer import ANSWERED_FROM_RECORD
from tests.soak.report import Report, missing_coverage
from tests.soak.verdict import LeftOver


def report(**changes: Any) -> Report:
    values = {
        "seed": 1,
        "appendfsync": "always",
        "seconds": 60.0,
        "problems": [],
        "submitted": 200,
        "acknowledged": 190,
        "unanswered": 10,
        "unanswered_and_trained": 5,
        "refused_on_purpose": 0,
        "trained": 195,
        "sequences_trained": 800,
        "batches_trained": 50,
        "batches_redelivered": 3,
        "left_over": LeftOver(queued=2, acknowledged=2, unanswered=0),
        "fillers": 8,
        "notes": {ANSWERED_FROM_RECORD: 4},
        "hits": dict.fromkeys(KINDS, 1),
        "redis_killed_with_fsync_pending": 0,
        "redis_killed_while_rewriting": 0,
        "aof_tails_cut": 0,
        "aof_delayed_fsyncs": 0,
        "longest_waits_s": {"submit": 3.25},
    }
    return Report.model_validate(values | changes)


def test_shows_the_verdict() -> None:
    assert str(report()).endswith("every acknowledged group was trained exactly once")
    assert str(report(problems=["lost"])).endswith("FAILED:\n- lost")


def test_comes_back_from_json() -> None:
    assert Report.model_validate_json(report().model_dump_json()) == report()


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({}, []),
        ({"hits": {}}, list(KINDS)),
        ({"trained": 59}, ["a trained group per second"]),
        ({"batches_redelivered": 0}, []),
        ({"batches_redelivered": 0, "seconds": 300.0, "trained": 300}, ["a batch delivered again"]),
        ({"unanswered": 0}, ["a group without an answer"]),
        ({"notes": {}}, [ANSWERED_FROM_RECORD]),
        ({"notes": {}, "hits": {}, "seconds": 10.0}, []),
    ],
)
def test_a_soak_that_met_nothing_shows_nothing(changes: dict[str, Any], missing: list[str]) -> None:
    expected = [f"never happened: {what}" for what in missing]
    met = report(**changes)
    assert missing_coverage(met, planned_s=met.seconds) == expected


def test_a_short_plan_that_took_longer_need_not_hold_every_hit() -> None:
    assert missing_coverage(report(hits={}), planned_s=30.0) == []
