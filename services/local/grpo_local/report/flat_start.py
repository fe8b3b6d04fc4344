"""A hint for a run whose first steps change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev

from grpo_local.report.metrics_file import StepRecord

FIRST_STEPS = 10
_STILL = 1e-3
"""A mean importance ratio this close to 1 means that the policy has hardly moved."""


def flat_start_hint(first: Sequence[StepRecord], lr: float) -> str | None:
    """The line to show after `FIRST_STEPS` steps, if neither the policy nor the reward has moved.

    The reward counts as flat if the means of both halves differ by less than the standard error of
    their difference.
    """
    if len(first) != FIRST_STEPS:
        return None
    ratios = [record.mean_ratio for record in first if record.mean_ratio is not None]
    rewards = [record.reward_mean for record in first]
    half = FIRST_STEPS // 2
    error = stdev(rewards) * (2 / half) ** 0.5
    has_moved = abs(fmean(rewards[half:]) - fmean(rewards[:half])) > error
    if has_moved or any(abs(ratio - 1) > _STILL for ratio in ratios):
        return None
    return (
        f"hint: in {FIRST_STEPS} steps neither the policy (ratio 1.000) nor the reward has moved. "
        f"If this goes on, raise --lr (now {lr:g}) threefold, or look at the rewards in the "
        "rollouts: prompts that are always or never solved teach nothing"
    )
