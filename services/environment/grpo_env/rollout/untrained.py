"""Keeps what people want to see of groups that are not trained on: counts, and some rollouts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from grpo_core.rollouts.files import remove_later_steps, write_step
from grpo_core.rollouts.record import RolloutRecord, records_of_group
from grpo_core.rollouts.untrained import COUNTS_FILE, DROPPED, EVALUATION, Example, GroupsFile
from grpo_env.rollout.groups import SampledGroup

log = structlog.get_logger()

KEPT_GROUPS = 8
"""Of the groups that are dropped in a step, and of the items of a task that are evaluated."""
KEPT_STEPS = 10
_EXAMPLES = 3
_LONGEST_EXAMPLE = 300  # characters


@dataclass
class _Sample:
    """Rollouts of one step."""

    step: int = -1
    groups: int = 0
    records: list[RolloutRecord] = field(default_factory=list)
    is_new: bool = False

    def add(self, step: int, sampled: SampledGroup) -> None:
        if sampled.group is None:
            return
        if step != self.step:
            self.step, self.groups, self.records = step, 0, []
        self.records += records_of_group(step, self.groups, sampled.group.without_padding())
        self.groups += 1
        self.is_new = True


class UntrainedRollouts:
    """The directory of `--untrained-dir`. Each environment needs its own. None: nothing is kept."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._dropped, self._evaluated = _Sample(), _Sample()
        self._examples: list[Example] = []

    def dropped(self, step: int, sampled: SampledGroup) -> None:
        """Args: step: the training step that the group was sampled for"""
        if self._directory is None:
            return
        if step > self._dropped.step:
            self._examples = []
        elif step < self._dropped.step or self._dropped.groups == KEPT_GROUPS:
            return
        self._dropped.add(step, sampled)
        if len(self._examples) < _EXAMPLES:
            text = sampled.answers[0][:_LONGEST_EXAMPLE]
            self._examples.append(Example(score=sampled.grades[0].score, text=text))

    def evaluated(self, step: int, groups: Iterable[SampledGroup]) -> None:
        """Args: step: training steps that the weights include"""
        for sampled in groups:
            self._evaluated.add(step, sampled)
        self._write(EVALUATION, self._evaluated)

    def save(self, counts: GroupsFile) -> None:
        """Replace `groups.json`, and write the rollouts of dropped groups that are new."""
        if self._directory is None:
            return
        counts = counts.model_copy(update={"examples": self._examples})
        part = self._directory / f".{COUNTS_FILE}.part"
        with _logged():
            self._directory.mkdir(parents=True, exist_ok=True)
            part.write_text(counts.model_dump_json())
            part.replace(self._directory / COUNTS_FILE)
        self._write(DROPPED, self._dropped)

    def _write(self, name: str, sample: _Sample) -> None:
        if self._directory is None or not sample.is_new:
            return
        with _logged():
            remove_later_steps(self._directory / name, sample.step)  # of a run that was resumed
            write_step(self._directory / name, sample.step, sample.records, KEPT_STEPS)
            sample.is_new = False


@contextmanager
def _logged() -> Iterator[None]:
    """The run goes on without these files."""
    try:
        yield
    except OSError as error:
        log.warning("untrained_rollouts.not_written", error=str(error))
