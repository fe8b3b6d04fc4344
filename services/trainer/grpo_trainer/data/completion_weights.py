"""MaxEnt-GRPO's weights of a batch's completions, as advantages.

Legend: N sequences of the batch, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import torch
from torch import Tensor

from grpo_trainer.advantages import completion_weights, entropy_of
from grpo_trainer.data.collate import (
    Batch,
    in_group_order,
    mean_by,
    rollout_places,
    shaped_scores,
    with_advantages,
)
from grpo_trainer.data.groups import UsableGroup
from grpo_trainer.objectives import Objective


def with_completion_weights(
    batch: Batch,
    groups: Sequence[UsableGroup],
    objective: Objective,
    reference: Tensor | None = None,
) -> tuple[Batch, float | None]:
    """The batch with weights as advantages, and the mean entropy in nats of the weights of a group;
    None if environments sent the advantages of all groups.

    The advantages are such that the loss of `surrogate="likelihood"` and `aggregation="sequence"`
    is the mean over the groups of sum_i w_i (-log p(y_i) / L_i). L_i counts the trained tokens of
    all sequences of a rollout. Rollouts without trained tokens, and those whose advantage an
    environment sets to zero, have no share in the weights.

    Args:
        batch: collated from `groups`
        reference: [N] log-likelihood of each sequence under the reference model, in the order of
            the groups; None: it does not count
    """
    lengths = torch.cat([(micro.token_weight > 0).sum(-1) for micro in batch.micro_batches])
    tokens = in_group_order(batch, lengths.double())
    beta = 0.0 if reference is None else objective.kl_coef
    likelihoods = torch.zeros_like(tokens) if reference is None else reference.double()
    sizes = [usable.group.size for usable in groups]
    found, entropies = [], []
    for usable, length, likelihood in zip(
        groups, torch.split(tokens, sizes), torch.split(likelihoods, sizes), strict=True
    ):
        rollout = torch.tensor(rollout_places(usable.group.rollouts))
        scores = mean_by(shaped_scores(usable, objective.overlong_buffer), rollout.tolist())
        whole = _sum_by(length, rollout).clamp_min(1)
        prior = _sum_by(likelihood, rollout)
        if objective.maxent_length_normalize_ref:
            prior = prior / whole
        is_open = torch.tensor([not zero for zero in usable.zero_advantage])
        is_trained = _sum_by(length * is_open, rollout) > 0
        weights = torch.zeros_like(whole)
        if is_trained.any():
            weights[is_trained] = completion_weights(
                scores[is_trained], prior[is_trained], objective, beta
            )
        if not usable.group.advantages:
            entropies.append(entropy_of(weights))
        found.append(weights[rollout] * length / whole[rollout])
    advantages = torch.cat(found) * len(tokens) / len(groups)
    return with_advantages(batch, groups, advantages), fmean(entropies) if entropies else None


def _sum_by(values: Tensor, rollout: Tensor) -> Tensor:
    """[rollouts] Args: [sequences] each"""
    sums = torch.zeros(int(rollout.max()) + 1, dtype=values.dtype)
    return sums.index_add_(0, rollout, values)
