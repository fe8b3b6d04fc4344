"""The reference model is --model before training, and its penalty reaches the advantages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from grpo_core.tree.objectives import Objective
from grpo_core.tree.trainer_command import CommandLine
from grpo_trainer.advantages import divergences, with_advantages
from grpo_trainer.checks.data_checks import ReferenceCheck
from grpo_trainer.data.collate import Batch, collate
from grpo_trainer.model.forward import FastForward, build_forward_pass, plain_forward
from grpo_trainer.model.reference import Reference, build_reference
from tests.unit.trainer.forward_rig import adapted, qwen, ragged_batch
from tests.unit.trainer.groups import P, group, in_order, usable


def logprobs(batch: Batch) -> list[Tensor]:
    found = [micro.reference_logp for micro in batch.micro_batches]
    assert all(logp is not None for logp in found)
    return [logp for logp in found if logp is not None]


def test_an_adapter_is_off_for_the_reference_alone() -> None:
    policy, batch = adapted(), ragged_batch(tokens=12)
    before = plain_forward(policy, batch.micro_batches[0]).logp
    found = Reference(policy, FastForward(), is_policy=True).added(batch)
    assert len(found.micro_batches) > 1
    for micro, logp in zip(batch.micro_batches, logprobs(found), strict=True):
        trained = micro.token_weight > 0
        expected = plain_forward(qwen(), micro).logp
        torch.testing.assert_close(logp[trained], expected[trained], rtol=1e-5, atol=1e-5)
    assert torch.equal(plain_forward(policy, batch.micro_batches[0]).logp, before)


def test_without_an_adapter_the_reference_is_a_copy_that_does_not_move(tmp_path: Path) -> None:
    qwen().save_pretrained(tmp_path)
    settings = CommandLine(model=str(tmp_path), mode="none", kl_coef=0.1).settings()
    policy = qwen()
    reference = build_reference(policy, build_forward_pass(policy, settings), settings)
    assert reference is not None
    batch = ragged_batch()
    (before,) = logprobs(reference.added(batch))
    nn.init.normal_(policy.lm_head.weight)
    (after,) = logprobs(reference.added(batch))
    assert torch.equal(before, after)
    assert not any(parameter.requires_grad for parameter in reference.model.parameters())


@pytest.mark.parametrize("mode", ["none", "lora_only"])
def test_another_reference_model_is_a_copy_in_every_mode(tmp_path: Path, mode: str) -> None:
    other = qwen()
    nn.init.normal_(other.lm_head.weight)
    other.save_pretrained(tmp_path)
    options = {"model": "m", "mode": mode, "kl_coef": 0.1, "reference_model": str(tmp_path)}
    settings = CommandLine.model_validate(options).settings()
    reference = build_reference(adapted(), FastForward(), settings)
    assert reference is not None
    assert not reference.is_policy
    assert torch.equal(reference.model.lm_head.weight, other.lm_head.weight)
    without = settings.model_copy(update={"kl_coef": 0.0})
    assert build_reference(adapted(), FastForward(), without) is None


def test_a_penalty_in_the_reward_by_hand() -> None:
    """Divergences 0.9 (one token) and 0.3 + 0.2 + 0.1, times 2: scores 1 - 1.8 and 0 - 1.2."""
    objective = Objective(advantage="group_mean", kl_coef=2.0, kl_estimator="k1", kl_in="reward")
    one = group(inference_logprobs=[[P, P, -0.1], [P, P, -0.2, -0.3, -0.4]])
    sent = group(advantages=[[5.0], [6.0]])
    batch = collate(usable(one, sent), 100, 2, last_first, objective)
    assert batch.order == [1, 0, 3, 2]
    first, second = batch.micro_batches
    reference = torch.full((2, 4), 9.0)
    reference[0, 1:] = torch.tensor([-0.5, -0.5, -0.5])
    reference[1, 1] = -1.0
    known = [replace(micro, reference_logp=reference) for micro in (first, second)]
    batch = replace(batch, micro_batches=known)
    assert divergences(batch, "k1")[:2].tolist() == pytest.approx([0.9, 0.6])
    penalised = with_advantages(batch, objective)
    advantages = [micro.advantages.flatten().tolist() for micro in penalised.micro_batches]
    assert advantages == [pytest.approx([-0.2, 0.2]), [6.0, 5.0]]


def last_first(sequences: Sequence[list[int]], size: int) -> list[list[int]]:
    return [part[::-1] for part in in_order(sequences, size)]


@pytest.mark.parametrize("shares_weights", [False, True])
def test_a_reference_that_moves_is_reported(shares_weights: bool) -> None:
    policy = adapted()
    check = ReferenceCheck(Reference(policy, FastForward(), is_policy=not shares_weights))
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    assert [len(list(check.findings(step))) for step in range(5)] == (
        [1, 0, 0, 0, 1] if shares_weights else [0] * 5
    )
