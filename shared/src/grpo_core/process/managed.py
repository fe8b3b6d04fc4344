"""Child processes with a log file each, ended by the handle that started them and no other way."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from grpo_core.deadline import Deadline
from grpo_core.errors import GrpoError
from grpo_core.process.orphans import end_with_parent

_HEALTH_POLL_S = 0.1
_EXIT_POLL_S = 0.02
_SEARCHED_LINES = 400
_SHOWN_CHARACTERS = 240
"""Of a line. The record of a training step has thousands."""
_MARKED_AS_ERROR = re.compile(r"\[error\b|\bERROR\b")


class ProcessFailed(GrpoError):
    """A child ended, or did not become healthy in time. Names the log to read."""


class ManagedProcess:
    """One child in a session of its own, so that it and all its children end together.

    A terminal's Ctrl-C does not reach it: whoever started it decides. Should the starter itself
    be killed, the kernel sends the child SIGTERM.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log_path: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.log_path = log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            self._log_start = log.tell()  # a resumed run appends to the logs of earlier processes
            self._child = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative is the signal that ended it."""
        if self._child.returncode is not None:
            return self._child.returncode
        # WNOWAIT leaves the zombie in place: as long as it is there its process group id cannot
        # be given to anyone else, so `kill` can only ever reach our own.
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def wait(self, timeout_s: float, hurry: Callable[[], bool] = lambda: False) -> int:
        """Wait for the end. Raises `ProcessFailed` if it still runs after `timeout_s`, or once
        `hurry` is true."""
        deadline = Deadline(timeout_s)
        while (code := self.exit_code) is None:
            if hurry() or deadline.has_passed:
                raise ProcessFailed(
                    f"{self.name} still runs after {timeout_s:g} s; see {self.log_path}"
                )
            time.sleep(_EXIT_POLL_S)
        return code

    def wait_until(self, healthy: Callable[[], bool], deadline_s: float) -> float:
        """Poll `healthy` until it is true; returns the seconds it took.

        Raises:
            ProcessFailed: the process ended first, or the deadline passed.
        """
        started = time.monotonic()
        while True:
            has_ended = self.exit_code is not None  # before `healthy`, which may think it well
            if healthy():
                return time.monotonic() - started
            if has_ended:
                raise ProcessFailed(
                    f"{self.name} ended with {describe_exit(self.exit_code)} while starting; "
                    f"see {self.log_path}\n{self.log_tail()}"
                )
            if time.monotonic() - started > deadline_s:
                raise ProcessFailed(
                    f"{self.name} not healthy after {deadline_s:g} s; see {self.log_path}\n"
                    f"{self.log_tail()}"
                )
            time.sleep(_HEALTH_POLL_S)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this process alone, where it still runs."""
        if self.exit_code is None:
            os.kill(self.pid, number)

    def stop(self, grace_s: float = 15.0, hurry: Callable[[], bool] = lambda: False) -> None:
        """Ask it to end, wait `grace_s` seconds, or until `hurry` is true, then end its whole
        session."""
        self.signal(signal.SIGTERM)
        with contextlib.suppress(ProcessFailed):
            self.wait(grace_s, hurry)
        self.kill()

    def kill(self) -> None:
        """End it and every child of it at once (SIGKILL)."""
        if self._child.returncode is None:
            os.killpg(self.pid, signal.SIGKILL)
            self._child.wait()

    def log_tail(self, lines: int = 15) -> str:
        """Why it ended, as far as the log says: its last lines that are marked as errors, or
        where none are, its last lines."""
        own = self.log_path.read_bytes()[self._log_start :]
        written = own.decode(errors="replace").splitlines()
        # What an interpreter prints on its way out can be longer than the reason.
        errors = [line for line in written[-_SEARCHED_LINES:] if _MARKED_AS_ERROR.search(line)]
        return "\n".join(line[:_SHOWN_CHARACTERS] for line in (errors or written)[-lines:])


def describe_exit(code: int | None) -> str:
    """`status 1`, or the name of the signal that ended it."""
    if code is not None and code < 0:
        return signal.Signals(-code).name
    return f"status {code}"
