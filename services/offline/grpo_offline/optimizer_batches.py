"""Divides the groups of an iteration into the batches of its optimizer steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from grpo_core.wire.scored_group import ScoredGroup
from grpo_offline.errors import KeysInvalid
from grpo_trainer.advantages import group_advantages
from grpo_trainer.data.groups import GroupLimits, usable_group
from grpo_trainer.objectives import Objective

_OF_STEPS = ("maxent", "batch_std")
"""Advantages that the trainer computes from all groups of a step."""


def optimizer_batches(
    groups: Sequence[ScoredGroup], steps: int, objective: Objective, limits: GroupLimits
) -> list[list[ScoredGroup]]:
    """Batches of nearly equal numbers of sequences, in order.

    Advantages follow from whole groups: a group that two batches share carries its advantages
    along. Token weights follow from the batch that a sequence lands in.

    Args:
        groups: without padding
        steps: number of batches
    Raises:
        KeysInvalid: a group would be shared, but the objective needs whole ones.
    """
    ends = [0]
    for group in groups:
        ends.append(ends[-1] + group.size)
    cuts = [round(number * ends[-1] / steps) for number in range(steps + 1)]
    if not {*cuts} <= {*ends}:
        if objective.advantage in _OF_STEPS or (objective.kl_coef and objective.kl_in == "reward"):
            raise KeysInvalid(
                "this objective needs whole groups in each optimizer step: make train.batch_size "
                "times train.grad_accum_steps a multiple of data.rollouts_per_problem"
            )
        groups = _with_advantages(groups, objective, limits)
    return [[*_between(groups, ends, *cut)] for cut in pairwise(cuts)]


def _with_advantages(
    groups: Sequence[ScoredGroup], objective: Objective, limits: GroupLimits
) -> list[ScoredGroup]:
    usable = [usable_group(number, group, limits) for number, group in enumerate(groups)]
    found = group_advantages(usable, objective)
    return [
        group
        if group.advantages
        else group.model_copy(update={"advantages": [[value] for value in advantages.tolist()]})
        for group, advantages in zip(groups, found, strict=True)
    ]


def _between(
    groups: Sequence[ScoredGroup], ends: Sequence[int], first: int, last: int
) -> Iterator[ScoredGroup]:
    """The sequences `first` to `last` (not included) of all."""
    for group, (begin, end) in zip(groups, pairwise(ends), strict=True):
        kept = range(max(first, begin) - begin, min(last, end) - begin)
        if len(kept) == group.size:
            yield group
        elif kept:
            yield group.with_sequences(kept)
