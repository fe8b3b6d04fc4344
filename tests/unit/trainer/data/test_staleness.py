"""Stale groups are dropped and counted, also over several batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from structlog.testing import capture_logs

from grpo_core.clients.run_api_answers import LeasedBatch
from grpo_core.wire.policy_version import PolicyVersion
from grpo_core.wire.scored_group import ScoredGroup
from grpo_trainer.data.batches import BatchSource, Position
from grpo_trainer.data.collate import collate
from grpo_trainer.data.filter import GroupFilter, VersionHistory
from grpo_trainer.errors import StaleData
from grpo_trainer.objectives import GRPO
from tests.unit.trainer.groups import LIMITS, filtered, good, in_order, sampled_by

RESUMED = VersionHistory(PolicyVersion(2, 6), begun_as=PolicyVersion(1, 6))
OLD, YOUNG = PolicyVersion(2, 6), PolicyVersion(2, 8)


@pytest.mark.parametrize(
    ("version", "step", "age"),
    [
        ((2, 6), 6, 0),
        ((2, 6), 9, 3),
        ((3, 8), 9, 1),  # the server returned under a new epoch
        ((1, 6), 9, 3),
        ((1, 5), 7, 2),  # the same age as without a restart
        ((1, 8), 9, 5),  # two lost steps, and three of this trainer
    ],
)
def test_the_age_of_a_version(version: tuple[int, int], step: int, age: int) -> None:
    assert RESUMED.age(PolicyVersion(*version), step) == age


def group_filter(max_staleness: int | None) -> GroupFilter:
    return GroupFilter(LIMITS, RESUMED, max_staleness)


@pytest.mark.parametrize(("max_staleness", "stale"), [(None, 0), (0, 2), (2, 1)])
def test_a_group_is_as_old_as_its_oldest_completion(max_staleness: int | None, stale: int) -> None:
    groups = [
        sampled_by(1, (2, 9), (2, 9)),
        sampled_by(2, (2, 9), (2, 8)),
        sampled_by(3, (2, 8), (1, 6)),
        good(4),  # unknown version
    ]
    usable, dropped = filtered(group_filter(max_staleness), groups, step=9)
    assert (len(usable), dropped["stale"]) == (4 - stale, stale)


def test_a_group_without_a_version_is_as_old_as_the_one_that_was_served_when_it_came() -> None:
    named = [sampled_by(3, (2, 8), (2, 8)), sampled_by(4, (2, 6), (2, 6))]
    groups = [good(1), good(2), *named, good(5)]
    under = [OLD, YOUNG, OLD, YOUNG, None]  # a version that the group names has priority
    usable, dropped = filtered(group_filter(2), groups, 9, under)
    assert [one.version_bound for one in usable] == [YOUNG, None, None]
    assert dropped["stale"] == 2


def test_a_bound_is_no_version_that_could_be_fresh() -> None:
    """`RolloutCheck` relies on versions: both groups arrived while their weights were served."""
    groups = [good(1), sampled_by(2, (2, 9), (2, 9))]
    usable, _ = filtered(group_filter(None), groups, 9, [PolicyVersion(2, 9)] * 2)
    batch = collate(usable, 100, 2, in_order, GRPO)
    assert [origin.version for origin in batch.origins] == [None] * 2 + [PolicyVersion(2, 9)] * 2
    assert batch.stats.first_versions == [PolicyVersion(2, 9)] * 2
    assert batch.stats.version_bounds == [PolicyVersion(2, 9)] * 2
    assert batch.stats.bound_fraction == 0.5


AT = Position(step=9, batch_id=4, epoch=2)


def source_of(
    batches: Sequence[list[ScoredGroup]], under: Any, batch_deadline_s: float = 60.0
) -> BatchSource:
    """A `BatchSource` of these batches; ids continue that of `AT`.

    Args:
        under: served version when run-api received each group of every batch
    """
    leased = iter(LeasedBatch(5 + i, groups, under) for i, groups in enumerate(batches))

    def next_batch(*_: object) -> LeasedBatch:
        return next(leased)

    settings: Any = SimpleNamespace(
        batch_deadline_s=batch_deadline_s,
        environment_return_deadline_s=60.0,
        max_staleness=2,
        steps=AT.step + 3,
        save_path=Path("/nowhere"),
        seq_len=100,
        micro_batch_tokens=2,
        resolved_objective=GRPO,
    )
    api: Any = SimpleNamespace(next_batch=next_batch, run_uuid="run")
    return BatchSource(
        settings, api, Mock(), Mock(), lambda: None, LIMITS, history=RESUMED, cut=in_order
    )


def test_the_next_batch_is_requested_unless_it_is_the_last_one() -> None:
    source = source_of([], under=[])
    requested: list[int] = []
    source.api.request_ahead = lambda left, _: requested.append(left)
    for step in range(AT.step, source.settings.steps):
        source.request_next(replace(AT, step=step))
    assert requested == [2]


def test_a_batch_prepared_ahead_is_collated_again_only_if_a_group_became_stale() -> None:
    young, old = sampled_by(30, (2, 8), (2, 8)), sampled_by(11, (2, 6), (2, 6))
    for groups, sizes in (([good(1), young], [2]), ([old, young], [2, 1])):
        source = source_of([], under=[])
        source.collate = Mock(side_effect=source.collate)
        ahead = LeasedBatch(5, groups, [None, None])
        source.prepare_ahead(ahead)
        source.api.next_batch = Mock(return_value=ahead)
        taken = source.take(AT)
        assert [len(call.args[0]) for call in source.collate.call_args_list] == sizes
        assert len(taken.collated.origins) == 2 * sizes[-1]


def test_batches_of_stale_or_unusable_groups_are_passed_over_by_name() -> None:
    old = [good(1), sampled_by(11, (2, 6), (2, 6))]
    bad = [good(2), good(3).model_copy(update={"inference_logprobs": None})]
    source = source_of([old, bad, [sampled_by(30, (2, 8), (2, 8)), good(31)]], under=[OLD, YOUNG])
    with capture_logs() as logs:
        taken = source.take(AT)
    assert taken.batch_id == 7
    assert (len(taken.usable), taken.dropped["stale"], taken.dropped["unusable"]) == (2, 3, 1)
    skipped = [call.args[0] for call in source._skipped.call_args_list]
    assert [(at.step, at.batch_id) for at in skipped] == [(9, 5), (9, 6)]
    named = [e["batch_id"] for e in logs if e["event"] == "batch.skipped"]
    assert named == [5, 6]


def test_a_run_that_gets_only_stale_groups_ends() -> None:
    source = source_of([[good(marker)] for marker in range(9)], under=[OLD], batch_deadline_s=0.0)
    with pytest.raises(StaleData, match=r"in 0 s .* staleness of 1 groups is above"):
        source.take(AT)


def test_a_teachers_logprobs_which_are_not_used_are_named_once() -> None:
    taught = good(1).model_copy(update={"distill_logprobs": [[[-0.1]]]})
    source = source_of([], under=[])
    with capture_logs() as logs:
        for number, groups in enumerate([[good(0)], [good(0), taught], [taught]]):
            source.prepare_ahead(LeasedBatch(number, groups, [None] * len(groups)))
    (told,) = (entry for entry in logs if entry["event"] == "fields.unused")
    assert told["fields"] == ["distill_logprobs"]
