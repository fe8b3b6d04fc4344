"""Fetches the batch for the next step from run-api, and skips batches that cannot be used.

While a step is computed, a thread checks the groups of the next batch and collates the usable ones.
When the step of that batch begins, stale groups are filtered out; if there are any, the batch is
collated again without them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import structlog

from grpo_core.clients.run_api import (
    BATCH_WAIT_S,
    REFUSED_GROUPS_HINT,
    SERVICE,
    LeasedBatch,
    named_refusals,
)
from grpo_core.deadline import Deadline
from grpo_core.errors import LeasesFull, ServiceUnavailable
from grpo_core.tree.trainer import TrainerSettings
from grpo_core.wire.run_api import EnvironmentCount, Registration, RunStatus
from grpo_core.wire.scored_group import ScoredGroup
from grpo_trainer.data.collate import Batch, collate
from grpo_trainer.data.cuts import Cut
from grpo_trainer.data.filter import Checked, GroupFilter, VersionHistory, digest
from grpo_trainer.data.groups import GroupLimits, UsableSequence
from grpo_trainer.data.quarantine import Quarantine
from grpo_trainer.errors import (
    DuplicatedBatch,
    NoEnvironmentLeft,
    RolloutMismatch,
    StaleData,
    UnusableGroup,
)

log = structlog.get_logger()

UNUSED = ("distill_token_ids", "distill_logprobs")


@dataclass(frozen=True)
class Position:
    """The progress of a run: `step` optimizer steps are taken, the last one on batch `batch_id` (0
    before the first), and the weights are served under `epoch`."""

    step: int
    batch_id: int
    epoch: int


@dataclass(frozen=True)
class _Prepared:
    """What a thread computes of a batch ahead. `batch`: of its usable groups, as if none of them
    were stale; None without any."""

    leased: LeasedBatch
    checked: list[Checked]
    digests: list[bytes]
    batch: Batch | None


@dataclass(frozen=True)
class SkippedBatch:
    """A batch whose groups are all stale or unusable, or that is in quarantine. No step is taken on
    it, but the next checkpoint includes its id, which acknowledges it."""

    batch_id: int


class BatchSource:
    """Args:
    limits: of the policy
    history: begins with the first served weights
    cut: divides sequences into micro-batches
    clock: returns seconds
    """

    def __init__(
        self,
        settings: TrainerSettings,
        api: BatchQueue,
        limits: GroupLimits,
        history: VersionHistory,
        cut: Cut,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.api = api
        self.quarantine = Quarantine(settings.save_path, api.run_uuid)
        self._filter = GroupFilter(limits, history, settings.max_staleness)
        self._cut = cut
        self._clock = clock
        self._environments = EnvironmentWatch(settings.environment_return_deadline_s, clock)
        self._ahead: _Prepared | None = None  # the batch that `api.poll` returns next
        self._is_requested = False
        self._has_named_unused = False
        self._waiting: Deadline | None = None
        self._fresh_data: Deadline | None = None
        self._dropped = Counter[str]()

    def look(self, position: Position) -> Batch | SkippedBatch | LeasesFull | None:
        """Ask run-api for the next batch, for about a second.

        Returns:
            a batch to train on, without advantages, or one to skip; the error of run-api if it
            waits for acknowledgements; None if there is no batch yet

        Raises:
            ServiceUnavailable: no batch was complete until the deadline.
            NoEnvironmentLeft: no environment is left to send groups.
            StaleData: only stale groups arrived until the deadline.
            UnusableGroup, DuplicatedBatch, RolloutMismatch: see `GroupFilter`; the batch is in
                quarantine.
            GrpoError: the other errors of `TrainerClient.poll`.
        """
        waiting = self._begun()
        try:
            wait_s = min(BATCH_WAIT_S, waiting.left_s)
            found = self.api.poll(wait_s, self.settings.steps - position.step)
        except LeasesFull as full:
            self._waiting = None
            log.warning(
                "leases.full",
                reason=str(full),
                hint="the trainer writes a checkpoint early and acknowledges the checkpoint's "
                "batches, so that run-api can delete these batches",
            )
            return full
        if isinstance(found, LeasedBatch):
            self._waiting = None
            self._environments.wait_ended()
            _name_missing(position.batch_id, found.id)
            return self._taken(found, position.step)
        self._environments.check(found)
        if waiting.has_passed:
            raise ServiceUnavailable(
                f"{SERVICE}: no batch within {waiting.seconds:g} s; check in "
                f"{self.api.base_url}/status and in the environments' logs that environments run "
                f"and send groups{named_refusals(found)}"
            )
        return None

    def _begun(self) -> Deadline:
        """The deadline of the wait for a batch, which begins unless it has begun."""
        deadline_s = self.settings.batch_deadline_s
        if self._fresh_data is None:
            self._fresh_data = Deadline(deadline_s, self._clock)
        if self._waiting is None:
            self._waiting = Deadline(deadline_s, self._clock)
            self._environments.wait_started()
        return self._waiting

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """The block does not count as waiting: while a server restarts, no environment samples."""
        with suspended(self._waiting), self._environments.suspended():
            yield

    def _taken(self, leased: LeasedBatch, step: int) -> Batch | SkippedBatch:
        prepared, self._ahead = self._ahead or self._prepared(leased), None
        self._is_requested = False
        assert prepared.leased is leased, "`poll` returned another batch than it prepared"
        usable, found = self._filtered(prepared, step)
        self._dropped["repeated"] = 0  # counted of this batch alone, not of skipped ones
        self._dropped.update(found)
        if usable:
            batch = self.collate(usable) if found["stale"] else prepared.batch
            assert batch is not None, "collated with the usable groups"
            dropped, self._dropped, self._fresh_data = self._dropped, Counter(), None
            return replace(batch, batch_id=leased.id, received=leased.groups, dropped=dropped)
        log.warning(
            "batch.skipped",
            batch_id=leased.id,
            stale_groups=found["stale"],
            unusable_groups=found["unusable"],
        )
        if found["stale"] and self._fresh_data is not None and self._fresh_data.has_passed:
            settings = self.settings
            raise StaleData(
                f"no group that arrived in {settings.batch_deadline_s:g} s can be trained on: "
                f"the staleness of {self._dropped['stale']} groups is above --max-staleness "
                f"{settings.max_staleness}. Run fewer or slower environments to shorten the "
                "queue, or raise --max-staleness"
            )
        return SkippedBatch(leased.id)

    def request_next(self, position: Position) -> None:
        """Request the batch after the one that was taken at `position`, so that it arrives and is
        prepared while that one is trained on; once, however often it is called. The last batch is
        not: environments exit once it is leased, and a rejected batch before it could not be
        replaced."""
        left = self.settings.steps - position.step
        if left > 2 and not self._is_requested:
            self._is_requested = True
            self.api.request_ahead(left - 1, self.prepare_ahead)

    def prepare_ahead(self, leased: LeasedBatch) -> None:
        """Prepare the batch that `look` will find next. Runs in the thread of `request_ahead`,
        which `poll` ends before it returns this batch."""
        self._ahead = self._prepared(leased)

    def collate(self, sequences: Sequence[UsableSequence]) -> Batch:
        settings = self.settings
        return collate(
            sequences,
            settings.seq_len,
            settings.micro_batch_tokens,
            self._cut,
            settings.resolved_objective,
        )

    def _prepared(self, leased: LeasedBatch) -> _Prepared:
        self._name_unused_fields(leased.groups)
        checked = self._filter.check(leased)
        usable = [s for found in checked if isinstance(found, list) for s in found]
        digests = [digest(group) for group in leased.groups]
        return _Prepared(leased, checked, digests, self.collate(usable) if usable else None)

    def _filtered(
        self, prepared: _Prepared, step: int
    ) -> tuple[list[UsableSequence], Counter[str]]:
        """As `GroupFilter.filter`; no group is usable if the batch is in quarantine."""
        leased = prepared.leased
        if self.quarantine.holds(leased.id, leased.groups):
            return [], Counter()
        try:
            return self._filter.filter(leased, prepared.checked, prepared.digests, step)
        except (UnusableGroup, DuplicatedBatch, RolloutMismatch) as error:
            self.quarantine.add(leased.id, leased.groups, step, error)
            raise

    def _name_unused_fields(self, groups: Sequence[ScoredGroup]) -> None:
        """Log once if groups carry values that the trainer does not use."""
        if self._has_named_unused or self.settings.resolved_objective.distill_coef:
            return
        carried = [name for name in UNUSED if any(getattr(g, name) is not None for g in groups)]
        if carried:
            self._has_named_unused = True
            log.warning(
                "fields.unused",
                fields=carried,
                reason="the groups have a teacher's logprobs, which this objective does not use",
                hint="pass --objective distill, or --distill-coef",
            )


def _name_missing(last_id: int, batch_id: int) -> None:
    if 0 < last_id < batch_id - 1:
        log.warning(
            "batches.missing",
            first=last_id + 1,
            last=batch_id - 1,
            reason="this run resumed from an older checkpoint; a newer checkpoint includes "
            "these batches, so run-api has deleted them",
        )


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
        self._refused_before = self._refused = self._lost = 0
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
        self._warn_of_losses(environments.lost_groups)
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
                hint="read the environments' logs; start an environment, or raise "
                "--environment-return-deadline-s",
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

    def _warn_of_losses(self, groups: int) -> None:
        if groups > self._lost:
            log.warning(
                "groups.lost",
                lost_groups=groups - self._lost,
                hint="Redis started again without groups that run-api had accepted; see run-api's "
                "log",
            )
        self._lost = groups

    def suspended(self) -> AbstractContextManager[None]:
        """The block does not count."""
        return suspended(self._deadline)


def suspended(deadline: Deadline | None) -> AbstractContextManager[None]:
    return deadline.suspended() if deadline else nullcontext()


class BatchQueue(Protocol):
    """See `grpo_core.clients.run_api.TrainerClient`, which is one, for arguments and errors."""

    base_url: str

    @property
    def run_uuid(self) -> str: ...

    def status(self) -> RunStatus: ...

    def register(self, registration: Registration) -> int: ...

    def resume_after(self, batch_id: int) -> None: ...

    def poll(
        self, wait_s: float = ..., batches_left: int | None = None
    ) -> LeasedBatch | EnvironmentCount: ...

    def request_ahead(
        self, batches_left: int, prepare: Callable[[LeasedBatch], None] = ...
    ) -> None: ...

    def acknowledge(self, batch_id: int) -> None: ...
