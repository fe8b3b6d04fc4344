"""Builds the records of a step's rollouts from the batch and from what the trainer computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from statistics import fmean

import numpy
from numpy.typing import NDArray

from grpo_core.rollouts.of_group import records_of_group
from grpo_core.rollouts.record import RolloutRecord
from grpo_core.wire.fields import FLOAT32_MAX
from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.algo.logprob_comparison import TokenTable
from grpo_trainer.data.collate import Batch
from grpo_trainer.data.group_checks import UsableGroup

DECIMALS = 7
"""Of logprobs and advantages: about the precision of float32."""


@dataclass(frozen=True)
class StepRollouts:
    """What the records of one step are built from. Threads may read it, since nothing changes it.

    Args:
        step: counted from 1
        epoch: of the trainer
        groups: those trained on
        batch: collated from `groups`
        tokens: the trained tokens of `batch`
    """

    step: int
    epoch: int
    groups: Sequence[UsableGroup]
    batch: Batch
    tokens: TokenTable

    def records(self) -> list[RolloutRecord]:
        """One for each sequence, group after group."""
        return [r for group in range(len(self.groups)) for r in self.records_of(group)]

    def records_of(self, group: int) -> list[RolloutRecord]:
        """Args: group: index in the batch"""
        usable = self.groups[group]
        records = records_of_group(self.step, group, usable.group, usable.facts)
        for record, row in zip(records, self._rows_of[group], strict=True):
            self._complete(record, usable, row)
        return records

    def _complete(self, record: RolloutRecord, usable: UsableGroup, row: int) -> None:
        """Add what the trainer knows, and leave out the tokens that were cut off."""
        begin, end = self._ends[row : row + 2]
        cut = int(self._positions[end - 1]) + 1 if end > begin else 0
        record.mask[cut:] = [0] * (len(record.mask) - cut)
        record.logprobs = self._logp[begin:end]
        # Where none were logged, the batch has the trainer's own.
        record.behaviour_logprobs = (
            self._behaviour_logp[begin:end]
            if usable.is_logged
            else record.behaviour_logprobs[: end - begin]
        )
        record.advantage = self._advantage(row)
        record.temperature = usable.temperatures[record.index]
        first = PolicyVersion(*record.versions[0]) if record.versions else usable.version_bound
        record.staleness = self._staleness(first)

    def _advantage(self, row: int) -> float | None:
        """[T] of the batch has a value for each target: target t is the token at t + 1."""
        values = self._advantages[row]
        if len(values) > 1:
            trained = self._positions[slice(*self._ends[row : row + 2])]
            values = [values[t - 1] for t in trained.tolist()]
        return round(fmean(values), DECIMALS) if values else None

    def _staleness(self, version: PolicyVersion | None) -> int | None:
        """As the metric: steps of different epochs cannot be compared, and a bound counts like a
        version."""
        if version is None or version.epoch != self.epoch:
            return None
        return self.step - 1 - version.step

    @cached_property
    def _positions(self) -> NDArray[numpy.int64]:
        return self.tokens.position.numpy()

    @cached_property
    def _ends(self) -> list[int]:
        """[rows + 1] where the trained tokens of each row begin, and where those of the last end.
        The tokens are in the order of the rows."""
        counts = numpy.bincount(self.tokens.sequence.numpy(), minlength=len(self.batch.order))
        return [0, *counts.cumsum().tolist()]

    @cached_property
    def _logp(self) -> list[float]:
        return _rounded(self.tokens.logp.numpy())

    @cached_property
    def _behaviour_logp(self) -> list[float]:
        return _rounded(self.tokens.behaviour_logp.numpy())

    @cached_property
    def _advantages(self) -> list[list[float]]:
        """Of each row: [1], or [T] if the environment sent one for each token."""
        return [row for micro in self.batch.micro_batches for row in micro.advantages.tolist()]

    @cached_property
    def _rows_of(self) -> list[list[int]]:
        """The rows of each group's sequences."""
        row_of = {number: row for row, number in enumerate(self.batch.order)}
        numbers = count()
        return [[row_of[next(numbers)] for _ in range(u.group.size)] for u in self.groups]


def _rounded(values: NDArray[numpy.float32]) -> list[float]:
    """Args: values: [N] float32. An impossible token has the smallest float32: JSON knows no
    infinity."""
    exact = numpy.maximum(values.astype(numpy.float64), -FLOAT32_MAX)
    return exact.round(DECIMALS).tolist()  # type: ignore[no-any-return]
