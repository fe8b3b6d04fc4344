"""What the logs of a run's services tell: warnings, named errors, and what environments count."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from grpo_core.rollouts.record import printable
from grpo_runs.watch.followed_file import FollowedFile

KEPT = 50
"""The newest warnings and errors."""
FIRST_READ_BYTES = 2**20
"""Of a log that is longer when it is first read, the end."""
LONGEST_TEXT = 1000  # characters
COUNTED = "groups.counted"
_LINE = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d) \[(\w+) *\] (\S+)\s*(.*)")
"""As `grpo_core.logs` writes an event: time in UTC, level, name, fields."""
_LEVELS = {"warning": "warning", "error": "error", "critical": "error", "exception": "error"}
_IN_PROGRESS = re.compile(r"groups_in_progress=(\d+)")
_EVALUATED = re.compile(r"evaluated=(\d+)/(\d+)")


@dataclass(frozen=True)
class Warned:
    """A warning or an error of a service. Args: time: Unix time in seconds"""

    time: float
    service: str
    level: str
    event: str
    text: str

    def shown(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Sampling:
    """What an environment reported last.

    Args:
        time: Unix time in seconds
        groups: number of groups in progress
        evaluation: how far its evaluation is; "" without one
    """

    time: float
    groups: int
    evaluation: str = ""


class ServiceLogs:
    """Follows the logs of a run's directory. Args: directory: it may not exist yet"""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[Path, FollowedFile] = {}
        self.warnings: deque[Warned] = deque(maxlen=KEPT)
        self.sampling: dict[str, Sampling] = {}
        """By name of the environment."""

    def read_new(self) -> None:
        """Never raises: a log that cannot be read has no lines."""
        found: list[Warned] = []
        for path in sorted(self._directory.glob("*.log")):
            file = self._files.setdefault(path, FollowedFile(path, FIRST_READ_BYTES))
            lines = (line.decode(errors="replace").rstrip("\n") for line in file.read())
            found += self._of(path.stem, lines)
        self.warnings.extend(sorted(found, key=lambda one: one.time))

    def _of(self, service: str, lines: Iterable[str]) -> Iterator[Warned]:
        for line in lines:
            found = _LINE.fullmatch(line)
            if found is None:
                continue
            time = datetime.fromisoformat(found[1]).replace(tzinfo=UTC).timestamp()
            level, event, text = _LEVELS.get(found[2]), found[3], found[4]
            if event == COUNTED and (count := _IN_PROGRESS.search(text)):
                done = _EVALUATED.search(text)
                evaluation = f"{done[1]} of {done[2]} items" if done else ""
                self.sampling[service] = Sampling(time, int(count[1]), evaluation)
            if level is not None:
                yield Warned(time, service, level, event, printable(text)[:LONGEST_TEXT])
