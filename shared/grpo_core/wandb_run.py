"""Sends records to Weights & Biases without ever blocking the caller.

W&B runs in a child process that reads records from a non-blocking pipe. In the caller's process
`log()`, `finish()` and the interpreter's exit block forever if W&B's own service process stops. If
W&B fails or hangs, the sink warns once, and the caller continues.

The child is this module as a program. It reads one JSON object per line: first {"start": ...}, then
{"record": ...} for each record and {"table": ...} for each table, then {"finish": exit status}. It
answers the first with {"run": URL or directory} or {"error": reason}. If the input ends without
"finish", the parent died, and the run is marked as failed.
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
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import IO, Any, Self

import structlog

from grpo_core.errors import WandbUnavailable

log = structlog.get_logger()

START_DEADLINE_S = 120.0
FINISH_DEADLINE_S = 30.0
_INIT_TIMEOUT_S = 90.0
_UPLOAD_TIMEOUT_S = 25.0
_KILL_DEADLINE_S = 5.0
PIPE_BYTES = 1024 * 1024
"""Room for about 500 records that W&B has not read; Linux's default limit for a user."""


@dataclass(frozen=True)
class WandbRun:
    """A run to open. None or "": W&B chooses.

    Args:
        config: the options to show
        one_record_per_step: False if a record's step may repeat an earlier one
    """

    project: str | None
    group: str | None
    name: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    one_record_per_step: bool = True


@dataclass(frozen=True)
class Table:
    """A table of one step. All of it must fit into the pipe, together with the records that W&B
    has not read."""

    name: str
    step: int
    columns: list[str]
    rows: list[list[Any]]


def start_wandb(run: WandbRun, api_key: str | None = None) -> WandbSink:
    """Start the child process and wait until W&B has opened a run.

    Raises:
        WandbUnavailable: W&B did not open a run, for example because no user is logged in.
    """
    sink = WandbSink(api_key)
    try:
        where = sink.open(
            {
                **asdict(run),
                "project": run.project or None,
                "group": run.group or None,
                "pid": os.getpid(),
                "init_timeout_s": _INIT_TIMEOUT_S,
                "finish_timeout_s": _UPLOAD_TIMEOUT_S,
            }
        )
    except BaseException:
        sink.abandon()
        raise
    log.info("wandb.started", run=where, project=run.project, group=run.group)
    return sink


class WandbSink:
    """Owns the child process. `api_key`: None if W&B finds a key itself."""

    def __init__(self, api_key: str | None = None) -> None:
        # In its own session, because Ctrl-C is for the parent only, which then tells the child to
        # finish.
        self._child = subprocess.Popen(
            [sys.executable, "-m", "grpo_core.wandb_run"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env=os.environ | ({"WANDB_API_KEY": api_key} if api_key else {}),
        )
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._to_child, self._from_child = self._child.stdin, self._child.stdout
        os.set_blocking(self._to_child.fileno(), False)
        # Above the user's limit: the pipe keeps 64 KiB, 30 records.
        with contextlib.suppress(OSError):
            fcntl.fcntl(self._to_child, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._given_up = False

    @property
    def pid(self) -> int:
        return self._child.pid

    def open(self, start: dict[str, Any], deadline_s: float = START_DEADLINE_S) -> str:
        """Open the run; returns its URL, or its directory if W&B is offline.

        Raises:
            WandbUnavailable: with W&B's own message.
        """
        with contextlib.suppress(OSError):  # the child has ended; the empty answer shows it
            self._send({"start": start})
        if not select.select([self._from_child], [], [], deadline_s)[0]:
            raise WandbUnavailable(f"W&B did not start within {deadline_s:g} s; {_ADVICE}")
        answer = self._from_child.readline()
        if not answer:
            raise WandbUnavailable(f"the W&B process exited during its start; {_ADVICE}")
        reply: dict[str, str] = json.loads(answer)
        if "error" in reply:
            raise WandbUnavailable(f"W&B did not start: {reply['error']}; {_ADVICE}")
        return reply["run"]

    def write(self, record: Mapping[str, Any]) -> None:
        """Send one record, which has a key `step`. Never raises and never waits: W&B must not
        stop a run."""
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
            self._give_up("W&B reads no more records, and its pipe is full")
        except OSError as error:
            self._give_up(f"the process of W&B ended ({error})")

    def close(self, failed: bool, deadline_s: float = FINISH_DEADLINE_S) -> None:
        """Finish the run, as failed or not, and end the child. Never raises."""
        if self._given_up:
            return
        try:
            self._send({"finish": int(failed)})
            status = self._child.wait(deadline_s)
        except (OSError, subprocess.TimeoutExpired) as error:
            self._give_up(f"W&B did not finish the run ({error})")
            return
        if status:
            self._give_up(f"the process of W&B ended with status {status}")
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
            "wandb.failed",
            reason=why,
            hint="the run continues without W&B; see the messages of W&B above; `wandb sync` "
            "uploads the records in ./wandb",
        )
        self.abandon()

    def _release(self) -> None:
        self._to_child.close()
        self._from_child.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(failed=exc_type is not None)


_ADVICE = (
    "see the messages of W&B above. Log in with `wandb login`, or set "
    "WANDB_MODE=offline and upload later with `wandb sync`, or omit --use-wandb"
)


def main(source: IO[str] = sys.stdin, answers: IO[str] = sys.stdout) -> None:
    start = json.loads(source.readline())["start"]
    run = _start(start, answers)
    exit_code = 1
    for line in source:
        message = json.loads(line)
        if "finish" in message:
            exit_code = message["finish"]
            break
        record = _table_of(message["table"]) if "table" in message else message["record"]
        run.log(record, step=record["step"] if start["one_record_per_step"] else None)
    run.finish(exit_code=exit_code)


def _start(start: dict[str, Any], answers: IO[str]) -> Any:
    import wandb

    try:
        run = wandb.init(
            project=start["project"],
            group=start["group"],
            name=start["name"],
            config=start["config"],
            settings=wandb.Settings(
                console="off",
                init_timeout=start["init_timeout_s"],
                finish_timeout=start["finish_timeout_s"],
                x_stats_pid=start["pid"],
            ),
        )
    except wandb.Error as error:
        _answer(answers, {"error": f"{type(error).__name__}: {error}"})
        raise SystemExit(1) from None
    if not start["one_record_per_step"]:
        run.define_metric("*", step_metric="step")
    _answer(answers, {"run": run.url or run.dir})
    return run


def _table_of(table: dict[str, Any]) -> dict[str, Any]:
    import wandb

    value = wandb.Table(columns=table["columns"], data=table["rows"])
    return {"step": table["step"], table["name"]: value}


def _answer(answers: IO[str], message: dict[str, str]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
