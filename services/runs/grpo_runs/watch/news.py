"""Shows at a terminal what the services of a run warn of, and what they do in a long silence."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from grpo_core.tree.sections import TRAINER
from grpo_runs.run_directory import RunDirectory
from grpo_runs.screen import Screen
from grpo_runs.watch.live_run import duration
from grpo_runs.watch.logs import ServiceLogs
from grpo_runs.watch.services import ENVIRONMENT, ServiceFacts, stage_of


class ServiceNews:
    """Follows the logs of services from now on.

    Args:
        logs: directory
        run: in whose directory, or --save-path, the trainer tells its stage
        shown: the service whose log is shown as it is
    """

    def __init__(self, screen: Screen, logs: Path, run: RunDirectory, shown: str = "") -> None:
        self._screen = screen
        self._run = run
        self._shown = shown
        self._logs = ServiceLogs(logs)
        self._logs.read_new()
        self._logs.warnings.clear()  # those of the run before a resume
        self._told: set[str] = set()
        self._pids: Mapping[str, int] = {}
        self._began = time.time()

    def watch(self, pids: Mapping[str, int]) -> None:
        """Show the first warning of each name. Call it often.

        Args: pids: process ids by service
        """
        self._pids = dict(pids)
        self._logs.read_new()
        new = {name: w for name, w in self._logs.warnings.items() if name not in self._told}
        self._told |= new.keys()
        for name, one in new.items():
            is_an_end = "." not in one.event  # the error that ended a service, which is told then
            if not is_an_end and one.service != self._shown:
                self._screen.warning(f"{name}: {one.text}")

    def waited_for(self) -> str:
        """What the trainer and the environments do now."""
        facts = ServiceFacts(
            pids=self._pids,
            is_running=True,
            began=self._began,
            trainer=stage_of(self._run),
            environments=dict(self._logs.sampling),
        )
        names = (TRAINER, ENVIRONMENT)
        return "; ".join(_told(**one) for one in facts.shown() if one["name"].startswith(names))


def _told(name: str, stage: str, since: float | None, detail: str, **_: object) -> str:
    for_s = f" for {duration(time.time() - since)}" if since else ""
    return f"{name}: {stage}{for_s}" + (f" ({detail})" if detail else "")
