"""Computes the metrics that describe a batch's data: rewards, lengths and policy versions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from grpo_core.wire.fields import MASKED
from grpo_core.wire.policy_version import PolicyVersion
from grpo_core.wire.scored_group import RewardSample
from grpo_trainer.data.groups import UsableGroup


@dataclass(frozen=True)
class BatchStats:
    """Statistics of the groups that are trained on."""

    tokens: int
    """Prompt and completion tokens, without padding."""
    reward_mean: float
    reward_parts: dict[str, float]
    """Mean of each part of the reward, over all graded completions of the environments that report
    this part."""
    reward_std_in_group: float
    """Mean over groups of the population standard deviation of their scores."""
    zero_variance_fraction: float
    """Share of groups whose scores are all equal, so that they teach nothing: of all graded groups
    if the environments count them, else of the batch."""
    truncated_fraction: float
    """Share of sequences that were cut to --seq-len."""
    completion_tokens_mean: float
    """Trained tokens per sequence, including tokens that were cut off."""
    first_versions: list[PolicyVersion]
    """The policy version that sampled each completion's first token, if known."""
    version_bounds: list[PolicyVersion]
    """The newest policy version that may have sampled each of the other completions, if known."""
    bound_fraction: float
    """Share of groups with such a bound instead of a known version."""
    generation_s: float | None
    """Mean duration of the groups' generation requests in seconds, if environments report it."""


def batch_stats(groups: Sequence[UsableGroup], seq_len: int) -> BatchStats:
    """Args: seq_len: longer sequences are cut to this number of tokens."""
    lengths = [len(tokens) for usable in groups for tokens in usable.group.tokens]
    trained = [
        sum(mask != MASKED for mask in masks) for usable in groups for masks in usable.group.masks
    ]
    seconds = [usable.facts.generation_seconds for usable in groups]
    known_seconds = [s for s in seconds if s is not None]
    scores = [usable.group.scores for usable in groups]
    return BatchStats(
        tokens=sum(min(length, seq_len) for length in lengths),
        reward_mean=_reward_mean(groups),
        reward_parts=_reward_parts(groups),
        reward_std_in_group=fmean(pstdev(s) for s in scores),
        zero_variance_fraction=_zero_variance_fraction(groups),
        truncated_fraction=fmean(length > seq_len for length in lengths),
        completion_tokens_mean=fmean(trained),
        first_versions=[first for usable in groups for first, _ in usable.facts.policy_version],
        version_bounds=[
            usable.version_bound
            for usable in groups
            if usable.version_bound is not None
            for _ in range(usable.group.size)
        ],
        bound_fraction=fmean(usable.version_bound is not None for usable in groups),
        generation_s=fmean(known_seconds) if known_seconds else None,
    )


def _reward_mean(groups: Sequence[UsableGroup]) -> float:
    """Mean over all graded completions if the environments report dropped ones, else over the
    scores of the batch."""
    samples = _reward_samples(groups)
    if len(samples) == len(groups):
        return sum(s.sum for s in samples) / sum(s.count for s in samples)
    return fmean(score for usable in groups for score in usable.group.scores)


def _zero_variance_fraction(groups: Sequence[UsableGroup]) -> float:
    samples = _reward_samples(groups)
    graded = [s.groups for s in samples if s.groups is not None]
    if len(graded) == len(groups):
        return sum(s.equal_groups for s in samples) / sum(graded)
    return fmean(len(set(usable.group.scores)) == 1 for usable in groups)


def _reward_parts(groups: Sequence[UsableGroup]) -> dict[str, float]:
    """A completion whose reward lacks a part that others of its sample have counts as 0."""
    samples = _reward_samples(groups)
    names = dict.fromkeys(name for sample in samples for name in sample.parts)
    having = {name: [s for s in samples if name in s.parts] for name in names}
    return {
        name: sum(s.parts[name] for s in found) / sum(s.count for s in found)
        for name, found in having.items()
    }


def _reward_samples(groups: Sequence[UsableGroup]) -> list[RewardSample]:
    return [s for usable in groups if (s := usable.facts.reward_sample) is not None]
