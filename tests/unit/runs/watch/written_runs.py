"""Runs whose files a test writes, and grpo-watch's service that shows them."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from grpo_core.rollouts.files import ROLLOUTS, TOKENIZER, write_step
from grpo_core.rollouts.record import RolloutRecord
from grpo_runs.process.records import ProcessRecords
from grpo_runs.run_directory import RunDirectory
from grpo_runs.watch.api import watch_app
from grpo_runs.watch.live_run import LiveRun
from tests.support import conversations
from tests.support.wait import wait_for
from tests.unit.runs.records import evaluation, take_steps

LOOK_EVERY_S = 0.02
HOUR_S = 3600.0


class WrittenRun:
    """Args: seconds_per_look: time that passes from one look of the service to the next one"""

    def __init__(
        self, path: Path, options: Mapping[str, Any], name: str = "", seconds_per_look: float = 1
    ) -> None:
        self.run = RunDirectory(path)
        for directory in (self.run.logs, self.run.checkpoints, path / ROLLOUTS):
            directory.mkdir(parents=True)
        (path / "run-id").write_text(name or path.name)
        self.run.config.write_text(json.dumps(options))
        conversations.TOKENIZER.save(str(path / ROLLOUTS / TOKENIZER))
        self._now = time.time()
        self._seconds_per_look = seconds_per_look
        self.live = LiveRun(path.name, self.run, clock=self._clock)

    def _clock(self) -> float:
        self._now += self._seconds_per_look
        return self._now

    def step(
        self, step: int, reward: float, records: Sequence[RolloutRecord] = (), **metrics: Any
    ) -> None:
        """The trainer finishes a step of 40, which takes 1.5 s."""
        if records:
            write_step(self.run.path / ROLLOUTS, step, records)
        take_steps(self.run, step, **{"reward/mean": reward} | metrics)

    def evaluate(self, step: int, value: float) -> None:
        with self.run.evaluations.open("a") as file:
            file.write(evaluation(step, value).model_dump_json() + "\n")

    def start(self, *services: str, run_api_url: str | None = None) -> None:
        """As a command that starts the run here."""
        records = ProcessRecords(self.run)
        records.watch(dict.fromkeys(services, os.getpid()))
        if run_api_url:
            records.found_run_api(run_api_url)

    def stage(self, name: str, since: float) -> None:
        """Of the trainer."""
        stage = {"stage": name, "since": since, "pid": os.getpid()}
        (self.run.checkpoints / "stage.json").write_text(json.dumps(stage))

    def log(self, service: str, level: str, event: str, text: str, second: int = 0) -> None:
        line = f"2026-01-01T10:00:{second:02} [{level:9}] {event}   {text}\n"
        with (self.run.logs / f"{service}.log").open("a") as file:
            file.write(line)


@contextmanager
def served(runs: Sequence[WrittenRun], port: int = 0) -> Iterator[str]:
    """The address of the page. Args: port: 0 for any free one"""
    app = watch_app([one.live for one in runs], every_s=LOOK_EVERY_S)
    config = uvicorn.Config(app, port=port, log_level="critical", timeout_graceful_shutdown=0)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_for(lambda: server.started)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join()
