"""Batches without a usable group are skipped. The run ends if all environments have left, and
refused groups are named; a fake clock replaces waiting."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from structlog.testing import capture_logs

from grpo_core.clients.run_api import LeasedBatch
from grpo_core.errors import ServiceUnavailable
from grpo_core.tree.objectives import GRPO
from grpo_core.wire.policy_version import PolicyVersion
from grpo_core.wire.run_api import EnvironmentCount
from grpo_core.wire.scored_group import ScoredGroup
from grpo_trainer.data.batches import (
    BatchSource,
    EnvironmentWatch,
    Position,
    SkippedBatch,
)
from grpo_trainer.data.collate import Batch
from grpo_trainer.data.filter import VersionHistory
from grpo_trainer.errors import DuplicatedBatch, NoEnvironmentLeft, StaleData
from tests.unit.trainer.groups import LIMITS, good, in_order, sampled_by

NOBODY_YET = EnvironmentCount(registered=0, connected=0)
GONE = EnvironmentCount(registered=2, connected=0)
BACK = EnvironmentCount(registered=3, connected=1)


def test_environments_that_left_have_the_deadline_to_come_back() -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    watch = EnvironmentWatch(60.0, clock=lambda: now[0])
    with capture_logs() as logs:
        watch.wait_started()
        for _ in range(2):  # environments of an earlier start; the new ones are not up yet
            watch.check(GONE)
            sleep(1000.0)
        watch.wait_ended()  # one has sent a batch
        watch.wait_started()
        for count, then_s in (
            *((NOBODY_YET, 1000.0), (GONE, 59.0), (GONE, 0.5)),
            *((BACK, 1000.0), (GONE, 59.0), (GONE, 0.0)),
        ):
            watch.check(count)
            sleep(then_s)
        with watch.suspended():
            sleep(1000.0)
        watch.check(GONE)
        sleep(1.0)
        with pytest.raises(
            NoEnvironmentLeft, match=r"2 environments that registered in this run.* within 60 s"
        ):
            watch.check(GONE)
    assert [entry["event"] for entry in logs] == ["environments.disconnected"] * 2


def refused(groups: int, reason: str, connected: int = 1) -> EnvironmentCount:
    return EnvironmentCount(
        registered=1, connected=connected, refused_groups=groups, last_refusal=reason
    )


def test_refused_groups_are_named_once_in_each_wait_in_which_their_number_has_risen() -> None:
    now = [0.0]
    watch = EnvironmentWatch(60.0, clock=lambda: now[0])
    waits = [
        [refused(0, ""), refused(2, "first"), refused(9, "second")],
        [refused(9, "second"), refused(9, "second")],
        [refused(10, "third")],  # refused before the wait began
    ]
    with capture_logs() as logs:
        for counts in waits:
            watch.wait_started()
            for count in counts:
                watch.check(count)
                now[0] += 1000.0  # environments that poll are not gone
            watch.wait_ended()
    told = [(entry["event"], entry["refused_groups"], entry["last_refusal"]) for entry in logs]
    assert told == [("groups.refused", 2, "first"), ("groups.refused", 1, "third")]
    assert all("correct the environment" in entry["hint"] for entry in logs)


def test_environments_that_left_after_refusals_are_named_with_the_last_reason() -> None:
    now = [0.0]
    watch = EnvironmentWatch(60.0, clock=lambda: now[0])
    watch.wait_started()
    watch.check(refused(0, ""))
    watch.check(refused(5, "scores.1: not finite", connected=0))
    now[0] += 60.0
    with pytest.raises(NoEnvironmentLeft, match=r"registered: 5; the last reason: scores\.1: not"):
        watch.check(refused(5, "scores.1: not finite", connected=0))


OLD, YOUNG = PolicyVersion(2, 6), PolicyVersion(2, 8)
AT = Position(step=9, batch_id=4, epoch=2)


def source_of(
    batches: Sequence[list[ScoredGroup]],
    under: Any,
    batch_deadline_s: float = 60.0,
    save_path: Path = Path("/nowhere"),
    clock: Callable[[], float] = time.monotonic,
) -> BatchSource:
    """A `BatchSource` of these batches; ids continue that of `AT`. Then there is no batch.

    Args:
        under: served version when run-api received each group of every batch
    """
    leased = iter(LeasedBatch(5 + i, groups, under) for i, groups in enumerate(batches))

    def poll(*_: object) -> LeasedBatch | EnvironmentCount:
        return next(leased, NOBODY_YET)

    settings: Any = SimpleNamespace(
        batch_deadline_s=batch_deadline_s,
        environment_return_deadline_s=60.0,
        max_staleness=2,
        steps=AT.step + 3,
        save_path=save_path,
        seq_len=100,
        micro_batch_tokens=2,
        resolved_objective=GRPO,
    )
    api: Any = SimpleNamespace(poll=poll, run_uuid="run", base_url="http://r")
    history = VersionHistory(PolicyVersion(2, 6))
    return BatchSource(settings, api, LIMITS, history, in_order, clock)


def taken_from(source: BatchSource) -> Batch:
    taken = source.look(AT)
    assert isinstance(taken, Batch)
    return taken


def test_the_next_batch_is_requested_once_unless_it_is_the_last_one() -> None:
    source = source_of([[good(1)]], under=[YOUNG])
    requested: list[int] = []
    source.api.request_ahead = lambda left, _: requested.append(left)
    for step in (AT.step, *range(AT.step, source.settings.steps)):
        source.request_next(replace(AT, step=step))
    assert requested == [2]
    taken_from(source)
    source.request_next(AT)
    assert requested == [2, 2]


def test_a_batch_prepared_ahead_is_collated_again_only_if_a_group_became_stale() -> None:
    young, old = sampled_by(30, (2, 8), (2, 8)), sampled_by(11, (2, 6), (2, 6))
    for groups, sizes in (([good(1), young], [4]), ([old, young], [4, 2])):
        source = source_of([], under=[])
        source.collate = Mock(side_effect=source.collate)
        ahead = LeasedBatch(5, groups, [None, None])
        source.prepare_ahead(ahead)
        source.api.poll = Mock(return_value=ahead)
        taken = taken_from(source)
        assert [len(call.args[0]) for call in source.collate.call_args_list] == sizes
        assert len(taken.sequences) == sizes[-1]


def test_batches_of_stale_or_unusable_groups_are_passed_over_by_name() -> None:
    old = [good(1), sampled_by(11, (2, 6), (2, 6))]
    bad = [good(2), good(3).model_copy(update={"inference_logprobs": None})]
    source = source_of([old, bad, [sampled_by(30, (2, 8), (2, 8)), good(31)]], under=[OLD, YOUNG])
    with capture_logs() as logs:
        skipped = [source.look(AT) for _ in range(2)]
        taken = taken_from(source)
    assert skipped == [SkippedBatch(5), SkippedBatch(6)]
    assert taken.batch_id == 7
    assert (len(taken.groups), taken.dropped["stale"], taken.dropped["unusable"]) == (2, 3, 1)
    named = [e["batch_id"] for e in logs if e["event"] == "batch.skipped"]
    assert named == [5, 6]


def test_a_run_that_gets_only_stale_groups_ends() -> None:
    source = source_of([[good(marker)] for marker in range(9)], under=[OLD], batch_deadline_s=0.0)
    with pytest.raises(StaleData, match=r"in 0 s .* staleness of 1 groups is above"):
        source.look(AT)


def test_the_wait_for_a_batch_ends_without_the_time_in_which_servers_are_away() -> None:
    now = [0.0]
    source = source_of([[good(1)]], under=[None], batch_deadline_s=60.0, clock=lambda: now[0])
    taken_from(source)
    assert source.look(AT) is None
    now[0] += 59.0
    with source.suspended():
        now[0] += 1000.0
    assert source.look(AT) is None
    now[0] += 1.0
    with pytest.raises(ServiceUnavailable, match=r"no batch within 60 s; check in http://r/status"):
        source.look(AT)


def test_a_batch_that_arrives_twice_is_passed_over_by_the_next_start(tmp_path: Path) -> None:
    batches = [[good(1), good(2)], [good(1), good(2)], [good(3), good(4)]]
    source, again = (source_of(batches, under=[None] * 2, save_path=tmp_path) for _ in range(2))
    assert taken_from(source).batch_id == 5
    with pytest.raises(DuplicatedBatch):
        source.look(AT)
    assert taken_from(again).batch_id == 5
    assert again.look(AT) == SkippedBatch(6)
    assert taken_from(again).batch_id == 7


def test_a_teachers_logprobs_which_are_not_used_are_named_once() -> None:
    taught = good(1).model_copy(update={"distill_logprobs": [[[-0.1]]]})
    source = source_of([], under=[])
    with capture_logs() as logs:
        for number, groups in enumerate([[good(0)], [good(0), taught], [taught]]):
            source.prepare_ahead(LeasedBatch(number, groups, [None] * len(groups)))
    (told,) = (entry for entry in logs if entry["event"] == "fields.unused")
    assert told["fields"] == ["distill_logprobs"]
    assert "--distill-coef" in told["hint"]
