"""Losses, each one pure function, and what they are made of. Maths alone: no forward pass, logging
or I/O.

A loss function gets `LossInputs` and the objective, and returns a scalar to be minimised:

    loss = - sum over tokens of weight * surrogate(ratio, A)

So does the user's own, `--loss my.py:loss`.

Legend: B sequences of the micro-batch, T positions after the causal shift.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple, Self

import torch
from torch import Tensor

from grpo_core.tree.objectives import KlEstimatorName, Level, Objective
from grpo_trainer.data.collate import MicroBatch
from grpo_trainer.functions import own_function
from grpo_trainer.model.logprobs import TokenValues

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
    """Number of tokens whose ratio, at the objective's level, is outside the clipping range."""
    corrected: float
    """Number of tokens with a correction below 1."""
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
    entropy: float
    """Sum of the entropies of the policy's distributions, in nats."""
    reference_kl: float
    """Sum of the k3 estimates of the KL divergence from the reference model; 0 without one."""
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


@dataclass(frozen=True)
class LossInputs:
    """What a loss function gets of a micro-batch. [B, T] each, in float32.

    Example, two sequences of which three tokens and one are trained on:

        logp            [[-1.0, -0.5, -2.0], [-0.7, 0.0, 0.0]]   of the policy, with gradient
        behaviour_logp  [[-1.0, -0.6, -2.0], [-0.7, 1.0, 1.0]]   of the server when it sampled
        ratio           [[1.0, 1.105, 1.0], [1.0, ...]]           see `importance_ratio`
        advantages      [[0.5], [-0.5]]                          [B, 1] or [B, T]
        weight          [[1/6, 1/6, 1/6], [1/2, 0.0, 0.0]]       0: not trained on

    Args:
        weight: of each token in the batch's loss, times the factor of --importance-correction
        entropy: of the policy's distributions, in nats, with gradient if --entropy-coef is above 0
        reference_logp: of the reference model; None without one
    """

    logp: Tensor
    behaviour_logp: Tensor
    ratio: Tensor
    advantages: Tensor
    weight: Tensor
    entropy: Tensor | None
    reference_logp: Tensor | None

    @classmethod
    def of(cls, values: TokenValues, micro: MicroBatch, objective: Objective) -> Self:
        """Args: values: [B, T] each, of the policy"""
        is_trained = micro.token_weight > 0
        log_ratio = _log_ratio(values.logp, micro.behaviour_logp)
        return cls(
            logp=values.logp,
            behaviour_logp=micro.behaviour_logp,
            ratio=importance_ratio(log_ratio, is_trained, objective.importance_level),
            advantages=micro.advantages,
            weight=micro.token_weight * correction(log_ratio.detach(), is_trained, objective),
            entropy=values.entropy,
            reference_logp=micro.reference_logp,
        )


def clip(tokens: LossInputs, objective: Objective) -> Tensor:
    """min(r A, clip(r) A): PPO's surrogate (arXiv 1707.06347, equation 7), with the bounds
    1 - `clip_eps` and 1 + `clip_eps_high`.

    The minimum is right for both signs of A: if A < 0 and the ratio is too high, it keeps the
    gradient that a maximum would remove.
    """
    clipped = tokens.ratio.clamp(*bounds(objective))
    surrogate = torch.minimum(tokens.ratio * tokens.advantages, clipped * tokens.advantages)
    return -(tokens.weight * surrogate).sum()


def cispo(tokens: LossInputs, objective: Objective) -> Tensor:
    """min(r, 1 + `clip_eps_high`) A log p, where the first factor has no gradient (MiniMax-M1,
    arXiv 2506.13585, equation 4). No token loses its gradient."""
    _, high = bounds(objective)
    surrogate = tokens.ratio.detach().clamp(max=high) * tokens.advantages * tokens.logp
    return -(tokens.weight * surrogate).sum()


def reinforce(tokens: LossInputs, objective: Objective) -> Tensor:  # noqa: ARG001
    """r A log p, where r has no gradient: the policy gradient with importance sampling."""
    surrogate = tokens.ratio.detach() * tokens.advantages * tokens.logp
    return -(tokens.weight * surrogate).sum()


def likelihood(tokens: LossInputs, objective: Objective) -> Tensor:  # noqa: ARG001
    """A log p, whatever policy sampled the tokens."""
    return -(tokens.weight * (tokens.advantages * tokens.logp)).sum()


NAMED_LOSSES: Mapping[str, Callable[[LossInputs, Objective], Tensor]] = {
    "clip": clip,
    "cispo": cispo,
    "reinforce": reinforce,
    "likelihood": likelihood,
}


class LossParts(NamedTuple):
    """Scalars that add up to what a micro-batch adds to the loss. `kl` and `entropy` contain their
    coefficients, and are 0 without a penalty in the loss and without a bonus."""

    policy: Tensor
    kl: Tensor
    entropy: Tensor


def policy_loss(inputs: LossInputs, objective: Objective) -> Tensor:
    """The objective's loss of a micro-batch: a scalar."""
    function = NAMED_LOSSES.get(objective.loss) or own_function(objective.loss)
    loss: Tensor = function(inputs, objective)
    return loss


