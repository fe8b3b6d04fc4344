"""What the logs of a run's services tell: warnings, named errors, and what environments count."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from grpo_core.rollouts.record import printable
from grpo_runs.watch.followed_file import FollowedFile

FIRST_READ_BYTES = 2**20
"""Of a log that is longer when it is first read, the end."""
LONGEST_TEXT = 1000  # characters
COUNTED = "groups.counted"
SENT, DROPPED, LOST = "groups_sent", "equal_scores", "lost"
_LINE = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d) \[(\w+) *\] (\S+)\s*(.*)")
"""As `grpo_core.logs` writes an event: time in UTC, level, name, fields."""
_SERVICE = re.compile(r" ?\bservice=\S+")
_SUBJECTS = {
    "check.failed": re.compile(r"\bcheck=(\S+)"),
    "metric.out_of_range": re.compile(r"\bmetric=(\S+)"),
    "reward.failed": re.compile(r"\berror=['\"]?(\w+)"),
}
"""Of events that tell of several things. Each is counted for itself."""
_LEVELS = {"warning": "warning", "error": "error", "critical": "error", "exception": "error"}
_IN_PROGRESS = re.compile(r"groups_in_progress=(\d+)")
_EVALUATED = re.compile(r"evaluated=(\d+)/(\d+)")
_FOR_BATCH = re.compile("for_batch='([^']*)'")
_FAILURES = re.compile(r"failures=\{(.*?)\}")
_COUNT = re.compile(r"'(\w+)': (\d+)")
_NUMBERS = re.compile(r"\b(dropped_share|groups_sent|equal_scores)'?[=:] ?(\d+(?:\.\d+)?)")


@dataclass(frozen=True)
class Warned:
    """The newest warning or error of a service with one name.

    Args:
        time: Unix time in seconds
        count: how many there were
    """

    time: float
    service: str
    level: str
    event: str
    text: str
    count: int = 1


@dataclass(frozen=True)
class EnvironmentReport:
    """What an environment reported last.

    Args:
        time: Unix time in seconds
        groups: number of groups in progress
        evaluation: how far its evaluation is; "" without one
        for_batch: groups of the next batch, and those dropped for it
        numbers: by field of the event, or reason for which groups were dropped
    """

    time: float
    groups: int
    evaluation: str = ""
    for_batch: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)

    def is_since(self, began: float) -> bool:
        """Args: began: Unix time in seconds"""
        return self.time >= began - 1  # logs have whole seconds


class ServiceLogs:
    """Follows the logs of a run's directory. Args: directory: it may not exist yet"""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[Path, FollowedFile] = {}
        self.warnings: dict[str, Warned] = {}
        """By service and event, and for some also by subject: `trainer check.failed stale`."""
        self.sampling: dict[str, EnvironmentReport] = {}
        """By name of the environment."""

    @property
    def counts(self) -> dict[str, int]:
        """How often each service warned of what: `{"trainer loss.sign": 1}`."""
        return {name: one.count for name, one in self.warnings.items()}

    @property
    def groups(self) -> dict[str, int]:
        """Of all environments: `groups_sent`, `equal_scores`, those dropped, and `lost`."""
        told = [one.numbers for one in self.sampling.values()]
        return {name: sum(int(one.get(name, 0)) for one in told) for name in (SENT, DROPPED, LOST)}

    def read_new(self) -> None:
        """Never raises: a log that cannot be read has no lines."""
        found: list[Warned] = []
        for path in sorted(self._directory.glob("*.log")):
            file = self._files.setdefault(path, FollowedFile(path, FIRST_READ_BYTES))
            lines = (line.decode(errors="replace").rstrip("\n") for line in file.read())
            found += self._of(path.stem, lines)
        for one in sorted(found, key=lambda one: one.time):
            subject = one.event in _SUBJECTS and _SUBJECTS[one.event].search(one.text)
            name = " ".join([one.service, one.event, *([subject[1]] if subject else [])])
            before = self.warnings[name].count if name in self.warnings else 0
            self.warnings[name] = replace(one, count=before + 1)

    def _of(self, service: str, lines: Iterable[str]) -> Iterator[Warned]:
        for line in lines:
            found = _LINE.fullmatch(line)
            if found is None:
                continue
            level, event, text = _LEVELS.get(found[2]), found[3], found[4]
            if level is None and event != COUNTED:
                continue
            time = datetime.fromisoformat(found[1]).replace(tzinfo=UTC).timestamp()
            if event == COUNTED and (count := _IN_PROGRESS.search(text)):
                done = _EVALUATED.search(text)
                evaluation = f"{done[1]} of {done[2]} items" if done else ""
                for_batch = "".join(_FOR_BATCH.findall(text))
                numbers = {name: float(value) for name, value in _NUMBERS.findall(text)}
                failures = _COUNT.findall("".join(_FAILURES.findall(text)))
                numbers[LOST] = sum(int(lost) for reason, lost in failures if reason != DROPPED)
                report = EnvironmentReport(time, int(count[1]), evaluation, for_batch, numbers)
                self.sampling[service] = report
            if level is not None:
                text = printable(_SERVICE.sub("", text).strip())[:LONGEST_TEXT]
                yield Warned(time, service, level, event, text)
