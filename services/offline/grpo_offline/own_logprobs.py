"""Behaviour logprobs of rollouts whose server logged none that the trainer can use."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from grpo_core.wire.fields import MASKED, PROMPT_LOGPROB
from grpo_core.wire.scored_group import OWN_LOGPROBS, ScoredGroup
from grpo_trainer.data.batches import Collate
from grpo_trainer.data.groups import GroupLimits, usable_group
from grpo_trainer.learner import Learner
from grpo_trainer.model.policy import device_of


@torch.no_grad()
def with_own_logprobs(
    groups: Sequence[ScoredGroup], learner: Learner, collate: Collate, limits: GroupLimits
) -> list[ScoredGroup]:
    """The groups with the policy's logprobs of their tokens at the sampling temperature.

    Call it before the iteration's first optimizer step: later steps then have importance ratios,
    and their clipping.
    """
    usable = [usable_group(number, group, limits) for number, group in enumerate(groups)]
    batch = collate(usable)
    found: list[list[float]] = []
    for micro in batch.micro_batches:
        logp = learner.forward(
            learner.policy, micro.to(device_of(learner.policy))
        ).logp.cpu()  # [B, T]
        found += [row[:length].tolist() for row, length in zip(logp, micro.lengths, strict=True)]
    of_sequence = dict(zip(batch.order, found, strict=True))
    done: list[ScoredGroup] = []
    number = 0
    for group in groups:
        rows = [of_sequence[number + at] for at in range(group.size)]
        number += group.size
        logprobs = [_aligned(*pair) for pair in zip(rows, group.masks, strict=True)]
        facts = {**(group.group_overrides or {}), OWN_LOGPROBS: True}
        changes = {"inference_logprobs": logprobs, "group_overrides": facts}
        done.append(group.model_copy(update=changes))
    return done


def _aligned(logp: Sequence[float], masks: Sequence[int]) -> list[float]:
    """[T] Args: logp: of the tokens after the first, as far as they are trained on; masks: [T]"""
    padded = [PROMPT_LOGPROB, *logp, *[PROMPT_LOGPROB] * (len(masks) - 1 - len(logp))]
    return [
        PROMPT_LOGPROB if mask == MASKED else value
        for mask, value in zip(masks, padded, strict=True)
    ]
