"""What the shapes of run share: hits, their log, and the processes and resources of a run."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

PROMISED_S = 30.0
"""From the moment at which every killed process is ready again to the next trained step."""
PER_STEP = ("batches", "rollouts")
"""Directories that get a file in each step."""


@dataclass
class Hit:
    """One hit and what followed.

    Attributes:
        ready_s: from the hit until every killed process was ready again, model load included
        recovered_s: from then until the next step was trained
        resources: of all processes together; `shm` and `disk` in bytes
    """

    number: int
    shape: str
    victims: list[str]
    signal: str
    ready_s: float = 0.0
    recovered_s: float = 0.0
    step: int = 0
    resources: dict[str, float] = field(default_factory=dict)


class HitLog:
    """Prints each hit, and writes it into `journal.jsonl`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.hits: list[Hit] = []
        directory.mkdir(parents=True)

    def add(self, hit: Hit) -> None:
        self.hits.append(hit)
        with (self.directory / "journal.jsonl").open("a") as log:
            log.write(f"{json.dumps(asdict(hit))}\n")
        victims = f"{hit.signal} {'+'.join(hit.victims)}, " if hit.victims else ""
        say(
            f"{hit.shape} {hit.number + 1}: {victims}ready after {hit.ready_s:.1f} s, trained step "
            f"{hit.step} {hit.recovered_s:.1f} s later"
        )

    def summary(self) -> list[str]:
        """Recovery by victim, and resources in the first and the last quarter of each shape."""
        lines = []
        for name in dict.fromkeys(name for hit in self.hits for name in hit.victims):
            took = sorted(hit.recovered_s for hit in self.hits if name in hit.victims)
            lines.append(
                f"{name}: {len(took)} hits, next step {statistics.median(took):.1f} s after all "
                f"were ready, at most {took[-1]:.1f} s"
            )
        for shape in dict.fromkeys(hit.shape for hit in self.hits):
            found = [hit.resources for hit in self.hits if hit.shape == shape]
            quarter = max(1, len(found) // 4)
            for name in sorted(found[0]):
                first, last = (
                    statistics.median(each.get(name, 0.0) for each in part)
                    for part in (found[:quarter], found[-quarter:])
                )
                lines.append(f"{shape}, {name}: {first:,.0f} at first, {last:,.0f} at last")
        lines += [f"later than {PROMISED_S:g} s: {hit}" for hit in self.late()]
        return lines

    def late(self) -> list[Hit]:
        """Without a victim there is nothing to recover from."""
        return [hit for hit in self.hits if hit.victims and hit.recovered_s > PROMISED_S]


def resources(processes: Iterable[psutil.Process], *places: Path) -> dict[str, float]:
    """Args: places: directories of the run"""
    found: Counter[str] = Counter()
    for process in processes:
        with contextlib.suppress(psutil.Error):
            found["processes"] += 1
            found["descriptors"] += process.num_fds()
            found["resident"] += process.memory_info().rss
    for name, tops in (("shm", [Path("/dev/shm")]), ("disk", places)):
        for directory, _, files in (each for top in tops for each in os.walk(top)):
            found[name] += sum(_size(Path(directory, file)) for file in files)
    return {name: float(value) for name, value in found.items()}


def _size(path: Path) -> int:
    """In bytes; 0 if the run has removed it, or if it is kept for every step."""
    if path.suffix == ".log" or path.parent.name in PER_STEP:
        return 0
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


class Stopwatch:
    def __init__(self) -> None:
        self._began = time.monotonic()

    def lap(self) -> float:
        """Seconds since the start or the last lap."""
        before, self._began = self._began, time.monotonic()
        return self._began - before


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
