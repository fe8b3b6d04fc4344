"""Scored groups for the trainer's tests, and their conversion to tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_core.clients.run_api import LeasedBatch
from grpo_core.tree.objectives import GRPO, Objective
from grpo_core.wire.fields import MASKED, PROMPT_LOGPROB
from grpo_core.wire.policy_version import PolicyVersion
from grpo_core.wire.scored_group import ScoredGroup
from grpo_trainer.advantages import with_advantages
from grpo_trainer.data.collate import Batch, MicroBatch, collate
from grpo_trainer.data.cuts import Cut
from grpo_trainer.data.filter import GroupFilter, digest
from grpo_trainer.data.groups import GroupLimits, Tokens, UsableSequence, sequences_of
from grpo_trainer.losses import LossInputs
from grpo_trainer.model.logprobs import TokenValues

P = PROMPT_LOGPROB
VOCABULARY = 100
LIMITS = GroupLimits(VOCABULARY, seq_len=100)


def group(**changes: Any) -> ScoredGroup:
    """Prompt 5 6; completions (7) and (8, 9, 10)."""
    fields: dict[str, Any] = {
        "tokens": [[5, 6, 7], [5, 6, 8, 9, 10]],
        "masks": [[MASKED, MASKED, 7], [MASKED, MASKED, 8, 9, 10]],
        "scores": [1.0, 0.0],
        "inference_logprobs": [[P, P, -0.1], [P, P, -0.2, -0.3, -0.4]],
    }
    return ScoredGroup.model_validate(fields | changes)


def good(marker: int, **changes: Any) -> ScoredGroup:
    """A usable group. Groups with different markers have different logprobs."""
    logp = -0.001 * marker - 0.1
    return group(inference_logprobs=[[P, P, logp], [P, P, -0.2, -0.3, logp]], **changes)


def taught(plain: ScoredGroup, **changes: Any) -> ScoredGroup:
    """`group()` with a teacher, which has three tokens at the place of 8, and not 9."""
    fields: dict[str, Any] = {
        "distill_token_ids": [[[], [], [7]], [[], [6], [1, 8, 3], [1], [10]]],
        "distill_logprobs": [[[], [], [-1.1]], [[], [-5.0], [-9.0, -0.1, -9.0], [-9.0], [-0.9]]],
    }
    return plain.model_copy(update=fields | changes)


def bad(marker: int, **changes: Any) -> ScoredGroup:
    """An unusable group: its sampling was truncated."""
    return good(marker, generation_params={"top_p": 0.9}, **changes)


def sampled_by(marker: int, *versions: tuple[int, int]) -> ScoredGroup:
    """Args: versions: (epoch, step) that sampled each completion"""
    named = [[list(version)] * 2 for version in versions]
    return good(marker, group_overrides={"policy_version": named})


def usable(*groups: ScoredGroup) -> list[UsableSequence]:
    return sequences_of(groups, LIMITS)


def filtered(
    group_filter: GroupFilter,
    groups: Sequence[ScoredGroup],
    step: int,
    received_under: Sequence[PolicyVersion | None] = (),
) -> tuple[list[UsableSequence], Counter[str]]:
    leased = LeasedBatch(1, [*groups], [*(received_under or [None] * len(groups))])
    digests = [digest(one) for one in groups]
    return group_filter.filter(leased, group_filter.check(leased), digests, step)


def collated(*groups: ScoredGroup, seq_len: int = 100, micro_batch_size: int = 2) -> Batch:
    return batch_of(usable(*groups), GRPO, seq_len, micro_batch_size)


def batch_of(
    sequences: Sequence[UsableSequence],
    objective: Objective,
    seq_len: int = 100,
    micro_batch_size: int = 2,
    cut: Cut | None = None,
) -> Batch:
    """With advantages."""
    batch = collate(sequences, seq_len, micro_batch_size, cut or in_order, objective)
    return with_advantages(batch, objective)


def in_order(sequences: Sequence[Tokens], size: int) -> list[list[int]]:
    """Sequences in their order, `size` in each micro-batch."""
    numbers = range(len(sequences))
    return [list(numbers[start : start + size]) for start in numbers[::size]]


def micro_of(behaviour: Tensor, advantages: Tensor, weight: Tensor) -> MicroBatch:
    """A micro-batch of these columns, whose tokens do not matter. Args: as of `MicroBatch`"""
    rows, tokens = len(weight), torch.zeros_like(weight, dtype=torch.long)
    of_rows = torch.ones(rows), (weight.shape[1],) * rows, (0,) * rows, (True,) * rows
    return MicroBatch(tokens, tokens, behaviour, weight, advantages, *of_rows)


def values_of(logp: Tensor) -> TokenValues:
    """Args: logp: [B, T]"""
    return TokenValues(logp, *torch.zeros(2, *logp.shape))


def inputs_of(logp: Tensor, micro: MicroBatch, objective: Objective) -> LossInputs:
    return LossInputs.of(values_of(logp), micro, objective)
