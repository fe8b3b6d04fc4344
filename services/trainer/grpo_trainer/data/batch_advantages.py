"""The advantages of a batch's sequences: from scores, or MaxEnt-GRPO's weights of completions.

Legend: N sequences of the batch in the order of the groups, n sequences of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import torch
from torch import Tensor

from grpo_core.wire.fields import MASKED
from grpo_trainer.advantages import completion_weights, entropy_of, overlong_penalty
from grpo_trainer.data.groups import UsableGroup
from grpo_trainer.errors import FunctionUnusable
from grpo_trainer.functions import function_of
from grpo_trainer.objectives import ADVANTAGES, Objective


def group_advantages(
    groups: Sequence[UsableGroup], objective: Objective, penalties: Tensor | None = None
) -> list[Tensor]:
    """[n] of each group, from its scores; zeros if the environment sent others.

    Args: penalties: [N] what the sequences lose of their scores
    """
    found = [torch.zeros(usable.group.size, dtype=torch.float64) for usable in groups]
    open_ones = [i for i, usable in enumerate(groups) if not usable.group.advantages]
    scores = [shaped_scores(groups[i], objective.overlong_buffer) for i in open_ones]
    if penalties is not None:
        lost = torch.split(penalties.double(), [usable.group.size for usable in groups])
        scores = [kept - lost[i] for kept, i in zip(scores, open_ones, strict=True)]
    if scores:
        rollouts = [rollout_places(groups[i].group.rollouts) for i in open_ones]
        of_rollouts = [mean_by(*pair) for pair in zip(scores, rollouts, strict=True)]
        computed = function_of(objective.advantage, ADVANTAGES)(of_rollouts)
        if [len(one) for one in computed] != [len(one) for one in of_rollouts]:
            raise FunctionUnusable(
                f"--advantage {objective.advantage}: expected as many advantages as each group has "
                "scores"
            )
        for i, advantages, places in zip(open_ones, computed, rollouts, strict=True):
            found[i] = advantages[places]
    return found


def weights_as_advantages(
    groups: Sequence[UsableGroup],
    objective: Objective,
    tokens: Tensor,
    reference: Tensor | None = None,
) -> tuple[Tensor, float | None]:
    """[N] MaxEnt-GRPO's weights of the completions, as advantages; and the mean entropy in nats of
    the weights of a group, None if environments sent the advantages of all groups.

    The advantages are such that the loss of `loss="likelihood"` and `aggregation="sequence"`
    is the mean over the groups of sum_i w_i (-log p(y_i) / L_i). L_i counts the trained tokens of
    all sequences of a rollout. Rollouts without trained tokens, and those whose advantage an
    environment sets to zero, have no share in the weights.

    Args:
        tokens: [N] float64, number of trained tokens of each sequence
        reference: [N] log-likelihood of each sequence under the reference model; None: it does not
            count
    """
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
    return advantages, fmean(entropies) if entropies else None


def rollout_places(rollouts: Sequence[int]) -> list[int]:
    """For each sequence, the place of its rollout among the rollouts of its group."""
    order = {number: place for place, number in enumerate(dict.fromkeys(rollouts))}
    return [order[number] for number in rollouts]


def mean_by(scores: Tensor, places: Sequence[int]) -> Tensor:
    """[n] scores of sequences → the mean score of each rollout, so that a rollout with several
    sequences counts once in the group's mean and deviation."""
    if max(places) + 1 == len(places):
        return scores
    index = torch.tensor(places)
    return _sum_by(scores, index) / index.bincount()


def shaped_scores(usable: UsableGroup, overlong_buffer: float) -> Tensor:
    """[n] the scores, less what overlong completions lose; nothing if no limit is known."""
    group = usable.group
    allowed = (group.generation_params or {}).get("max_tokens")
    scores = torch.tensor(group.scores, dtype=torch.float64)
    if not overlong_buffer or not isinstance(allowed, int):
        return scores
    lengths = [sum(mask != MASKED for mask in masks) for masks in group.masks]
    lost = [overlong_penalty(length, allowed, overlong_buffer) for length in lengths]
    return scores - torch.tensor(lost, dtype=torch.float64)


def _sum_by(values: Tensor, rollout: Tensor) -> Tensor:
    """[rollouts] Args: [sequences] each"""
    sums = torch.zeros(int(rollout.max()) + 1, dtype=values.dtype)
    return sums.index_add_(0, rollout, values)
