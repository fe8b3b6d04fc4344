"""Batches of nothing but stale groups are passed over: named, counted, and not without end."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from grpo_core.run_api_client import LeasedBatch
from grpo_core.wire import PolicyVersion, ScoredGroup
from grpo_trainer import loop
from grpo_trainer.errors import StaleData
from grpo_trainer.intake import Doorkeeper
from grpo_trainer.staleness import Lineage
from grpo_trainer.trainer_state import Position
from tests.unit.trainer.groups import VOCABULARY
from tests.unit.trainer.test_intake import good

AT = Position(step=9, batch_id=4, epoch=1)


def sampled_at(step: int, marker: int) -> ScoredGroup:
    return good(marker, group_overrides={"policy_version": [[[1, step], [1, step]]] * 2})


def run_of(
    batches: Sequence[list[ScoredGroup]],
    batch_deadline_s: float = 60.0,
    received_under: list[PolicyVersion | None] | None = None,
) -> Any:
    """As much of `loop.Run` as taking a batch needs; ids go on after that of `AT`.

    Args:
        received_under: of each batch's groups; None: nobody knows.
    """
    leased = iter(
        LeasedBatch(5 + i, groups, received_under or [None] * len(groups))
        for i, groups in enumerate(batches)
    )
    passed_over: list[Position] = []
    asked: list[int] = []

    def next_batch(_deadline_s: float, _meanwhile: object, batches_left: int) -> LeasedBatch:
        asked.append(batches_left)
        return next(leased)

    return SimpleNamespace(
        api=SimpleNamespace(next_batch=next_batch, asked=asked),
        sync=SimpleNamespace(tend=lambda: None),
        saver=SimpleNamespace(batch_passed_over=passed_over.append, passed_over=passed_over),
        settings=SimpleNamespace(
            batch_deadline_s=batch_deadline_s, max_staleness=2, training_steps=AT.step + 3
        ),
        door=Doorkeeper(VOCABULARY, Lineage(PolicyVersion(1, 0)), max_staleness=2),
    )


def test_the_next_batch_with_something_young_is_taken() -> None:
    old = [[sampled_at(1, m), sampled_at(2, m + 10)] for m in (1, 2)]
    run = run_of([*old, [sampled_at(8, 30), sampled_at(5, 31)]])
    with capture_logs() as logs:
        taken = loop.take_batch(run, AT)
    assert taken.batch_id == 7
    assert (len(taken.intake.groups), taken.intake.stale_groups) == (1, 5)
    assert [(p.step, p.batch_id) for p in run.saver.passed_over] == [(9, 5), (9, 6)]
    assert run.api.asked == [3, 3, 3]  # no step is taken on what is passed over
    assert [entry["batch_id"] for entry in logs if entry["log_level"] == "warning"] == [5, 6]


def test_what_run_api_knows_of_its_groups_reaches_the_door() -> None:
    run = run_of([[good(1), good(2)]], received_under=[PolicyVersion(1, 3), PolicyVersion(1, 8)])
    intake = loop.take_batch(run, AT).intake
    assert [one.version_bound for one in intake.groups] == [PolicyVersion(1, 8)]
    assert intake.stale_groups == 1


def test_it_does_not_go_on_for_ever() -> None:
    run = run_of([[sampled_at(1, marker)] for marker in range(9)], batch_deadline_s=0.0)
    with pytest.raises(StaleData, match="1 groups came in 0 s, and all are more than"):
        loop.take_batch(run, AT)
