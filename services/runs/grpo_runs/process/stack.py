"""The processes of one run: starts them, watches them, and ends them in reverse order.

A signal handler that raises could interrupt the code that starts or ends child processes. So the
handler of stop signals such as Ctrl-C only counts, and every wait checks the count.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Self

from grpo_core.deadline import Deadline
from grpo_core.errors import GrpoError
from grpo_core.process import (
    ManagedProcess,
    ProcessFailed,
    adopt_orphans,
    describe_exit,
    end_orphans,
    reap_orphans,
    stop_adopting,
)
from grpo_runs.screen import Screen

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequested(GrpoError):
    """The command received a stop signal."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"stopped by {number.name}")
        self.exit_status = 128 + number


class StopRequest:
    """Counts stop signals while the context is open. On exit the previous handlers are restored."""

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._previous: dict[signal.Signals, signal._HANDLER] = {}

    def check(self) -> None:
        """Raises `StopRequested` once a signal has arrived."""
        if self.received:
            raise StopRequested(self.received[0])

    @property
    def is_urgent(self) -> bool:
        """True after a second signal: stop without waiting."""
        return len(self.received) > 1

    def __enter__(self) -> Self:
        for number in STOP_SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # started under nohup: the run outlives the terminal
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: object) -> None:
        self.received.append(signal.Signals(number))


LAUNCHER = "grpo-run"
"""Whose warnings and errors are told beside those of the services."""
STOP_GRACE_S = 10.0
NAME_WIDTH = 11
MIB = 2**20
_POLL_S = 0.05


