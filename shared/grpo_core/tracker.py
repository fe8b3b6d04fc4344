"""Sends records to an experiment tracker, such as Weights & Biases, without ever blocking the
caller.

The tracker runs in a child process that reads records from a non-blocking pipe. In the caller's
process a tracker may block forever, as W&B does if its own service process stops. If it fails or
hangs, the sink warns once, and the caller continues.

The child reads one JSON object per line: first {"start": ...}, then {"record": ...} for each record
and {"table": ...} for each table, then {"finish": exit status}. It answers the first with {"run":
URL or directory} or {"error": reason}. If the input ends without "finish", the parent died, and the
run is marked as failed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol, Self

import structlog

from grpo_core.errors import GrpoError

log = structlog.get_logger()

START_DEADLINE_S = 120.0
FINISH_DEADLINE_S = 30.0
_KILL_DEADLINE_S = 5.0
PIPE_BYTES = 1024 * 1024
"""Room for about 500 records that the tracker has not read; Linux's default limit for a user."""


@dataclass(frozen=True)
class Tool:
    """A tracker, as the messages name it.

    Args:
        event: prefix of the log events
        module: the child process; it calls `serve`
        start_advice: what to do if it does not start
        failure_hint: what becomes of the records if it fails later
        unavailable: raised if it does not start
    """

    name: str
    event: str
    module: str
    start_advice: str
    failure_hint: str
    unavailable: type[GrpoError]


@dataclass(frozen=True)
class Table:
    """A table of one step. All of it must fit into the pipe, together with the records that the
    tracker has not read."""

    name: str
    step: int
    columns: list[str]
    rows: list[list[Any]]


class TrackerSink:
    """Owns the child process. `variables`: further ones for the child."""

    def __init__(self, tool: Tool, variables: Mapping[str, str] | None = None) -> None:
        self._tool = tool
        # In its own session, because Ctrl-C is for the parent only, which then tells the child to
        # finish.
        self._child = subprocess.Popen(
            [sys.executable, "-m", tool.module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env=os.environ | (variables or {}),
        )
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._to_child, self._from_child = self._child.stdin, self._child.stdout
        os.set_blocking(self._to_child.fileno(), False)
        # Above the user's limit: the pipe keeps 64 KiB, 30 records.
        with contextlib.suppress(OSError):
            fcntl.fcntl(self._to_child, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._given_up = False

    @classmethod
    def started(
        cls, tool: Tool, start: Mapping[str, Any], variables: Mapping[str, str] | None = None
    ) -> Self:
        """Start the child process and wait until the tracker has opened a run.

        Args: start: what the child needs to open it

        Raises:
            GrpoError: `tool.unavailable`, with the tracker's own message.
        """
        sink = cls(tool, variables)
        try:
            where = sink.open(start)
        except BaseException:
            sink.abandon()
            raise
        log.info(f"{tool.event}.started", run=where, project=start["project"], group=start["group"])
        return sink

    @property
    def pid(self) -> int:
        return self._child.pid

    def open(self, start: Mapping[str, Any], deadline_s: float = START_DEADLINE_S) -> str:
        """Open the run; returns its URL, or the directory of a tracker that is offline. Raises as
        `started`."""
        tool = self._tool
        with contextlib.suppress(OSError):  # the child has ended; the empty answer shows it
            self._send({"start": start})
        if not select.select([self._from_child], [], [], deadline_s)[0]:
            raise self._unavailable(f"{tool.name} did not start within {deadline_s:g} s")
        answer = self._from_child.readline()
        if not answer:
            raise self._unavailable(f"the process of {tool.name} exited during its start")
        reply: dict[str, str] = json.loads(answer)
        if "error" in reply:
            raise self._unavailable(f"{tool.name} did not start: {reply['error']}")
        return reply["run"]

    def _unavailable(self, why: str) -> GrpoError:
        return self._tool.unavailable(f"{why}; {self._tool.start_advice}")

    def write(self, record: Mapping[str, Any]) -> None:
        """Send one record, which has a key `step`. Never raises and never waits: a tracker must
        not stop a run."""
        self._send_or_give_up({"record": record})

    def write_table(self, table: Table) -> None:
        """Send a table before the record of the next step. Never raises and never waits."""
        self._send_or_give_up({"table": asdict(table)})

    def _send_or_give_up(self, message: dict[str, Any]) -> None:
        if self._given_up:
            return
        try:
            self._send(message)
        except BlockingIOError:
            self._give_up(f"{self._tool.name} reads no more records, and its pipe is full")
        except OSError as error:
            self._give_up(f"the process of {self._tool.name} ended ({error})")

    def close(self, failed: bool, deadline_s: float = FINISH_DEADLINE_S) -> None:
        """Finish the run, as failed or not, and end the child. Never raises."""
        if self._given_up:
            return
        name = self._tool.name
        try:
            self._send({"finish": int(failed)})
            status = self._child.wait(deadline_s)
        except (OSError, subprocess.TimeoutExpired) as error:
            self._give_up(f"{name} did not finish the run ({error})")
            return
        if status:
            self._give_up(f"the process of {name} ended with status {status}")
        self._release()

    def abandon(self) -> None:
        """Kill the child at once."""
        self._given_up = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(_KILL_DEADLINE_S)
        self._release()

    def _send(self, message: dict[str, Any]) -> None:
        """Raises BlockingIOError if the pipe is full, OSError if the child has ended."""
        line = json.dumps(message).encode() + b"\n"
        if os.write(self._to_child.fileno(), line) < len(line):
            raise BlockingIOError

    def _give_up(self, why: str) -> None:
        log.warning(
            f"{self._tool.event}.failed",
            reason=why,
            hint=f"the run continues without {self._tool.name}; {self._tool.failure_hint}",
        )
        self.abandon()

    def _release(self) -> None:
        self._to_child.close()
        self._from_child.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)


class CannotOpen(Exception):
    """In the child: the tracker's reason."""


class OpenRun(Protocol):
    """A run of the tracker, in the child. `where`: its URL or directory."""

    where: str

    def log(self, record: dict[str, Any]) -> None: ...

    def log_table(self, table: dict[str, Any]) -> None: ...

    def finish(self, exit_code: int) -> None: ...


def serve(open_run: Callable[[dict[str, Any]], OpenRun]) -> None:
    """The child process. Args: open_run: raises `CannotOpen`"""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # for what the tracker prints

    def answer(message: dict[str, str]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    start = json.loads(sys.stdin.readline())["start"]
    try:
        run = open_run(start)
    except CannotOpen as error:
        answer({"error": str(error)})
        raise SystemExit(1) from None
    answer({"run": run.where})
    exit_code = 1
    for line in sys.stdin:
        message = json.loads(line)
        if "finish" in message:
            exit_code = message["finish"]
            break
        if "table" in message:
            run.log_table(message["table"])
        else:
            run.log(message["record"])
    run.finish(exit_code)
