"""Shows at a terminal what the services of a run warn of, and what they do in a long silence."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from pathlib import Path

from grpo_core.tree.sections import TRAINER
from grpo_runs.run_directory import RunDirectory
from grpo_runs.screen import Screen
from grpo_runs.watch.logs import ServiceLogs
from grpo_runs.watch.services import ENVIRONMENT, ServiceFacts, stage_of

LOOK_EVERY_POLLS = 20
"""Once a second."""
SPOIL_A_RUN = ("loss.sign", "rewards.all_equal", "reward.failed")


class ServiceNews:
    """Follows the logs of services from now on.

    Args:
        logs: directory
        run: in whose directory, or --save-path, the trainer tells its stage
        shown: the service whose log is shown as it is
    """

    def __init__(self, screen: Screen, logs: Path, run: RunDirectory, shown: str = "") -> None:
        self._screen, self._run, self._shown = screen, run, shown
        self._polls = itertools.count()
        self.logs = ServiceLogs(logs)
        self.logs.read_new()
        self.logs.warnings.clear()  # those of the run before a resume, and what it counted
        self.logs.sampling.clear()
        self._told: set[str] = set()
        self._pids: Mapping[str, int] = {}
        self._began = time.time()

    def watch(self, pids: Mapping[str, int]) -> None:
        """Call it often. Args: pids: by service"""
        self._pids = pids
        if next(self._polls) % LOOK_EVERY_POLLS == 0:
            self.look()

    def look(self) -> None:
        """Show the first warning of each name."""
        self.logs.read_new()
        for name, one in self.logs.warnings.items():
            # An error without a dot in its name ends its service, and is shown then.
            if name not in self._told and one.service != self._shown and "." in one.event:
                self._screen.warning(f"{name}: {one.text}")
            self._told.add(name)

    def repeat(self) -> None:
        """Show again what spoils a run, at its end."""
        for name, one in self.logs.warnings.items():
            if one.event in SPOIL_A_RUN:
                self._screen.warning(f"{name}: {one.text}")

    def waited_for(self) -> str:
        """What the trainer and the environments do now."""
        facts = ServiceFacts(
            pids=self._pids,
            is_running=True,
            began=self._began,
            trainer=stage_of(self._run),
            environments=dict(self.logs.sampling),
        )
        names = (TRAINER, ENVIRONMENT)
        told = [one for one in facts.shown() if one["name"].startswith(names)]
        return "; ".join(f"{one['name']} {one['stage']} {one['detail']}".strip() for one in told)
