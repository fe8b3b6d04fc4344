"""Fetches the batch for the next step from run-api, and skips batches that cannot be used."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, Self

import structlog

from grpo_core.clients.run_api_answers import REFUSED_GROUPS_HINT, LeasedBatch, named_refusals
from grpo_core.deadline import Deadline
from grpo_core.errors import GrpoError, LeasesFull
from grpo_core.wire.run_api import EnvironmentCount, Registration, RunStatus
from grpo_core.wire.scored_group import ScoredGroup
from grpo_trainer.config.trainer import TrainerSettings
from grpo_trainer.data.collate import Batch, collate
from grpo_trainer.data.filter import CheckedGroup, FilteredBatch, GroupFilter, VersionHistory
from grpo_trainer.data.groups import GroupLimits, UsableGroup
from grpo_trainer.data.micro_batches import Cut
from grpo_trainer.data.quarantine import Quarantine
from grpo_trainer.errors import NoEnvironmentLeft, StaleData, UnusableGroup

log = structlog.get_logger()


@dataclass(frozen=True)
class Position:
    """The progress of a run: `step` optimizer steps are taken, the last one on batch `batch_id` (0
    before the first), and the weights are served under `epoch`."""

    step: int
    batch_id: int
    epoch: int


@dataclass(frozen=True)
class TakenBatch:
    """A batch to train on. `groups` has all its groups as received; `filtered` also counts the
    stale and unusable groups of skipped batches."""

    batch_id: int
    groups: list[ScoredGroup]
    filtered: FilteredBatch
    collated: Batch


@dataclass(frozen=True)
class BatchSource:
    """Args:
    recover_server: called repeatedly while the trainer waits
    skipped: told of the position behind each skipped batch
    release_batches: saves a checkpoint early, so that run-api can delete batches; False if the
        newest one has them all
    """

    settings: TrainerSettings
    api: BatchQueue
    recover_server: Callable[[], None]
    preparation: Preparation
    environments: EnvironmentWatch
    quarantine: Quarantine
    skipped: Callable[[Position], None]
    release_batches: Callable[[], bool]

    @classmethod
    def of(
        cls,
        settings: TrainerSettings,
        api: BatchQueue,
        skipped: Callable[[Position], None],
        release_batches: Callable[[], bool],
        recover_server: Callable[[], None],
        limits: GroupLimits,
        history: VersionHistory,
        cut: Cut,
    ) -> Self:
        """That of a run.

        Args:
            limits: of the policy
            history: begins with the first served weights
            cut: divides sequences into micro-batches
        """
        collated = partial(
            collate,
            seq_len=settings.seq_len,
            tokens_per_micro_batch=settings.micro_batch_tokens,
            cut=cut,
            objective=settings.resolved_objective,
        )
        group_filter = GroupFilter(limits, history, settings.max_staleness)
        return cls(
            settings=settings,
            api=api,
            recover_server=recover_server,
            preparation=Preparation(group_filter, collated),
            environments=EnvironmentWatch(settings.environment_return_deadline_s),
            quarantine=Quarantine(settings.save_path, api.run_uuid),
            skipped=skipped,
            release_batches=release_batches,
        )

    def take(self, position: Position) -> TakenBatch:
        """Wait for a batch with at least one group to train on.

        A batch is skipped if all its groups are stale or unusable, or if it is in quarantine. No
        step is taken on it, but the next checkpoint includes its id, which acknowledges it.

        Raises:
            StaleData: only stale groups arrived until the deadline.
            UnusableGroup: see `GroupFilter`; the batch is in quarantine.
            DuplicatedBatch: see `GroupFilter`.
            NoEnvironmentLeft: and the other errors of `next_batch`.
        """
        settings = self.settings
        began, stale, unusable = time.monotonic(), 0, 0
        while True:
            left = settings.steps - position.step
            leased = self.next_batch(position.batch_id, left)
            prepared = self.preparation.prepared(leased)
            filtered = self._filtered(prepared, position.step)
            stale, unusable = stale + filtered.stale_groups, unusable + filtered.unusable_groups
            if filtered.groups:
                counted = replace(filtered, stale_groups=stale, unusable_groups=unusable)
                collated = self.preparation.collated(prepared, filtered.groups)
                return TakenBatch(leased.id, leased.groups, counted, collated)
            position = self._skip(leased.id, position)
            log.warning(
                "batch.skipped",
                batch_id=leased.id,
                stale_groups=filtered.stale_groups,
                unusable_groups=filtered.unusable_groups,
            )
            if filtered.stale_groups and time.monotonic() - began >= settings.batch_deadline_s:
                raise StaleData(
                    f"no group that arrived in {settings.batch_deadline_s:g} s can be trained on: "
                    f"the staleness of {stale} groups is above --max-staleness "
                    f"{settings.max_staleness}. Run fewer or slower environments to shorten the "
                    "queue, or raise --max-staleness"
                )

    def request_next(self, position: Position) -> None:
        """Request the batch after the one of `position`, so that it arrives and is prepared while
        that one is trained on. The last batch is not: environments exit once it is leased, and a
        rejected batch before it could not be replaced."""
        left = self.settings.steps - position.step
        if left > 2:
            self.api.request_ahead(left - 1, self.preparation.prepare_ahead)

    def next_batch(self, last_batch: int, batches_left: int) -> LeasedBatch:
        """Args:
            last_batch: id of the previous batch; 0 before the first one
            batches_left: number of batches that the run still needs, this one included

        Raises:
            NoEnvironmentLeft: no environment is left to send groups.
            GrpoError: the errors of `TrainerClient.next_batch`.
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
                "leases.full",
                reason=str(full),
                hint="the trainer writes a checkpoint early and acknowledges the checkpoint's "
                "batches, so that run-api can delete these batches",
            )
            if not self.release_batches():
                raise
            leased = ask()
        watch.wait_ended()
        if 0 < last_batch < leased.id - 1:
            log.warning(
                "batches.missing",
                first=last_batch + 1,
                last=leased.id - 1,
                reason="this run resumed from an older checkpoint; a newer checkpoint includes "
                "these batches, so run-api has deleted them",
            )
        return leased

    def reject(self, taken: TakenBatch, position: Position, error: GrpoError) -> Position:
        """Put a batch into quarantine and skip it; returns the new position."""
        self.quarantine.add(taken.batch_id, taken.groups, position.step, error)
        return self._skip(taken.batch_id, position)

    def _filtered(self, prepared: PreparedBatch, step: int) -> FilteredBatch:
        """The filtered batch, without any group if it is in quarantine."""
        leased = prepared.leased
        if self.quarantine.holds(leased.id, leased.groups):
            return FilteredBatch([], unusable_groups=0, repeated_groups=0)
        try:
            return self.preparation.group_filter.filter(prepared.checked, step)
        except UnusableGroup as error:
            self.quarantine.add(leased.id, leased.groups, step, error)
            raise

    def _skip(self, batch_id: int, position: Position) -> Position:
        beyond = replace(position, batch_id=batch_id)
        self.skipped(beyond)
        return beyond


