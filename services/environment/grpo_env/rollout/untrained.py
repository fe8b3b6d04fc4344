"""Keeps rollouts that are not trained on, and lists lost groups, so that people can read them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import structlog

from grpo_core.rollouts.files import DROPPED, LOST_GROUPS, remove_later_steps, write_step
from grpo_core.rollouts.record import records_of_group
from grpo_env.rollout.groups import SampledGroup

log = structlog.get_logger()

KEPT_GROUPS = 8
"""Of the groups that are dropped in a step, and of the items of a task that are evaluated."""
KEPT_STEPS = 10
_EXAMPLES = 3
_LONGEST_EXAMPLE = 60  # characters


class UntrainedRollouts:
    """The directory of `--untrained-dir`. Each environment needs its own. None: writes nothing."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self.begin()

    def begin(self) -> None:
        """Forget the groups of an earlier run."""
        self._step = self._written = 0
        self._dropped: list[SampledGroup] = []

    @property
    def examples(self) -> str:
        """`score 0: "I do not know"; score 0: "7 apples"`"""
        shown = ((one.grades[0].score, " ".join(one.answers[0].split())) for one in self._dropped)
        return "; ".join(
            f'score {score:g}: "{text[:_LONGEST_EXAMPLE]}"' for score, text in [*shown][:_EXAMPLES]
        )

    def drop(self, step: int, sampled: SampledGroup) -> None:
        """Note a group whose scores are all equal. Args: step: that it was sampled for"""
        if step > self._step:
            self._step, self._written, self._dropped = step, 0, []
        if len(self._dropped) < KEPT_GROUPS:
            self._dropped.append(sampled)

    def lose(self, line: Mapping[str, object]) -> None:
        """Write the line of a lost group. The run goes on if that fails."""
        if self._directory is None:
            return
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with (self._directory / LOST_GROUPS).open("a") as lines:
                lines.write(json.dumps(line) + "\n")
        except OSError as error:
            log.warning("lost_groups.not_written", error=str(error))

    async def save_dropped(self) -> None:
        if len(self._dropped) > self._written:
            self._written = len(self._dropped)
            await asyncio.to_thread(self.save, DROPPED, self._step, [*self._dropped])

    def save(self, name: str, step: int, groups: Sequence[SampledGroup]) -> None:
        """Write the groups of a step. The run goes on if that fails."""
        if self._directory is None:
            return
        found = [one.group.without_padding() for one in groups if one.group is not None]
        records = (r for at, group in enumerate(found) for r in records_of_group(step, at, group))
        try:
            remove_later_steps(self._directory / name, step)  # of a run that was resumed
            write_step(self._directory / name, step, records, KEPT_STEPS)
        except OSError as error:
            log.warning("untrained_rollouts.not_written", error=str(error))