@dataclass(frozen=True)
class Service:
    """How to start one process, and how to see that it is ready. By default it is a job: done when
    it has ended, however long that takes."""

    name: str
    command: Sequence[str]
    healthy: Callable[[], bool] = lambda: False
    deadline_s: float = math.inf
    """From the time when those before it are healthy."""
    deadline_option: str = ""
    """What the user passes to change it; empty: there is no such option."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    role: str = ""
    """Its task in a few words, for the user."""
    may_finish: bool = False
    """An end with status 0 is no failure."""
    may_start: Callable[[], bool] = lambda: True
    """False until the services that it connects to accept connections."""
    group: str = ""
    """Services of one group replace each other: once they are ready, the end of one is no failure
    of the run while another runs."""


class Stack:
    """On exit, ends every process that was started since entry, grandchildren included.

    Earlier children of this process are left alone.
    """

    def __init__(
        self,
        log_directory: Path,
        stop_request: StopRequest,
        watch: Callable[[Mapping[str, int]], object] = lambda _: None,
        grace_s: float = STOP_GRACE_S,
    ) -> None:
        """Args:
        watch: called often during every wait, with the process ids by name
        grace_s: seconds between SIGTERM and SIGKILL for each process
        """
        self._log_directory = log_directory
        self._stop_request = stop_request
        self._watch = watch
        self._grace_s = grace_s
        self._running: list[tuple[Service, ManagedProcess]] = []
        self._not_ours: frozenset[int] = frozenset()
        self._told: set[str] = set()

    def start(
        self,
        services: Sequence[Service],
        ready: Callable[[Service, float], None] = lambda _service, _seconds: None,
    ) -> None:
        """Start services side by side and wait until all are healthy. Each process is created once
        `may_start` holds.

        The deadline of a service begins when the previous one is healthy. A service that may finish
        also counts as healthy once it has ended with status 0. So a job is a service that may
        finish and is never healthy.

        Args:
            ready: called for each healthy service, in the order given, with the seconds since its
                start
        Raises:
            ProcessFailed: a running service ended, or a deadline passed.
            StopRequested: a stop signal arrived.
        """
        self.check()
        started = [
            (service, self._spawn_in_time(service), time.monotonic()) for service in services
        ]
        for service, process, started_at in started:
            healthy = partial(self._is_healthy, service, process)
            process.wait_until(healthy, service.deadline_s, service.deadline_option)
            ready(service, time.monotonic() - started_at)

    def check(self) -> None:
        """Raises `StopRequested` after a stop signal, `ProcessFailed` if a process failed."""
        self._look_around()
        self._check_processes(self._running)

    def lost(self) -> dict[str, str]:
        """How services ended without a failure of the run, because others of their group run."""
        groups = self._running_groups()
        return {
            process.name: describe_exit(process.exit_code)
            for service, process in self._running
            if service.group in groups and _has_failed(service, process)
        }

    def warn_of_lost(self, screen: Screen) -> None:
        """Warn once of each of these services."""
        for name, how in self.lost().items():
            if name not in self._told:
                self._told.add(name)
                log = self.process(name).log_path
                text = f"{name} ended with {how}; the run goes on with the others; see {log}"
                warn(screen, log.parent, "ServiceEnded", text)

    def sleep(self, seconds: float) -> None:
        """Sleep, and call `check` often meanwhile."""
        until = Deadline(seconds)
        while not until.has_passed:
            self.check()
            time.sleep(min(_POLL_S, until.left_s))

    def join(self, jobs: Sequence[Service], meanwhile: Callable[[], None]) -> dict[str, int]:
        """Run jobs side by side until all have ended; returns their exit statuses by name.

        A job that fails does not end the others. `meanwhile` is called often.

        Raises:
            ProcessFailed: a service that was started earlier failed.
            StopRequested: a stop signal arrived.
        """
        services = list(self._running)
        started = [self._spawn(job) for job in jobs]
        while any(process.exit_code is None for process in started):
            self._look_around()
            self._check_processes(services)
            meanwhile()
            time.sleep(_POLL_S)
        meanwhile()
        for process in started:
            process.kill()  # children that it left in its session
        self._running = services
        return {process.name: process.wait(0.0) for process in started}

    def process(self, name: str) -> ManagedProcess:
        return next(process for service, process in self._running if service.name == name)

    def last_line(self, name: str) -> str:
        """Of its log; empty if the process was not started yet."""
        running = (process for _, process in self._running if process.name == name)
        return next((process.last_line() for process in running), "")

    def stop_in_time(self, name: str, grace_s: float) -> None:
        """Ask one process to end, and wait until it has. A second stop signal ends the wait."""
        for service, process in self._running:
            if service.name == name:
                process.signal(signal.SIGTERM)
                with contextlib.suppress(ProcessFailed):
                    process.wait(grace_s, hurry=lambda: self._stop_request.is_urgent)

    def stop(self) -> None:
        """End every process, last started first. After a second stop signal, kill them at once."""
        while self._running:
            _, process = self._running[-1]
            process.stop(self._grace_s, hurry=lambda: self._stop_request.is_urgent)
            self._running.pop()
        end_orphans(self._not_ours)

    def __enter__(self) -> Self:
        self._not_ours = adopt_orphans()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        stop_adopting()

    def _spawn_in_time(self, service: Service) -> ManagedProcess:
        deadline = Deadline(service.deadline_s)
        while not service.may_start():
            if deadline.has_passed:
                raise ProcessFailed(
                    f"{service.name} was not started, because other services did not accept "
                    f"connections within {service.deadline_s:g} s ({service.deadline_option}); see "
                    f"the log files in {self._log_directory}"
                )
            self.sleep(_POLL_S)
        return self._spawn(service)

    def _spawn(self, service: Service) -> ManagedProcess:
        log_path = self._log_directory / f"{service.name}.log"
        process = ManagedProcess(service.name, service.command, log_path, service.environment)
        self._running.append((service, process))
        return process

    def _is_healthy(self, service: Service, process: ManagedProcess) -> bool:
        self._look_around()
        self._check_processes([entry for entry in self._running if entry[1] is not process])
        if process.exit_code is None:
            return service.healthy()
        return not _has_failed(service, process)

    def _look_around(self) -> None:
        self._stop_request.check()
        reap_orphans(self._not_ours)
        self._watch({service.name: process.pid for service, process in self._running})

    def _running_groups(self) -> set[str]:
        """Those with a service that has not ended."""
        return {
            service.group
            for service, process in self._running
            if service.group and process.exit_code is None
        }

    def _check_processes(self, running: Sequence[tuple[Service, ManagedProcess]]) -> None:
        groups = self._running_groups()
        failed = [
            process
            for service, process in running
            if service.group not in groups and _has_failed(service, process)
        ]
        if failed:
            # In the order of their start. Services depend on those in front of them, so if several
            # ended at once, the first is the likely cause: its last log lines are shown.
            endings = [
                f"{one.name} ended with {describe_exit(one.exit_code)}; see {one.log_path}"
                for one in failed
            ]
            raise ProcessFailed("\n".join([*endings, failed[0].log_tail()]))


def start_on_screen(stack: Stack, services: Sequence[Service], screen: Screen) -> None:
    """Start services side by side; show each that is ready, after how long, and what it does."""
    names = [service.name for service in services]  # of those that are not ready

    def show(service: Service, seconds: float) -> None:
        screen.line(f"  {service.name:<{NAME_WIDTH}} ready after {seconds:5.1f} s: {service.role}")
        names.remove(service.name)

    def waited_for() -> str:
        return f"{names[0]} is not ready; it logged last: {stack.last_line(names[0])}"

    with screen.activity(f"starting {', '.join(names)}", waited_for):
        stack.start(services, show)


def warn(screen: Screen, logs: Path, event: str, text: str) -> None:
    """Show a warning of the command that started the run, and write it beside the logs of its
    services, as they do.

    Args: event: without a dot, or it would be shown again as a service's
    """
    screen.warning(text)
    with contextlib.suppress(OSError), (logs / f"{LAUNCHER}.log").open("a") as log:
        log.write(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S} [warning  ] {event}   {text}\n")


def _has_failed(service: Service, process: ManagedProcess) -> bool:
    code = process.exit_code
    return code is not None and not (service.may_finish and code == 0)