class EnvironmentWatch:
    """While the trainer waits for a batch, detects that no environment is left to send one, and
    that run-api refuses groups.

    The deadline applies only after this trainer has seen an environment, because environments may
    start later than the trainer.

    Args:
        return_deadline_s: how long to wait after the last environment has left
        clock: returns seconds
    """

    def __init__(
        self, return_deadline_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._return_deadline_s = return_deadline_s
        self._clock = clock
        self._deadline: Deadline | None = None
        self._has_waited = self._has_seen = False
        self._refused_before = self._refused = 0
        self._has_warned = False

    def wait_started(self) -> None:
        self._deadline, self._has_waited = None, False
        self._refused_before, self._has_warned = self._refused, False

    def wait_ended(self) -> None:
        """A batch arrived. If the trainer had to wait, an environment must have sent it."""
        self._has_seen |= self._has_waited

    def check(self, environments: EnvironmentCount) -> None:
        """Raises `NoEnvironmentLeft` if all environments are gone for longer than the deadline. If
        no environment ever registered, the groups come from another source."""
        self._warn_of_refusals(environments)
        self._has_waited = True
        self._has_seen |= environments.connected > 0
        if environments.connected or not environments.registered or not self._has_seen:
            self._deadline = None
        elif self._deadline is None:
            self._deadline = Deadline(self._return_deadline_s, self._clock)
            log.warning(
                "environments.disconnected",
                registered=environments.registered,
                return_deadline_s=self._return_deadline_s,
                hint="start an environment, or raise --environment-return-deadline-s",
            )
        elif self._deadline.has_passed:
            raise NoEnvironmentLeft(
                f"no environment is connected to run-api: all {environments.registered} "
                "environments that registered in this run have left or stopped polling, and "
                f"none returned within {self._return_deadline_s:g} s. Read the environments' "
                "logs for the cause, then start the environments and the trainer again. To wait "
                f"longer, raise --environment-return-deadline-s{named_refusals(environments)}"
            )

    def _warn_of_refusals(self, environments: EnvironmentCount) -> None:
        """Warn once per wait if the number of refused groups has risen since the previous wait. An
        environment may send its groups, and give up, before the trainer waits."""
        self._refused = environments.refused_groups
        more = self._refused - self._refused_before
        if more > 0 and not self._has_warned:
            self._has_warned = True
            log.warning(
                "groups.refused",
                refused_groups=more,
                last_refusal=environments.last_refusal,
                hint=REFUSED_GROUPS_HINT,
            )

    def excluding(self, work: Callable[[], None]) -> None:
        """Run `work` with the deadline suspended: a server that restarts stops environments too."""
        with self._deadline.suspended() if self._deadline else nullcontext():
            work()


class BatchQueue(Protocol):
    """See `grpo_core.clients.run_api.TrainerClient`, which is one, for arguments and errors."""

    base_url: str

    @property
    def run_uuid(self) -> str: ...

    def status(self) -> RunStatus: ...

    def register(self, registration: Registration) -> int: ...

    def resume_after(self, batch_id: int) -> None: ...

    def next_batch(
        self,
        deadline_s: float,
        meanwhile: Callable[[], None] = ...,
        batches_left: int | None = None,
        look: Callable[[EnvironmentCount], None] = ...,
    ) -> LeasedBatch: ...

    def request_ahead(
        self, batches_left: int, prepare: Callable[[LeasedBatch], None] = ...
    ) -> None: ...

    def acknowledge(self, batch_id: int) -> None: ...


UNUSED = ("distill_token_ids", "distill_logprobs")
Collate = Callable[[Sequence[UsableGroup]], Batch]


@dataclass(frozen=True)
class PreparedBatch:
    """`collated` has the groups `usable`, as if none of them were stale; None without any."""

    leased: LeasedBatch
    checked: list[CheckedGroup]
    usable: list[UsableGroup]
    collated: Batch | None


@dataclass(eq=False)
class Preparation:
    """Prepares batches, at most one of them ahead."""

    group_filter: GroupFilter
    collate: Collate

    def __post_init__(self) -> None:
        self._ahead: PreparedBatch | None = None
        self._named_unused = False

    def prepare_ahead(self, leased: LeasedBatch) -> None:
        """Prepare the batch for which `prepared` will be called next. May run in another thread
        that ends before that call."""
        self._ahead = self._prepared(leased)

    def prepared(self, leased: LeasedBatch) -> PreparedBatch:
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead.leased is not leased:
            return self._prepared(leased)
        return ahead

    def collated(self, prepared: PreparedBatch, groups: Sequence[UsableGroup]) -> Batch:
        """Args: groups: all of `prepared.usable`, or fewer"""
        if prepared.collated is not None and len(groups) == len(prepared.usable):
            return prepared.collated
        return self.collate(groups)

    def _prepared(self, leased: LeasedBatch) -> PreparedBatch:
        self._name_unused_fields(leased.groups)
        checked = self.group_filter.check(leased.groups, leased.received_under)
        usable = [one.result for one in checked if isinstance(one.result, UsableGroup)]
        return PreparedBatch(leased, checked, usable, self.collate(usable) if usable else None)

    def _name_unused_fields(self, groups: Sequence[ScoredGroup]) -> None:
        """Log once if groups carry values that the trainer does not use."""
        carried = [name for name in UNUSED if any(getattr(g, name) is not None for g in groups)]
        if carried and not self._named_unused:
            self._named_unused = True
            log.warning(
                "fields.unused",
                fields=carried,
                reason="this trainer does not distil: it trains on scores and advantages alone",
            )
