"""The GRPO loss: a clipped policy gradient. Pure maths, without forward pass, logging or I/O.

Legend: B sequences of the micro-batch, T positions after the causal shift.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class LossSums:
    """Sums over the trained tokens of a micro-batch. They are in double precision, so that the sums
    of a step do not depend on its division into micro-batches. A field whose name ends in `max`
    holds a maximum instead."""

    tokens: float
    ratio: float
    ratio_square: float
    ratio_max: float
    clipped: float
    logp: float
    logp_square: float
    behaviour_logp: float
    behaviour_logp_square: float
    diff: float
    """The trainer's minus the server's logprob."""
    diff_abs: float
    diff_max: float
    """Maximum of the absolute difference."""
    kl_k3: float
    """Sum of ratio - 1 - log ratio, an estimate of the KL divergence."""
    positive_tokens: float
    positive_logp: float
    """Sum over the tokens of sequences with an advantage above 0."""
    negative_tokens: float
    negative_logp: float

    def __add__(self, other: Self) -> LossSums:
        def joined(name: str) -> float:
            a: float = getattr(self, name)
            b: float = getattr(other, name)
            return max(a, b) if name.endswith("max") else a + b

        return LossSums(**{f.name: joined(f.name) for f in fields(self)})

    def mean(self, name: str) -> float | None:
        """Mean per trained token of one of the sums; None if no token is trained on."""
        value: float = getattr(self, name)
        return value / self.tokens if self.tokens else None

    def std(self, name: str) -> float | None:
        """Sample standard deviation (divided by n - 1) of "logp" or "behaviour_logp"; None for
        fewer than two tokens."""
        if self.tokens < 2:
            return None
        total: float = getattr(self, name)
        squares: float = getattr(self, f"{name}_square")
        deviation: float = squares - total * total / self.tokens
        return math.sqrt(max(0.0, deviation) / (self.tokens - 1))

    @property
    def effective_sample_fraction(self) -> float | None:
        """(sum r)^2 / (n sum r^2): Kish's effective sample size per sample; 1 if all tokens are
        fresh."""
        if not self.ratio_square:
            return None
        return self.ratio * self.ratio / (self.tokens * self.ratio_square)


NO_SUMS = LossSums(**{field.name: 0.0 for field in fields(LossSums)})


def grpo_loss(
    logp: Tensor,
    behaviour_logp: Tensor,
    advantages: Tensor,
    token_weight: Tensor,
    clip_eps: float,
) -> Tensor:
    """Sum over tokens of `-weight * min(r A, clip(r, 1-eps, 1+eps) A)`, r = exp(logp - behaviour).

    PPO's clipped surrogate (arXiv 1707.06347, equation 7) with group-relative advantages. The
    minimum is right for both signs of A: if A < 0 and the ratio is too high, it keeps the gradient
    that a maximum would remove.

    Args:
        logp: [B, T] logprob of each target token under the policy, at the temperature that sampled
            it
        behaviour_logp: [B, T] the server's logprob when it sampled the token
        advantages: [B]
        token_weight: [B, T] weight of each token; 0 if it is not trained on
        clip_eps: half-width of the interval in which the ratio may move

    Returns:
        The loss: a scalar, to be minimised.
    """
    ratio = _log_ratio(logp, behaviour_logp).exp()
    clipped = _clipped(ratio, clip_eps)
    advantage = advantages.unsqueeze(-1)  # [B, 1]
    surrogate = torch.minimum(ratio * advantage, clipped * advantage)  # [B, T]
    return -(token_weight * surrogate).sum()


@torch.no_grad()
def loss_sums(
    logp: Tensor,
    behaviour_logp: Tensor,
    advantages: Tensor,
    token_weight: Tensor,
    clip_eps: float,
) -> LossSums:
    """Sums for the metrics. Args: those of `grpo_loss`, in host memory, because each sum is
    read."""
    trained = token_weight > 0
    if not bool(trained.any()):
        return NO_SUMS
    log_ratio = _log_ratio(logp, behaviour_logp)
    ratio = log_ratio.exp()
    is_clipped = ratio != _clipped(ratio, clip_eps)
    advantage = advantages.unsqueeze(-1).expand_as(logp)[trained]  # [N], like all tensors below
    logp, behaviour_logp = logp[trained].double(), behaviour_logp[trained].double()
    log_ratio = log_ratio[trained].double()
    diff, ratio = logp - behaviour_logp, log_ratio.exp()
    positive, negative = advantage > 0, advantage < 0
    return LossSums(
        tokens=len(logp),
        ratio=float(ratio.sum()),
        ratio_square=float(ratio.square().sum()),
        ratio_max=float(ratio.max()),
        clipped=float(is_clipped[trained].sum()),
        logp=float(logp.sum()),
        logp_square=float(logp.square().sum()),
        behaviour_logp=float(behaviour_logp.sum()),
        behaviour_logp_square=float(behaviour_logp.square().sum()),
        diff=float(diff.sum()),
        diff_abs=float(diff.abs().sum()),
        diff_max=float(diff.abs().max()),
        kl_k3=float((ratio - 1 - log_ratio).sum()),
        positive_tokens=float(positive.sum()),
        positive_logp=float(logp[positive].sum()),
        negative_tokens=float(negative.sum()),
        negative_logp=float(logp[negative].sum()),
    )


def _log_ratio(logp: Tensor, behaviour_logp: Tensor) -> Tensor:
    """The bounded log ratio. Placeholders and near-impossible tokens would overflow exp, and inf *
    0 is NaN. The bound is far outside every clipping interval."""
    return (logp - behaviour_logp).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _clipped(ratio: Tensor, clip_eps: float) -> Tensor:
    return ratio.clamp(1.0 - clip_eps, 1.0 + clip_eps)
