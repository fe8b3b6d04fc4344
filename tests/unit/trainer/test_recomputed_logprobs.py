"""Groups without logged logprobs train as if they had the trainer's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_core.tree.objectives import GRPO
from grpo_core.wire.scored_group import ScoredGroup
from grpo_trainer.data.collate import Batch
from grpo_trainer.data.groups import GroupLimits, sequences_of
from grpo_trainer.learner import GradientStats, accumulate_gradients
from grpo_trainer.model.forward import FastForward
from tests.unit.trainer.forward_rig import VOCABULARY, qwen
from tests.unit.trainer.groups import P, batch_of, group, sampled_by

LIMITS = GroupLimits(VOCABULARY, seq_len=100, recomputes=True)


@pytest.mark.parametrize(
    "changes",
    [{"inference_logprobs": None}, {"generation_params": {"top_p": 0.9, "temperature": 0.5}}],
)
def test_only_the_behaviour_logprobs_of_such_groups_are_replaced(changes: dict[str, Any]) -> None:
    policy, logged = qwen(), sampled_by(1, (1, 5), (1, 5))
    unlogged = logged.model_copy(update=changes)
    mixed = recomputing(logged, unlogged)
    assert [one.version is None for one in mixed.sequences] == [False, False, True, True]
    micro = mixed.micro_batches[1]
    own = FastForward()(policy, micro).logp.detach()
    known = replace(micro, behaviour_logp=own, is_logged=(True, True))
    explicit = replace(mixed, micro_batches=[mixed.micro_batches[0], known])

    found, gradient = outcome(policy, mixed)
    expected, same = outcome(policy, explicit)
    assert torch.equal(gradient, same)
    assert found.sums == expected.sums
    of_unlogged = found.tokens.sequence >= 2
    assert not found.tokens.diff[of_unlogged].any()
    assert found.tokens.diff[~of_unlogged].all()


def test_their_logged_logprobs_are_not_even_read() -> None:
    positive = group(inference_logprobs=[[P, P, 9.0], [P, P, 9.0, 9.0, 9.0]])
    truncated = positive.model_copy(update={"generation_params": {"top_k": 5}})
    accepted = sequences_of([truncated], LIMITS)
    assert {logp for sequence in accepted for logp in sequence.behaviour_logp} == {P}


def recomputing(*groups: ScoredGroup) -> Batch:
    return batch_of(sequences_of(groups, LIMITS), GRPO)


def outcome(policy: Any, batch: Batch) -> tuple[GradientStats, Tensor]:
    policy.zero_grad()
    stats = accumulate_gradients(policy, batch, GRPO, 0, FastForward())
    return stats, policy.lm_head.weight.grad.clone()
