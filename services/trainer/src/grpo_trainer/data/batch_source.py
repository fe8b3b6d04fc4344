"""Waits for the batch that the next step trains on."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import structlog

from grpo_core.clients.run_api import LeasedBatch, TrainerClient
from grpo_core.deadline import Deadline
from grpo_core.errors import GrpoError, LeasesFull
from grpo_core.wire.run_api import EnvironmentCount
from grpo_core.wire.scored_group import ScoredGroup
from grpo_trainer.checkpoint.saver import Saver
from grpo_trainer.checkpoint.state import Position
from grpo_trainer.config.trainer import TrainerSettings
from grpo_trainer.data.group_filter import FilteredBatch, GroupFilter
from grpo_trainer.data.quarantine import Quarantine
from grpo_trainer.errors import NoEnvironmentLeft, StaleData, UnusableGroup

log = structlog.get_logger()


@dataclass(frozen=True)
class TakenBatch:
    """One that can be trained on. `filtered.stale_groups` and `filtered.unusable_groups` count
    those of batches passed over too; `groups`: all of it, as it came."""

    batch_id: int
    groups: list[ScoredGroup]
    filtered: FilteredBatch


@dataclass(frozen=True)
class BatchSource:
    """Args:
    recover_server: called while the trainer waits
    saver: is told of batches that are passed over, and saves early if run-api asks for it
    """

    settings: TrainerSettings
    api: TrainerClient
    recover_server: Callable[[], None]
    group_filter: GroupFilter
    environments: EnvironmentWatch
    quarantine: Quarantine
    saver: Saver

    def take(self, position: Position) -> TakenBatch:
        """Wait for a batch of which something can be trained on.

        One whose groups are all stale or unusable, or that is in quarantine, is passed over: the
        next state holds its id, and with that it is acknowledged. No step is taken on it.

        Raises:
            StaleData: nothing else came for as long as a batch may take.
            UnusableGroup: see `GroupFilter`; the batch is in quarantine.
            DuplicatedBatch: see `GroupFilter`; and as `next_batch`.
        """
        settings = self.settings
        began, stale, unusable = time.monotonic(), 0, 0
        while True:
            leased = self.next_batch(position.batch_id, settings.steps - position.step)
            filtered = self._filtered(leased, position.step)
            stale, unusable = stale + filtered.stale_groups, unusable + filtered.unusable_groups
            if filtered.groups:
                counted = replace(filtered, stale_groups=stale, unusable_groups=unusable)
                return TakenBatch(leased.id, leased.groups, counted)
            position = self._pass_over(leased.id, position)
            log.warning(
                "batch.passed_over",
                batch_id=leased.id,
                stale_groups=filtered.stale_groups,
                unusable_groups=filtered.unusable_groups,
            )
            if filtered.stale_groups and time.monotonic() - began >= settings.batch_deadline_s:
                raise StaleData(
                    f"{stale} groups came in {settings.batch_deadline_s:g} s, and all are more "
                    f"than --max-staleness {settings.max_staleness} steps old. Let less data wait "
                    "(fewer or slower environments), or allow older data"
                )

    def next_batch(self, last_batch: int, batches_left: int) -> LeasedBatch:
        """Args:
            last_batch: id of the one taken before, 0 where this line of training begins
            batches_left: how many the run needs, with this one

        Raises:
            NoEnvironmentLeft: nobody is left to send it; and as `TrainerClient.next_batch`.
        """
        watch = self.environments
        watch.wait_started()
        recover = partial(watch.excluding, self.recover_server)
        deadline_s = self.settings.batch_deadline_s
        ask = partial(self.api.next_batch, deadline_s, recover, batches_left, watch.check)
        try:
            leased = ask()
        except LeasesFull as full:
            log.warning(
                "run-api asks for batches to be acknowledged; saving early", reason=str(full)
            )
            if not self.saver.release_batches():
                raise
            leased = ask()
        watch.wait_ended()
        if 0 < last_batch < leased.id - 1:
            log.warning(
                "batches are missing here: a state that this run does not go on from held them",
                first=last_batch + 1,
                last=leased.id - 1,
            )
        return leased

    def reject(self, taken: TakenBatch, position: Position, error: GrpoError) -> Position:
        """Keep a batch in quarantine, and go on behind it."""
        self.quarantine.add(taken.batch_id, taken.groups, position.step, error)
        return self._pass_over(taken.batch_id, position)

    def _filtered(self, leased: LeasedBatch, step: int) -> FilteredBatch:
        """Without groups where the batch is in quarantine."""
        if self.quarantine.holds(leased.id):
            return FilteredBatch([], unusable_groups=0, repeated_groups=0)
        try:
            return self.group_filter.filter(leased.groups, step, leased.received_under)
        except UnusableGroup as error:
            self.quarantine.add(leased.id, leased.groups, step, error)
            raise

    def _pass_over(self, batch_id: int, position: Position) -> Position:
        beyond = replace(position, batch_id=batch_id)
        self.saver.batch_passed_over(beyond)
        return beyond


class EnvironmentWatch:
    """Notices, while a batch is waited for, that no environment is left that could send one.

    Counts from the moment at which this trainer has seen one: after a start, environments of the
    run may still be on their way.

    Args:
        return_deadline_s: how long to wait for an environment once the last one has left
        clock: seconds
    """

    def __init__(
        self, return_deadline_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._return_deadline_s = return_deadline_s
        self._clock = clock
        self._deadline: Deadline | None = None
        self._has_waited = self._has_seen = False

    def wait_started(self) -> None:
        self._deadline, self._has_waited = None, False

    def wait_ended(self) -> None:
        """The batch came: an environment has sent it, unless it was there before the wait."""
        self._has_seen |= self._has_waited

    def check(self, environments: EnvironmentCount) -> None:
        """Raises `NoEnvironmentLeft` once all have been gone for the deadline. If none has ever
        registered, groups come from elsewhere."""
        self._has_waited = True
        self._has_seen |= environments.connected > 0
        if environments.connected or not environments.registered or not self._has_seen:
            self._deadline = None
        elif self._deadline is None:
            self._deadline = Deadline(self._return_deadline_s, self._clock)
            log.warning(
                "environments.left",
                registered=environments.registered,
                waits_s=self._return_deadline_s,
                more="--environment-return-deadline-s",
            )
        elif self._deadline.has_passed:
            raise NoEnvironmentLeft(
                f"no environment is connected to run-api: {environments.registered} registered in "
                f"this run, all have left or stopped polling, and none came back within "
                f"{self._return_deadline_s:g} s. Look at their logs for why they ended, and start "
                "them and the trainer again, or wait longer with --environment-return-deadline-s"
            )

    def excluding(self, work: Callable[[], None]) -> None:
        """Do not count the time of `work`: a server that restarts keeps environments away too."""
        with self._deadline.suspended() if self._deadline else nullcontext():
            work()
