"""Computes the metrics that describe a batch's data: rewards, lengths, receipts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from statistics import fmean, pstdev

from grpo_core.wire.fields import MASKED
from grpo_core.wire.receipt import RECEIPT
from grpo_core.wire.scored_group import RewardSample, RolloutFacts, ScoredGroup


def data_metrics(groups: Sequence[ScoredGroup], seq_len: int) -> dict[str, float | None]:
    """By name, as in a step's record; None for what environments do not report.

    Args: seq_len: longer sequences are cut to this number of tokens
    """
    facts = [RolloutFacts.of(group) for group in groups]
    seconds = [fact.generation_seconds for fact in facts if fact.generation_seconds is not None]
    samples = [fact.reward_sample for fact in facts if fact.reward_sample is not None]
    scores = [group.scores for group in groups]
    lengths = [len(masks) - masks.count(MASKED) for group in groups for masks in group.masks]
    return {
        "reward/mean": _reward_mean(samples, scores),
        **{f"reward/part/{name}": mean for name, mean in _reward_parts(samples).items()},
        "reward/std_in_group": fmean(pstdev(s) for s in scores),
        "reward/zero_variance_fraction": _zero_variance_fraction(samples, scores),
        "rollout/generation_time": fmean(seconds) if seconds else None,
        "rollout/completion_tokens_mean": fmean(lengths),
        "data/truncated_fraction": fmean(
            len(tokens) > seq_len for group in groups for tokens in group.tokens
        ),
        "checks/receipt_fraction": sum(
            RECEIPT in override for group in groups for override in group.overrides or ()
        )
        / len(lengths),
    }


def _reward_mean(samples: Sequence[RewardSample], scores: Sequence[Sequence[float]]) -> float:
    """Mean over all graded completions if the environments report dropped ones, else over the
    scores of the batch."""
    if len(samples) == len(scores):
        return sum(s.sum for s in samples) / sum(s.count for s in samples)
    return fmean(chain.from_iterable(scores))


def _zero_variance_fraction(
    samples: Sequence[RewardSample], scores: Sequence[Sequence[float]]
) -> float:
    """Share of groups whose scores are all equal, so that they teach nothing: of all graded groups
    if the environments count them, else of the batch."""
    graded = [s.groups for s in samples if s.groups is not None]
    if len(graded) == len(scores):
        return sum(s.equal_groups for s in samples) / sum(graded)
    return fmean(len(set(of_group)) == 1 for of_group in scores)


def _reward_parts(samples: Sequence[RewardSample]) -> dict[str, float]:
    """A completion whose reward lacks a part that others of its sample have counts as 0."""
    names = dict.fromkeys(name for sample in samples for name in sample.parts)
    having = {name: [s for s in samples if name in s.parts] for name in names}
    return {
        name: sum(s.parts[name] for s in found) / sum(s.count for s in found)
        for name, found in having.items()
    }
