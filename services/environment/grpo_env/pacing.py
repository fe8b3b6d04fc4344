"""Decides how many groups to start, and how many failures and refusals end the environment.

Does no I/O. Sequences that are queued, or being sampled and likely to be kept, stay within
`max_batches_offpolicy` batches, because more of them would be too stale when the trainer uses them.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from grpo_core.errors import GrpoError, ServiceUnavailable
from grpo_core.wire.run_api import EnvironmentStatus

END_MARGIN_BATCHES = 1
"""Batches to sample beyond the last one. Groups may still be dropped, and run-api rounds the share
of other environments up, so an exact count could leave the last batch one group short."""

_LEAST_KEPT_SHARE = 0.5
"""Never sample more than twice the missing groups: if nearly all are dropped, the last ones may
still be good."""


def groups_to_start(
    status: EnvironmentStatus,
    batch_size: int,
    group_size: int,
    total_steps: int,
    *,
    max_batches_offpolicy: int,
    max_concurrent_groups: int,
    min_batch_allocation: float,
    in_flight: int,
    sent_since_status: int = 0,
    kept_share: float = 1.0,
) -> int:
    """The number of groups to start now in a run that is not complete.

    Args:
        status: the answer to the latest poll
        batch_size, group_size: in sequences
        total_steps: the steps of the run
        in_flight, sent_since_status: groups of this environment that `status` does not include yet
        kept_share: the share of groups that are not dropped for equal scores
    """
    # No trainer is registered after a reset of run-api. A full queue delays submissions.
    if batch_size < 1 or status.pressure >= 1.0:
        return 0

    def groups_in(batches: int) -> int:
        return -(-batches * batch_size // group_size)

    fresh = max_batches_offpolicy * batch_size // group_size
    to_the_end = groups_in(total_steps - status.current_step + END_MARGIN_BATCHES)
    # At least one whole batch, or the trainer would starve.
    wanted = min(max(fresh, groups_in(1)), to_the_end)
    # Other environments may fill the queue, but every batch needs this environment's minimum share.
    wanted_of_own = math.ceil(wanted * min_batch_allocation)
    missing = max(wanted - status.queue_size, wanted_of_own - status.self_queue_size)
    missing -= sent_since_status
    # Start the replacements of dropped groups together with the others, or the trainer would wait
    # for one more round of sampling.
    kept_share = max(kept_share, _LEAST_KEPT_SHARE)
    to_sample = round(missing / kept_share) if in_flight else math.ceil(missing / kept_share)
    # run-api lowers the weight as its queue fills. One slot is left for progress.
    slots = max(1, int(max_concurrent_groups * status.env_weight))
    return max(0, min(to_sample, slots) - in_flight)


_MIN_DELAY_S = 0.2
_MAX_DELAY_S = 5.0
MAX_REFUSED_IN_A_ROW = 16


class EveryGroupRefused(GrpoError):
    """A service refused sixteen groups in a row, so an option is probably wrong."""


@dataclass
class FailureBudget:
    """Allows failures of one service for `deadline_s` seconds after the first one in a row.

    The HTTP clients already repeat requests that are safe to repeat. This budget covers the rest,
    such as a request that an engine restart interrupted. Each may last `deadline_s`, so the
    environment gives a service up after at most twice the deadline. One refused group is no
    failure, but sixteen in a row are.
    """

    service: str
    deadline_s: float
    clock: Callable[[], float] = time.monotonic
    _failing_since: float | None = field(default=None, init=False)
    _last_failure: float = field(default=0.0, init=False)
    _refused_in_a_row: int = field(default=0, init=False)

    def succeeded(self) -> None:
        self._failing_since = None
        self._refused_in_a_row = 0

    def refused(self, detail: str) -> None:
        """Record a refusal. Raises `EveryGroupRefused`: this was the sixteenth one in a row."""
        self._failing_since = None
        self._refused_in_a_row += 1
        if self._refused_in_a_row >= MAX_REFUSED_IN_A_ROW:
            raise EveryGroupRefused(
                f"{self.service} refused {MAX_REFUSED_IN_A_ROW} groups in a row; last: {detail}"
            )

    def failed(self, error: ServiceUnavailable) -> None:
        """Record a failure. Raises `ServiceUnavailable`: the service has failed for `deadline_s`
        seconds without a success."""
        self._last_failure = self.clock()
        if self._failing_since is None:
            self._failing_since = self._last_failure
        failing_s = self._last_failure - self._failing_since
        if failing_s >= self.deadline_s:
            raise ServiceUnavailable(
                f"{self.service} answered no request successfully for {round(failing_s, 1):g} "
                f"s; the last error was: {error}; read the log of {self.service}"
            ) from error

    @property
    def delay_s(self) -> float:
        """Seconds until the next request should be sent. Grows with the outage, up to a limit."""
        if self._failing_since is None:
            return 0.0
        failing_s = self._last_failure - self._failing_since
        pause_s = min(max(failing_s, _MIN_DELAY_S), _MAX_DELAY_S)
        return max(0.0, self._last_failure + pause_s - self.clock())


class NoTrainer(GrpoError):
    """run-api runs, but no trainer takes batches from it."""


class StallDetector:
    """Ends the environment if it is idle and no batch is taken for `deadline_s` seconds."""

    def __init__(self, deadline_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._deadline_s = deadline_s
        self._clock = clock
        self._step = -1
        self._since = clock()

    def observe(self, step: int, idle: bool) -> None:
        """Record the run's current step. Raises `NoTrainer`: the environment was idle and the step
        did not change for `deadline_s`."""
        if step != self._step or not idle:
            self._step, self._since = step, self._clock()
        elif self._clock() - self._since >= self._deadline_s:
            raise NoTrainer(
                f"the trainer took no batch for {self._deadline_s:g} s, and this environment "
                "cannot queue more groups; check that the trainer runs and that the other "
                "environments submit groups (/status and /environments of run-api)"
            )


_RECENT_GROUPS = 64
_LEAST_GROUPS = 8
"""Fewer groups prove nothing."""


class RewardsFail(GrpoError):
    """Too many groups could not be graded, so the reward is probably wrong."""


class RolloutsFail(GrpoError):
    """Too many rollouts ended with an error, so the agent or its environment is probably wrong."""


class RewardFailures:
    """Counts groups whose rewards or rollouts failed, among the recent ones.

    Args: share: largest share that is allowed, in [0, 1]
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._recent: deque[bool] = deque(maxlen=_RECENT_GROUPS)

    def graded(self) -> None:
        self._recent.append(False)

    def failed(self, problem: str, of_rollout: bool = False) -> None:
        """Record a group that could not be graded.

        Args: of_rollout: it failed before its reward was asked

        Raises:
            RewardsFail, RolloutsFail: the share among the recent groups is too large; named by the
                last one.
        """
        self._recent.append(True)
        failed, groups = sum(self._recent), len(self._recent)
        if groups >= _LEAST_GROUPS and failed > self._share * groups:
            what, error = ("a rollout", RolloutsFail) if of_rollout else ("the reward", RewardsFail)
            raise error(
                f"{what} failed for {failed} of the last {groups} groups, more than the share "
                f"of {self._share:g} that --max-failed-rewards allows; the last problem was: "
                f"{problem}; try {what} with `env-server check`"
            )
