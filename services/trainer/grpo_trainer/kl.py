"""Estimates the KL divergence from a reference model, per token, in nats."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_core.tree.objectives import KlEstimatorName

MAX_LOG_RATIO = 20.0
"""Bound on |log ratio|, far outside every clipping interval."""


def kl_terms(logp: Tensor, reference_logp: Tensor, estimator: KlEstimatorName) -> Tensor:
    """[...] an estimate from each sampled token, of Schulman's three
    (http://joschu.net/blog/kl-approx.html).

    With d = log p - log reference: k1 = d has the right mean, k2 = d^2 / 2 little variance, and
    k3 = exp(-d) - 1 + d both, and is never negative. As a loss, k2 has the gradient of the KL
    divergence, k3 one that is near to it, and k1 one whose mean is 0.
    """
    d = (logp - reference_logp).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d.square() / 2
    return torch.expm1(-d) + d