def step_loss(values: TokenValues, micro: MicroBatch, objective: Objective) -> LossParts:
    """The policy's loss, the KL penalty, and minus the entropy bonus.

    Args:
        values: [B, T] each, of the policy
    """
    weight = micro.token_weight
    loss = policy_loss(LossInputs.of(values, micro, objective), objective)
    kl = entropy = torch.zeros_like(loss)
    if objective.entropy_coef:
        entropy = -objective.entropy_coef * entropy_bonus(values.entropy, weight)
    if objective.kl_coef and objective.kl_in == "loss":
        assert micro.reference_logp is not None
        terms = (micro.reference_logp, weight, objective.kl_estimator)
        kl = objective.kl_coef * kl_penalty(values.logp, *terms)
    return LossParts(loss, kl, entropy)


def kl_penalty(
    logp: Tensor, reference_logp: Tensor, token_weight: Tensor, estimator: KlEstimatorName
) -> Tensor:
    """The weighted sum of the tokens' KL estimates, which the loss gains times `kl_coef`:
    DeepSeekMath (arXiv 2402.03300), equations 3 and 4 (k3). Args: [B, T] each."""
    return (token_weight * kl_terms(logp, reference_logp, estimator)).sum()


def entropy_bonus(entropy: Tensor, token_weight: Tensor) -> Tensor:
    """The weighted sum of the entropies, which the loss loses times `entropy_coef` (A3C, arXiv
    1602.01783, section 4). Args: [B, T] each."""
    return (token_weight * entropy).sum()


def bounds(objective: Objective) -> tuple[float, float]:
    """Between these a ratio is not clipped."""
    low = 1.0 - objective.clip_eps if objective.loss == "clip" else 0.0
    high = 1.0 + objective.clip_eps_high if objective.loss in ("clip", "cispo") else math.inf
    return low, high


def importance_ratio(log_ratio: Tensor, is_trained: Tensor, level: Level) -> Tensor:
    """[B, T] the ratio that the surrogate uses: of each token, or for all tokens of a sequence the
    geometric mean of theirs (GSPO, arXiv 2507.18071, equation 7).

    Args:
        log_ratio, is_trained: [B, T]
    """
    if level == "token":
        return log_ratio.exp()
    tokens = is_trained.sum(-1, keepdim=True).clamp_min(1)
    mean = torch.where(is_trained, log_ratio, 0.0).sum(-1, keepdim=True) / tokens
    return mean.exp().expand_as(log_ratio)


def correction(log_ratio: Tensor, is_trained: Tensor, objective: Objective) -> Tensor:
    """[B, T] or [B, 1] factor of tokens, or of whole sequences, whose importance ratio R is above
    the cap C; 1 for all others. It removes what a few improbable tokens would add to the variance.

    - truncate: C / R, so R times the factor is C. Ionides (2008), Truncated importance sampling.
    - mask: 0. TRL masks whole sequences.

    Args:
        log_ratio: [B, T] without gradient. A sequence's ratio is the product over its tokens
    """
    if objective.importance_correction_level == "sequence":
        log_ratio = torch.where(is_trained, log_ratio, 0.0).sum(-1, keepdim=True)
    beyond = log_ratio - math.log(objective.importance_correction_cap)
    if objective.importance_correction == "truncate":
        return (-beyond).clamp(max=0.0).exp()
    if objective.importance_correction == "mask":
        return (beyond <= 0).to(log_ratio.dtype)
    return torch.ones_like(log_ratio)


@torch.no_grad()
def loss_sums(values: TokenValues, micro: MicroBatch, objective: Objective) -> LossSums:
    """Sums for the metrics. Args: all in host memory, because each sum is read"""
    trained = micro.token_weight > 0
    if not bool(trained.any()):
        return NO_SUMS
    logp, behaviour_logp, reference_logp = values.logp, micro.behaviour_logp, micro.reference_logp
    log_ratio = _log_ratio(logp, behaviour_logp)
    used = importance_ratio(log_ratio, trained, objective.importance_level)
    low, high = bounds(objective)
    is_clipped = (used < low) | (used > high)
    is_corrected = (correction(log_ratio, trained, objective) < 1).expand_as(logp)
    of_reference = None if reference_logp is None else reference_logp[trained].double()
    advantage = micro.advantages.expand_as(logp)[trained]  # [N], like all tensors below
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
        corrected=float(is_corrected[trained].sum()),
        logp=float(logp.sum()),
        logp_square=float(logp.square().sum()),
        behaviour_logp=float(behaviour_logp.sum()),
        behaviour_logp_square=float(behaviour_logp.square().sum()),
        diff=float(diff.sum()),
        diff_abs=float(diff.abs().sum()),
        diff_max=float(diff.abs().max()),
        kl_k3=float((ratio - 1 - log_ratio).sum()),
        entropy=float(values.entropy[trained].double().sum()),
        reference_kl=0.0
        if of_reference is None
        else float(kl_terms(logp, of_reference, "k3").sum()),
        positive_tokens=float(positive.sum()),
        positive_logp=float(logp[positive].sum()),
        negative_tokens=float(negative.sum()),
        negative_logp=float(logp[negative].sum()),
    )


def _log_ratio(logp: Tensor, behaviour_logp: Tensor) -> Tensor:
    """The bounded log ratio. Placeholders and near-impossible tokens would overflow exp, and inf *
    0 is NaN. The bound is far outside every clipping interval."""
    return (logp - behaviour_logp).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
