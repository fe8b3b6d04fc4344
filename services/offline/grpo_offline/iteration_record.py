"""What one iteration writes to `metrics/train_iter_000.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from grpo_core.wire.scored_group import RolloutFacts, ScoredGroup

_MEANS = {
    "loss_pg": "train/loss_policy",
    "loss_kl": "train/loss_kl",
    "loss_entropy": "train/loss_entropy",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "entropy": "policy/entropy",
    "kl_coef": "policy/kl_coef",
    "clipped_fraction": "grpo/clipped_fraction",
    "mean_ratio": "grpo/mean_ratio",
    "maxent_tau": "maxent/tau",
    "maxent_weights_entropy": "maxent/weights_entropy",
    "failed_checks": "checks/failed",
}
"""Key of the file: metric of the trainer, whose mean over the optimizer steps it is."""
_IDLE = 5e-7
"""Losses smaller than this are rounding: the policy's is 0 on fresh rollouts."""

Steps = Sequence[Mapping[str, Any]]


def last_steps(metrics: Path, count: int) -> list[dict[str, Any]]:
    """The trainer's records of the newest `count` optimizer steps."""
    lines = metrics.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines[-count:]]


def iteration_record(
    iteration: int, steps: Steps, groups: Sequence[ScoredGroup], is_frozen: bool
) -> dict[str, Any]:
    """Losses are means over the optimizer steps, with `loss_total = loss_pg + loss_kl +
    loss_entropy` and, for a penalty in the loss, `loss_kl = kl_coef * kl_divergence`; so
    `kl_divergence` is weighted with the coefficient of each step. It is None without a reference
    model.

    `served_step` and `trained_step`: optimizer steps that the weights included which sampled, and
    those which resulted.
    """
    scores = [score for group in groups for score in group.scores]
    means = {name: _mean(steps, metric) for name, metric in _MEANS.items()}
    parts = [means[name] or 0.0 for name in ("loss_pg", "loss_kl", "loss_entropy")]
    record: dict[str, Any] = {
        "iteration": iteration,
        "loss_total": sum(parts),
        **means,
        "kl_divergence": _divergence(steps, means),
        "reward_mean": fmean(scores),
        "reward_std": pstdev(scores),
        "equal_scores_fraction": fmean(len({*group.scores}) == 1 for group in groups),
        "completion_tokens_mean": fmean(
            sum(mask >= 0 for mask in masks) for group in groups for masks in group.masks
        ),
        "groups": len(groups),
        "sequences": len(scores),
        "optimizer_steps": len(steps),
        "served_step": _served_step(groups),
        "trained_step": steps[-1]["step"],
        "frozen": is_frozen,
    }
    return {name: value for name, value in record.items() if value is not None} | {
        "kl_divergence": record["kl_divergence"]
    }


def shown_loss(value: float) -> str:
    """Without the sign of a rounding error."""
    return f"{0.0 if abs(value) < _IDLE else value:.4f}"


def _mean(steps: Steps, metric: str) -> float | None:
    values = [step[metric] for step in steps if metric in step]
    return fmean(values) if values else None


def _divergence(steps: Steps, means: Mapping[str, float | None]) -> float | None:
    loss, coefficient = means["loss_kl"], means["kl_coef"]
    if loss and coefficient:
        return loss / coefficient
    return _mean(steps, "policy/reference_kl")


def _served_step(groups: Sequence[ScoredGroup]) -> int:
    return max(
        (
            version.step
            for group in groups
            for pair in RolloutFacts.of(group).policy_version
            for version in pair
        ),
        default=0,
    )
