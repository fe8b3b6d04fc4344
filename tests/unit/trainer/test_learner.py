"""The gradient of a step is that of its loss, written out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_trainer.learner
from grpo_core.tree.objectives import GRPO
from grpo_core.tree.trainer_command import CommandLine
from grpo_trainer.errors import NonFiniteGradient, NonFiniteLoss, NonFiniteStep
from grpo_trainer.learner import Meanwhile, accumulate_gradients, build_learner
from grpo_trainer.losses import policy_loss
from grpo_trainer.model.forward import FastForward, plain_forward
from grpo_trainer.model.fused_head import EAGER
from grpo_trainer.model.logprobs import TokenValues
from grpo_trainer.optim.master_optimizer import build_optimizer
from grpo_trainer.ranks import ALONE
from tests.unit.trainer.forward_rig import qwen, ragged_batch
from tests.unit.trainer.groups import inputs_of


def test_penalty_and_bonus_count_with_their_weights_over_all_micro_batches() -> None:
    """loss - 0.3 * mean entropy + 0.7 * mean (exp(-d) - 1 + d), d = log p - log reference"""
    objective = replace(GRPO, entropy_coef=0.3, kl_coef=0.7, kl_estimator="k3")
    policy, batch = qwen(), ragged_batch(tokens=12)
    generator = torch.Generator().manual_seed(3)
    batch = replace(
        batch,
        micro_batches=[
            replace(m, reference_logp=-4 * torch.rand(m.targets.shape, generator=generator))
            for m in batch.micro_batches
        ],
    )
    assert len(batch.micro_batches) > 1

    total, parts = torch.zeros(()), torch.zeros(3)
    for micro in batch.micro_batches:
        logits = policy(input_ids=micro.inputs).logits / micro.temperature.view(-1, 1, 1)
        p = logits.softmax(-1)
        logp = p.gather(-1, micro.targets.unsqueeze(-1)).squeeze(-1).log()
        d = logp - micro.reference_logp
        penalty, bonus = 0.7 * ((-d).exp() - 1 + d), 0.3 * (p * p.log()).sum(-1)
        weighed = [(micro.token_weight * terms).sum() for terms in (penalty, bonus)]
        of_micro = torch.stack([policy_loss(inputs_of(logp, micro, GRPO), GRPO), *weighed])
        total, parts = total + of_micro.sum(), parts + of_micro.detach()
    weight = policy.lm_head.weight
    (expected,) = torch.autograd.grad(total, weight)

    found = accumulate_gradients(policy, batch, objective, 0, FastForward(head=EAGER))
    assert found.loss == pytest.approx(float(total.detach()), rel=1e-5)
    assert found.loss_parts == pytest.approx(parts.tolist(), rel=1e-4, abs=1e-6)
    torch.testing.assert_close(
        weight.grad, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max())
    )
    only_logged = accumulate_gradients(policy, batch, replace(objective, kl_in="reward"), 0)
    assert abs(only_logged.loss - found.loss) > 0.01


def test_the_host_works_before_it_waits_for_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, batch = qwen(), ragged_batch(tokens=12)
    settings = CommandLine.model_validate({"model": "m", "mode": "shared_vllm"}).settings()
    optimizer, done = build_optimizer(policy, settings), list[str]()

    def forward(*inputs: Any) -> TokenValues:
        done.append("forward")
        return plain_forward(*inputs)

    def norm(step: int) -> float:
        done.append("norm")
        return float(step)

    def backward(_: Tensor) -> None:
        done.append("backward")

    policy.lm_head.weight.register_post_accumulate_grad_hook(backward)
    monkeypatch.setattr(optimizer, "gradient_norm", norm)
    meanwhile = Meanwhile(
        begun=lambda: done.append("begun"),
        known=lambda tokens: done.append(f"{len(tokens)} tokens known"),
    )
    stats = accumulate_gradients(policy, batch, GRPO, 0, forward, optimizer, meanwhile=meanwhile)
    passes = ["forward", "begun", "backward"] * len(batch.micro_batches)
    assert done == [*passes, f"{len(stats.tokens)} tokens known", "norm"]


@pytest.mark.parametrize("error", [NonFiniteGradient, NonFiniteLoss])
def test_a_step_that_is_tried_twice_is_checked_once(
    error: type[NonFiniteStep], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some checks end the run if two batches in a row look wrong."""
    settings = CommandLine.model_validate({"model": "m", "mode": "shared_vllm"}).settings()
    learner, checked, failures = build_learner(qwen(), settings, ALONE), list[int](), [error("nan")]
    failing, name = (
        (learner.optimizer, "gradient_norm")
        if error is NonFiniteGradient
        else (grpo_trainer.learner, "backward")
    )
    works = getattr(failing, name)

    def fails_once(*arguments: Any) -> Any:
        if failures:
            raise failures.pop()
        return works(*arguments)

    monkeypatch.setattr(failing, name, fails_once)
    learner.accumulate(ragged_batch(), GRPO, 0, Meanwhile(known=lambda t: checked.append(len(t))))
    assert len(checked) == 1
