"""Starts and ends child processes, each with its own log file, and their orphans.

`killpg` does not reach a grandchild in its own session. While this process is a child subreaper
(`prctl(2)`), it becomes the parent of such orphans instead of init. A child's process id cannot be
reused before its parent has reaped it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from grpo_core.deadline import Deadline
from grpo_core.errors import GrpoError

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None)
"""Loaded before any fork, because a forked child of a threaded process must not load code."""


def end_with_parent() -> None:
    """A `preexec_fn`: the kernel sends the child SIGTERM when its parent ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def killed_with_parent() -> None:
    """A `preexec_fn`: the kernel sends the child SIGKILL when its parent ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> frozenset[int]:
    """Become the parent of every orphaned descendant from now on.

    Returns the present children of this process, which `end_orphans` must spare.
    """
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    return children()


def stop_adopting() -> None:
    """Let init adopt later orphans again."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 0)


def end_orphans(spare: frozenset[int]) -> None:
    """Kill and reap every child except `spare`, and the orphans that their end creates."""
    while orphans := children() - spare:
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def reap_orphans(spare: frozenset[int]) -> None:
    """Reap the adopted processes that have ended, without waiting for others. This process's own
    children are those in its session, every `ManagedProcess` and `spare`."""
    with contextlib.suppress(ChildProcessError, ProcessLookupError):  # its own code reaped it
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return
        for pid in children() - spare - _managed:
            if os.getsid(pid) != os.getsid(0):
                os.waitpid(pid, os.WNOHANG)


def children(process: int | str = "self") -> frozenset[int]:
    """Process ids of a process's direct children, zombies included; none if it has ended."""
    found: set[int] = set()
    tasks = Path(f"/proc/{process}/task")
    ended = (FileNotFoundError, ProcessLookupError)  # meanwhile, too
    with contextlib.suppress(*ended):
        for task in os.listdir(tasks):  # one list per thread that forked
            with contextlib.suppress(*ended):
                found.update(map(int, (tasks / task / "children").read_text().split()))
    return frozenset(found)


_managed: set[int] = set()
"""Process ids of every `ManagedProcess` that was not waited for yet."""
_HEALTH_POLL_S = 0.1
_EXIT_POLL_S = 0.02
_SEARCHED_LINES = 400
_SHOWN_CHARACTERS = 240
"""Of a line. The record of a training step has thousands."""
_MARKED_AS_ERROR = re.compile(r"\[error\b|\bERROR\b(?!,)|: error: ")
_NO_ERROR = re.compile(r"^\s*$|\[(debug|info) *\]|\b(DEBUG|INFO)(:| \d)")
_OF_TORCHRUN = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"),
)
"""A child is no rank of this process's group: vLLM would wait for torchrun's other processes."""


class ProcessFailed(GrpoError):
    """A child process ended, or did not become healthy in time. The message names the log."""


class ManagedProcess:
    """A child process in its own session, so that it and all its children end together.

    A terminal's Ctrl-C does not reach it. If this process is killed, the kernel sends the child
    SIGTERM.
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
        own = {name: value for name, value in os.environ.items() if name not in _OF_TORCHRUN}
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            self._log_start = log.tell()  # a resumed run appends to the logs of earlier processes
            self._child = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=own | dict(environment or {}),
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        _managed.add(self.pid)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; a negative number is the signal that ended it."""
        if self._child.returncode is not None:
            return self._child.returncode
        # WNOWAIT keeps the zombie: while it exists, no other process can get its process group id,
        # so `kill` reaches only this child's group.
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def wait(self, timeout_s: float, hurry: Callable[[], bool] = lambda: False) -> int:
        """Wait until the process ends, and return its exit code.

        Raises:
            ProcessFailed: it still runs after `timeout_s`, or when `hurry` returns true.
        """
        deadline = Deadline(timeout_s)
        while (code := self.exit_code) is None:
            if hurry() or deadline.has_passed:
                raise ProcessFailed(
                    f"{self.name} is still running after {timeout_s:g} s; see {self.log_path}"
                )
            time.sleep(_EXIT_POLL_S)
        return code

    def wait_until(self, healthy: Callable[[], bool], deadline_s: float, option: str = "") -> float:
        """Poll `healthy` until it is true; returns the seconds it took.

        Args: option: that sets the deadline, for the user

        Raises:
            ProcessFailed: the process ended first, or the deadline passed.
        """
        started = time.monotonic()
        while True:
            # Read before `healthy`, which may be true even after the end.
            has_ended = self.exit_code is not None
            if healthy():
                return time.monotonic() - started
            if has_ended:
                raise ProcessFailed(
                    f"{self.name} ended with {describe_exit(self.exit_code)} while starting; "
                    f"see {self.log_path}\n{self.log_tail()}"
                )
            if time.monotonic() - started > deadline_s:
                advice = f"; if it only needs more time, raise {option}" if option else ""
                raise ProcessFailed(
                    f"{self.name} is not healthy after {deadline_s:g} s{advice}; see "
                    f"{self.log_path}\n{self.log_tail()}"
                )
            time.sleep(_HEALTH_POLL_S)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this process alone, if it still runs."""
        if self.exit_code is None:
            os.kill(self.pid, number)

    def stop(self, grace_s: float = 15.0, hurry: Callable[[], bool] = lambda: False) -> None:
        """Send SIGTERM, wait up to `grace_s` seconds or until `hurry`, then kill its session."""
        self.signal(signal.SIGTERM)
        with contextlib.suppress(ProcessFailed):
            self.wait(grace_s, hurry)
        self.kill()

    def kill(self) -> None:
        """Kill it and all its children (SIGKILL)."""
        if self._child.returncode is None:
            os.killpg(self.pid, signal.SIGKILL)
            self._child.wait()
            _managed.discard(self.pid)

    def log_text(self) -> str:
        """What this process logged."""
        return self.log_path.read_bytes()[self._log_start :].decode(errors="replace")

    def log_tail(self, lines: int = 15) -> str:
        """The last log lines that are marked as errors; without any, the last line and those before
        it that tell more than the progress, such as a traceback, cut short."""
        written = self.log_text().splitlines()
        # An interpreter may print more lines at exit than the error itself has.
        errors = [line for line in written[-_SEARCHED_LINES:] if _MARKED_AS_ERROR.search(line)]
        telling = [line for line in written[:-1] if not _NO_ERROR.search(line)] + written[-1:]
        shown = errors or [line[:_SHOWN_CHARACTERS] for line in telling]
        return "\n".join(shown[-lines:]) or "(nothing was logged)"

    def last_line(self) -> str:
        """The end of its log, cut short."""
        return (self.log_text().splitlines() or ["nothing yet"])[-1][:_SHOWN_CHARACTERS]


def describe_exit(code: int | None) -> str:
    """`status 1`, or the name of the signal that ended it."""
    if code is not None and code < 0:
        return signal.Signals(-code).name
    return f"status {code}"
