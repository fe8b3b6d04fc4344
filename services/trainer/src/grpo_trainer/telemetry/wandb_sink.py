"""Sends each step's record to Weights & Biases, without ever holding training up.

W&B runs in a child process and takes records through a pipe that is never waited for. Whatever
goes wrong with it, or hangs in it, stays there: the sink says so once, and training goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import structlog

from grpo_trainer.config.trainer import TrainerSettings
from grpo_trainer.errors import WandbUnavailable
from grpo_trainer.telemetry.metrics import Record

log = structlog.get_logger()

START_DEADLINE_S = 120.0
FINISH_DEADLINE_S = 30.0
_INIT_TIMEOUT_S = 90.0
_UPLOAD_TIMEOUT_S = 25.0
_KILL_DEADLINE_S = 5.0
MAX_UNSENT_BYTES = 1024 * 1024
"""About 500 records that W&B did not take."""


def start_wandb(settings: TrainerSettings) -> WandbSink:
    """Start the child and wait until W&B has opened a run.

    Raises:
        WandbUnavailable: it did not open a run, for example because nobody is logged in, or the
            file with the key cannot be read.
    """
    sink = WandbSink(_api_key(settings.wandb_key_file))
    try:
        where = sink.open(
            {
                "project": settings.wandb_project,
                "group": settings.wandb_group,
                "config": settings.model_dump(mode="json"),
                "pid": os.getpid(),
                "init_timeout_s": _INIT_TIMEOUT_S,
                "finish_timeout_s": _UPLOAD_TIMEOUT_S,
            }
        )
    except BaseException:
        sink.abandon()
        raise
    log.info(
        "W&B run opened", run=where, project=settings.wandb_project, group=settings.wandb_group
    )
    return sink


class WandbSink:
    """Owns the child process. `api_key`: None where it finds one by itself."""

    def __init__(self, api_key: str | None = None) -> None:
        # A session of its own: Ctrl-C is for the trainer, which then tells the child to finish.
        self._child = subprocess.Popen(
            [sys.executable, "-m", "grpo_trainer.telemetry.wandb_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env=os.environ | ({"WANDB_API_KEY": api_key} if api_key else {}),
        )
        assert self._child.stdin is not None
        self._pipe = self._child.stdin.fileno()
        os.set_blocking(self._pipe, False)
        self._unsent = b""
        self._given_up = False

    @property
    def pid(self) -> int:
        return self._child.pid

    def open(self, start: dict[str, Any], deadline_s: float = START_DEADLINE_S) -> str:
        """Open the run; returns its URL, or its directory where W&B is offline.

        Raises:
            WandbUnavailable: with W&B's own words.
        """
        self._unsent = _line({"start": start})
        give_up_at = time.monotonic() + deadline_s
        answer = b""
        while not answer.endswith(b"\n"):
            self._send()
            assert self._child.stdout is not None
            ready, _, _ = select.select([self._child.stdout], [], [], 0.1)
            part = os.read(self._child.stdout.fileno(), 65536) if ready else None
            if part == b"":
                raise WandbUnavailable(f"W&B ended while it started; {_ADVICE}")
            if part is None and time.monotonic() >= give_up_at:
                raise WandbUnavailable(f"W&B did not start within {deadline_s:g} s; {_ADVICE}")
            answer += part or b""
        said: dict[str, str] = json.loads(answer)
        if "error" in said:
            raise WandbUnavailable(f"W&B did not start: {said['error']}; {_ADVICE}")
        return said["run"]

    def write(self, record: Record) -> None:
        """Hand one record over. Never raises and never waits: W&B is no reason to stop."""
        if self._given_up:
            return
        self._unsent += _line({"record": record})
        try:
            self._send()
        except OSError as error:
            self._give_up(f"its process is gone ({error})")
            return
        if len(self._unsent) > MAX_UNSENT_BYTES:
            self._give_up(f"it takes nothing any more; {len(self._unsent)} bytes wait")

    def close(self, failed: bool, deadline_s: float = FINISH_DEADLINE_S) -> None:
        """Let W&B finish the run, as failed or not, and end the child; never raises."""
        if self._given_up:
            return
        give_up_at = time.monotonic() + deadline_s
        self._unsent += _line({"finish": int(failed)})
        try:
            while self._unsent and time.monotonic() < give_up_at:
                select.select([], [self._pipe], [], 0.1)
                self._send()
            status = self._child.wait(max(0.0, give_up_at - time.monotonic()))
        except (OSError, subprocess.TimeoutExpired) as error:
            self._give_up(f"it did not finish the run ({error})")
            return
        if status:
            self._give_up(f"its process ended with status {status}")
        self._release()

    def abandon(self) -> None:
        """End the child at once."""
        self._given_up = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(_KILL_DEADLINE_S)
        self._release()

    def _send(self) -> None:
        """As much as the pipe takes. Raises `OSError` where nobody reads any more."""
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                self._unsent = self._unsent[os.write(self._pipe, self._unsent) :]

    def _give_up(self, why: str) -> None:
        log.warning(
            "W&B failed; training goes on without it",
            why=why,
            what_to_do="its messages are above; `wandb sync` uploads what it kept in ./wandb, and "
            "--metrics-file keeps every record",
        )
        self.abandon()

    def _release(self) -> None:
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                pipe.close()

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
    "its messages are above. Log in with `wandb login`, or set WANDB_MODE=offline and upload "
    "later with `wandb sync`, or leave --use-wandb out"
)


def _api_key(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        return file.read_text().strip() or None
    except (OSError, UnicodeDecodeError) as error:
        raise WandbUnavailable(
            f"--wandb-key-file {file}: {error}; name a file with the API key alone"
        ) from error


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"
