"""The clipped policy-gradient objective. Only maths: no forward pass, no logging, no I/O.

Legend: B sequences of the micro-batch, T positions after the causal shift.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class LossSums:
    """Sums over the trained tokens of a micro-batch (`max` for the maximum), so that the
    micro-batches of one step add up exactly."""

    tokens: float
    ratio: float
    clipped: float
    logp: float
    behaviour_logp: float
    diff: float
    """Trainer's minus server's log-probability."""
    diff_abs: float
    diff_max: float

    def __add__(self, other: Self) -> LossSums:
        summed = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return LossSums(**{**summed, "diff_max": max(self.diff_max, other.diff_max)})

    def mean(self, name: str) -> float:
        """Mean of one of the sums per trained token; 0 where nothing was trained on."""
        value: float = getattr(self, name)
        return value / self.tokens if self.tokens else 0.0


NO_SUMS = LossSums(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def grpo_loss(
    logp: Tensor,
    behaviour_logp: Tensor,
    advantages: Tensor,
    token_weight: Tensor,
    clip_eps: float,
) -> tuple[Tensor, LossSums]:
    """Sum over tokens of `-weight * min(r A, clip(r, 1-eps, 1+eps) A)`, r = exp(logp - behaviour).

    PPO's clipped surrogate (arXiv 1707.06347, equation 7) with group-relative advantages. The
    minimum holds for either sign of A: with A < 0 it keeps the gradient of a ratio that is too
    high, the case that a maximum there would silence.

    Args:
        logp: [B, T] log-probability of each target token under the policy, at the temperature
            that sampled it
        behaviour_logp: [B, T] the same from the server, when it was sampled
        advantages: [B]
        token_weight: [B, T] what each token counts; 0 where it is not trained on
        clip_eps: half-width of the interval in which the ratio may move

    Returns:
        The loss (scalar, to be minimised) and sums for the metrics.
    """
    trained = token_weight > 0
    # Untrained positions hold placeholders, and a trained token may be all but impossible to one
    # side: exp would overflow, and inf * 0 is NaN. The bound lies far outside any clipping.
    log_ratio = (logp - behaviour_logp).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1.0 - clip_eps, 1.0 + clip_eps)
    advantage = advantages.unsqueeze(-1)  # [B, 1]
    surrogate = torch.minimum(ratio * advantage, clipped * advantage)  # [B, T]
    loss = -(token_weight * surrogate).sum()
    return loss, _sums(logp, behaviour_logp, ratio, clipped, trained)


@torch.no_grad()
def _sums(
    logp: Tensor, behaviour_logp: Tensor, ratio: Tensor, clipped: Tensor, trained: Tensor
) -> LossSums:
    if not bool(trained.any()):
        return NO_SUMS
    diff = (logp - behaviour_logp)[trained]
    return LossSums(
        tokens=float(trained.sum()),
        ratio=float(ratio[trained].sum()),
        clipped=float((ratio != clipped)[trained].sum()),
        logp=float(logp[trained].sum()),
        behaviour_logp=float(behaviour_logp[trained].sum()),
        diff=float(diff.sum()),
        diff_abs=float(diff.abs().sum()),
        diff_max=float(diff.abs().max()),
    )
