"""Advantages: how much better a completion scored than others. Pure functions of a batch's scores.

Each function takes the scores of a batch's groups, [n] each, and returns their advantages, [n]
float64 each. So does the user's own, `--advantage my.py:advantage`.

Legend: n completions of one group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_trainer.objectives import AggregationName, Objective

MIN_STD = 1e-8
"""Rounding leaves a deviation of about 1e-17 among equal scores. This floor turns their advantages
into zeros instead of noise of size one."""


def group_std(groups: Sequence[Tensor]) -> list[Tensor]:
    """Centre the scores of each group and divide by their standard deviation.

    DeepSeekMath (arXiv 2402.03300), section 4.1.2, outcome supervision. The deviation is the
    population's (divided by n), as in the archived trainer. A group of one sequence, or of equal
    scores, gets zeros, because it has nothing to teach.
    """
    return [_divided(_centred(scores), _centred(scores)) for scores in groups]


def group_mean(groups: Sequence[Tensor]) -> list[Tensor]:
    """Centre the scores of each group: Dr. GRPO (arXiv 2503.20783), section 3.2. Without the
    division, groups of nearly equal scores do not weigh more than others."""
    return [_centred(scores) for scores in groups]


def leave_one_out(groups: Sequence[Tensor]) -> list[Tensor]:
    """The score minus the mean of the group's other scores: RLOO (arXiv 2402.14740).
    This is n / (n - 1) times the centred score. A group of one sequence gets zero."""
    return [_centred(scores) * (len(scores) / max(1, len(scores) - 1)) for scores in groups]


def batch_std(groups: Sequence[Tensor]) -> list[Tensor]:
    """Centre all scores of the batch and divide by their standard deviation: REINFORCE++ (arXiv
    2501.03262), global advantage normalisation. Every completion counts once."""
    whole = _centred(torch.cat(list(groups)))
    return list(torch.split(_divided(whole, whole), [len(scores) for scores in groups]))


def maxent(groups: Sequence[Tensor]) -> list[Tensor]:
    """n softmax(scores): MaxEnt-GRPO's weights at tau 1, before the reference model is known. The
    training loop and the self-test replace them, see `grpo_trainer.data.batch_advantages`."""
    return [len(scores) * scores.double().softmax(0) for scores in groups]


def overlong_penalty(length: int, allowed: int, buffer: float) -> float:
    """What a long completion's score loses: 0 up to the buffer, then linearly up to 1.

    DAPO (arXiv 2503.14476), equation 13, soft overlong punishment.

    Args:
        length: tokens of the completion
        allowed: the longest completion that the sampling allowed, in tokens
        buffer: share of `allowed` in which the penalty grows; 0 for no penalty
    """
    grows_over = buffer * allowed
    if not grows_over:
        return 0.0
    return min(1.0, max(0.0, (length - (allowed - grows_over)) / grows_over))


def _centred(scores: Tensor) -> Tensor:
    return scores.double() - scores.double().mean()


def _divided(values: Tensor, centred: Tensor) -> Tensor:
    """Divide by the population's standard deviation of `centred`."""
    return values / centred.square().mean().sqrt().clamp_min(MIN_STD)


# MaxEnt-GRPO: completions are weighted by a soft improvement of the policy, and the loss is their
# weighted negative log-likelihood. The weights maximise the expected log q plus the weights'
# entropy times tau, less the KL divergence from the reference model times beta: arXiv 1805.00909
# (control as inference) and 1806.06920 (MPO).


def improved(utilities: Tensor, temperature: float, epsilon: float) -> Tensor:
    """[n] q: epsilon + (1 - n epsilon) softmax(utilities / temperature). No completion gets less
    than epsilon, so its logarithm is finite. Args: utilities: [n] scores"""
    soft = (utilities.double() / temperature).softmax(0)
    return epsilon + (1 - len(soft) * epsilon) * soft


def completion_weights(
    utilities: Tensor, reference: Tensor, objective: Objective, beta: float
) -> Tensor:
    """[n] softmax((log q + beta reference) / (tau + beta)), float64.

    Args:
        utilities: [n] scores
        reference: [n] log-likelihood of each completion under the reference model, divided by its
            number of tokens if --maxent-length-normalize-ref
    """
    q = improved(utilities, objective.maxent_q_temperature, objective.maxent_q_epsilon)
    return ((q.log() + beta * reference.double()) / (objective.maxent_tau + beta)).softmax(0)


def entropy_of(weights: Tensor) -> float:
    """In nats. Args: weights: [n], they add up to 1"""
    return float(-torch.xlogy(weights, weights).sum())


def token_weights(
    is_trained: Tensor, aggregation: AggregationName, sequences: int, tokens: int, constant: int
) -> Tensor:
    """[B, T] weight of each token; 0 if it is not trained on.

    Args:
        is_trained: [B, T] bool, of some of the batch's sequences
        aggregation: sequence: the mean over a sequence's tokens, then over sequences (DeepSeekMath,
            arXiv 2402.03300, equation 3). token: the mean over all tokens (DAPO, arXiv 2503.14476,
            equation 12). constant: the sum over all tokens, divided by a number that does not
            depend on their lengths (Dr. GRPO, arXiv 2503.20783, section 3.2)
        sequences: number of sequences in the batch
        tokens: number of trained tokens in the batch
        constant: divisor for each sequence, in tokens
    """
    trained = is_trained.float()
    if aggregation == "token":
        return trained / max(1, tokens)
    if aggregation == "constant":
        return trained / (sequences * constant)
    return trained / trained.sum(-1, keepdim=True).clamp_min(1) / sequences
