"""Writes down which processes a run has, and their memory, for those who watch the run."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import psutil

from grpo_runs.process.stack import MemoryPeaks, StopRequested
from grpo_runs.run_directory import RunDirectory


class ProcessRecords:
    """Keeps `services.json` and `processes.jsonl` of a run's directory while the run goes on.

    Args: clock: Unix time in seconds
    """

    def __init__(self, run: RunDirectory, clock: Callable[[], float] = time.time) -> None:
        self._run = run
        self._clock = clock
        self._peaks = MemoryPeaks()
        runner = psutil.Process()
        self._content: dict[str, Any] = {
            "runner": {"pid": runner.pid, "created": runner.create_time()},
            "run_api_url": None,
            "services": {},
            "end": None,
        }
        self._write()

    @property
    def peak_bytes(self) -> dict[str, int]:
        """Highest memory of each service."""
        return self._peaks.peak_bytes

    def watch(self, pids: Mapping[str, int]) -> None:
        """Call it often. Args: pids: process ids by service"""
        if self._content["services"] != pids:
            self._content["services"] = {**self._content["services"], **pids}
            self._write()
        if sample := self._peaks.watch(pids):
            with self._run.processes.open("a") as file:
                file.write(json.dumps({"time": self._clock(), "bytes": sample}) + "\n")

    def found_run_api(self, url: str) -> None:
        """run-api answers at this URL."""
        self._content["run_api_url"] = url
        self._write()

    @contextlib.contextmanager
    def of_the_end(self) -> Iterator[None]:
        """Write how the context ends."""
        state, text = "failed", ""
        try:
            yield
            state = "completed"
        except StopRequested:
            state = "stopped"
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._content["end"] = {"state": state, "time": self._clock(), "text": text}
            self._write()

    def _write(self) -> None:
        part = self._run.services.with_name(f".{self._run.services.name}.part")
        part.write_text(json.dumps(self._content))
        part.replace(self._run.services)
