"""Waits for the batch that the next step trains on."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import structlog

from grpo_core.clients.run_api import LeasedBatch, TrainerClient
from grpo_core.errors import LeasesFull
from grpo_core.wire import ScoredGroup
from grpo_trainer.checkpoint.saver import Saver
from grpo_trainer.checkpoint.state import Position
from grpo_trainer.config.trainer import TrainerSettings
from grpo_trainer.data.environment_watch import EnvironmentWatch
from grpo_trainer.data.group_filter import Doorkeeper, Intake
from grpo_trainer.data.quarantine import Quarantine
from grpo_trainer.errors import StaleData, UnusableGroup
from grpo_trainer.weight_sync.base import WeightSync

log = structlog.get_logger()


class Taker(Protocol):
    """What of a run has to do with its batches."""

    @property
    def settings(self) -> TrainerSettings: ...

    @property
    def api(self) -> TrainerClient: ...

    @property
    def sync(self) -> WeightSync: ...

    @property
    def door(self) -> Doorkeeper: ...

    @property
    def environments(self) -> EnvironmentWatch: ...

    @property
    def quarantine(self) -> Quarantine: ...

    @property
    def saver(self) -> Saver: ...


@dataclass(frozen=True)
class TakenBatch:
    """One that can be trained on. `intake.stale_groups` and `intake.unusable_groups` count those of
    batches passed over too; `groups`: all of it, as it came."""

    batch_id: int
    groups: list[ScoredGroup]
    intake: Intake


def take_batch(run: Taker, position: Position) -> TakenBatch:
    """Wait for a batch of which something can be trained on.

    One whose groups are all stale or unusable, or that is in quarantine, is done with: the next
    state holds its id, and with that it is acknowledged. No step is taken on it.

    Raises:
        StaleData: nothing else came for as long as a batch may take.
        UnusableGroup: see `Doorkeeper`; the batch is in quarantine.
        DuplicatedBatch: see `Doorkeeper`; and as `next_batch`.
    """
    began, last, stale, unusable = time.monotonic(), position.batch_id, 0, 0
    while True:
        leased = next_batch(run, last, run.settings.training_steps - position.step)
        intake = _admitted(run, leased, position.step)
        stale, unusable = stale + intake.stale_groups, unusable + intake.unusable_groups
        if intake.groups:
            counted = replace(intake, stale_groups=stale, unusable_groups=unusable)
            return TakenBatch(leased.id, leased.groups, counted)
        last = leased.id
        run.saver.batch_passed_over(replace(position, batch_id=last))
        log.warning(
            "batch.passed_over",
            batch_id=last,
            stale_groups=intake.stale_groups,
            unusable_groups=intake.unusable_groups,
        )
        if intake.stale_groups and time.monotonic() - began >= run.settings.batch_deadline_s:
            raise StaleData(
                f"{stale} groups came in {run.settings.batch_deadline_s:g} s, and all are more "
                f"than --max-staleness {run.settings.max_staleness} steps old. Let less data wait "
                "(fewer or slower environments), or allow older data"
            )


def _admitted(run: Taker, leased: LeasedBatch, step: int) -> Intake:
    """Without groups where the batch is in quarantine."""
    if run.quarantine.holds(leased.id):
        return Intake([], unusable_groups=0, repeated_groups=0)
    try:
        return run.door.admit(leased.groups, step, leased.received_under)
    except UnusableGroup as error:
        run.quarantine.keep(leased.id, leased.groups, step, error)
        raise


def next_batch(run: Taker, last_batch: int, batches_left: int) -> LeasedBatch:
    """Args:
        last_batch: id of the one taken before, 0 where this line of training begins
        batches_left: how many the run needs, with this one

    Raises:
        NoEnvironmentLeft: nobody is left to send it; and as `TrainerClient.next_batch`.
    """
    watch = run.environments
    watch.begin()
    tend = partial(watch.not_counting, run.sync.recover_server)
    deadline_s = run.settings.batch_deadline_s
    ask = partial(run.api.next_batch, deadline_s, tend, batches_left, watch.look)
    try:
        leased = ask()
    except LeasesFull as full:
        log.warning("run-api asks for batches to be acknowledged; saving early", reason=str(full))
        if not run.saver.release_batches():
            raise
        leased = ask()
    watch.end()
    if 0 < last_batch < leased.id - 1:
        log.warning(
            "batches are missing here: a state that this run does not go on from held them",
            first=last_batch + 1,
            last=leased.id - 1,
        )
    return leased
