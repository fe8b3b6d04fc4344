"""Metrics of a step's tokens by lag: how many steps older the weights are that sampled them.

An old policy moves every one of these metrics, so only tokens of one lag can be compared from step
to step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.algo.logprob_comparison import TokenTable
from grpo_trainer.data.collate import Origin
from grpo_trainer.objective.kl import MAX_LOG_RATIO

OLDEST = 4
"""Larger lags are counted together."""


def by_lag(
    table: TokenTable, origins: Sequence[Origin], held: PolicyVersion
) -> Iterator[tuple[str, float]]:
    """Name and value of each metric; those of tokens of an unknown version are missing.

    Args:
        table: the trained tokens
        origins: of each sequence
        held: version of the trainer's weights
    """
    lags = torch.tensor([_lag(origin.version, held) for origin in origins])[table.sequence]  # [N]
    for lag in sorted(set(lags.tolist()) - {-1}):
        prefix = f"lag_{lag}{'_or_more' if lag == OLDEST else ''}"
        for name, value in _metrics(table.where(lags == lag)):
            yield f"{prefix}/{name}", value


def _lag(version: PolicyVersion | None, held: PolicyVersion) -> int:
    """-1 if it is unknown."""
    if version is None or version.epoch != held.epoch:
        return -1
    return max(0, min(OLDEST, held.step - version.step))


def _metrics(table: TokenTable) -> Iterator[tuple[str, float]]:
    """Args: table: not empty"""
    distance = table.diff.abs().double()
    diff = table.diff.double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = diff.exp()
    yield "tokens", len(table)
    yield "kl_k1", -float(diff.mean())
    yield "kl_k3", float((ratio - 1 - diff).mean())
    yield "diff_abs_mean", float(distance.mean())
    yield "diff_abs_p99", table.diff_abs_quantile(0.99) or 0.0
    yield "diff_abs_max", float(distance.max())
    yield "mean_ratio", float(ratio.mean())
    yield "effective_sample_fraction", float(ratio.mean().square() / ratio.square().mean())
    if not bool(table.entropy.isnan().any()):
        yield "entropy", float(table.entropy.mean())
