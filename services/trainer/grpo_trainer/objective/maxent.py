"""MaxEnt-GRPO: completions are weighted by a soft improvement of the policy, and the loss is their
weighted negative log-likelihood.

The weights maximise the expected log q plus the weights' entropy times tau, less the KL divergence
from the reference model times beta: arXiv 1805.00909 (control as inference) and 1806.06920 (MPO).

Legend: n completions of one group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_trainer.objective.recipes import Objective


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
