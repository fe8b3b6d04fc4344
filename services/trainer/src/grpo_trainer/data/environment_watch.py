"""Notices, while a batch is waited for, that nobody is left who could send one."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext

import structlog

from grpo_core.deadline import Deadline
from grpo_core.wire import EnvironmentCount
from grpo_trainer.errors import NoEnvironmentLeft

log = structlog.get_logger()


class EnvironmentWatch:
    """Counts from the moment on at which this trainer has seen that there is one: after a start,
    environments of the run may still be on their way.

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

    def begin(self) -> None:
        """A batch is waited for."""
        self._deadline, self._has_waited = None, False

    def end(self) -> None:
        """It is there: somebody has sent it, unless it was there all the time."""
        self._has_seen |= self._has_waited

    def look(self, environments: EnvironmentCount) -> None:
        """Raises `NoEnvironmentLeft` once all have been gone for the deadline. Where none has ever
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

    def not_counting(self, work: Callable[[], None]) -> None:
        """What it waits for, such as a server that restarts, keeps environments away too."""
        with self._deadline.suspended() if self._deadline else nullcontext():
            work()
