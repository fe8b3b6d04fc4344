"""Writes down which processes a run has, and their memory, for those who watch the run."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import psutil

from grpo_runs.process.stack import StopRequested
from grpo_runs.run_directory import RunDirectory

SAMPLE_EVERY_S = 5.0
"""A sample takes a tenth of a second of CPU time."""


class ProcessRecords:
    """Keeps `services.json` and `processes.jsonl` of a run's directory while the run goes on.

    Memory is the proportional set size: a page that n processes map counts 1/n in each. So weights
    that server and trainer share are not counted twice. If the kernel does not give it, the
    resident set size is used.

    Args: clock: Unix time in seconds
    """

    def __init__(self, run: RunDirectory, clock: Callable[[], float] = time.time) -> None:
        self._run = run
        self._clock = clock
        self.peak_bytes: dict[str, int] = {}
        """Highest memory of each service that was sampled."""
        self._next_at = 0.0
        self._watched: frozenset[str] = frozenset()
        runner = psutil.Process()
        self._content: dict[str, Any] = {
            "runner": {"pid": runner.pid, "created": runner.create_time()},
            "run_api_url": None,
            "services": {},
            "end": None,
        }
        self._write()

    def watch(self, pids: Mapping[str, int]) -> None:
        """Call it often: samples memory every few seconds, and if a service has started or ended,
        so that short runs have some samples. Args: pids: process ids by service"""
        if self._content["services"] != pids:
            self._content["services"] = {**self._content["services"], **pids}
            self._write()
        watched = frozenset(pids)
        if watched == self._watched and time.monotonic() < self._next_at:
            return
        self._watched = watched
        sample = {name: tree_bytes(pid) for name, pid in pids.items()}
        for name, size in sample.items():
            self.peak_bytes[name] = max(self.peak_bytes.get(name, 0), size)
        self._next_at = time.monotonic() + SAMPLE_EVERY_S
        if sample:
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


def tree_bytes(pid: int) -> int:
    """Memory of a process and its descendants; 0 if it has ended."""
    try:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    return sum(_process_bytes(process) for process in family)


def _process_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.AccessDenied:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:  # a zombie has no memory either
        return 0
