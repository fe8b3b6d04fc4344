"""The self-test passes with every objective, and names each fault that is put into the code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_core.tree.objectives import PRESETS
from grpo_core.tree.trainer import TrainerSettings
from grpo_core.tree.trainer_command import CommandLine
from grpo_trainer import learner
from grpo_trainer.checks import self_test
from grpo_trainer.checks.identities import SCORES
from grpo_trainer.checks.self_test import SelfTest
from grpo_trainer.errors import SelfTestFailed
from grpo_trainer.learner import Learner
from grpo_trainer.model.forward import FastForward, build_forward_pass
from grpo_trainer.model.logprobs import logprobs_of
from grpo_trainer.model.packing import PADDED
from grpo_trainer.model.reference import Reference
from grpo_trainer.ranks import ALONE
from tests.silent_faults import faults
from tests.silent_faults.faults import Fault
from tests.silent_faults.in_the_trainer import divided_again, micro_batch_dropped
from tests.unit.trainer.forward_rig import adapted, qwen
from tests.unit.trainer.tiny_policy import optimizer_of

ROUNDING = 0.01


def self_test_of(
    policy: Any, forward: FastForward, reference: Reference | None, settings: TrainerSettings
) -> SelfTest:
    optimizer = optimizer_of(policy)
    return SelfTest(Learner(settings, ALONE, policy, forward, reference, optimizer))


def bench(policy: Any = None, **options: Any) -> SelfTest:
    policy = policy or adapted()
    command = CommandLine.model_validate({"model": "m", "mode": "lora_only"} | options)
    settings = command.settings()
    forward = build_forward_pass(policy, settings)
    reference = Reference(policy, forward, is_policy=True) if settings.kl_coef else None
    return self_test_of(policy, forward, reference, settings)


def message(test: SelfTest) -> str:
    """Of the failure; empty without one."""
    try:
        test.require()
    except SelfTestFailed as failure:
        return str(failure)
    return ""


@pytest.mark.parametrize("name", PRESETS)
def test_every_objective_passes_and_leaves_no_trace(name: str) -> None:
    test = bench(adapted(dropout=0.5), objective=name, kl_coef=0.1, lora_dropout=0.5)
    random = torch.get_rng_state()
    before = [master.clone() for master in test.learner.optimizer.masters]
    assert message(test) == ""
    assert all(map(torch.equal, before, test.learner.optimizer.masters))
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(gradient is not None for gradient in test.learner.optimizer.gradients.tensors)


@pytest.mark.parametrize("changes", [{"entropy_coef": 0.1}, {"kl_coef": 0.1, "kl_in": "reward"}])
def test_other_parts_of_the_loss_pass(changes: dict[str, Any]) -> None:
    assert message(bench(**changes)) == ""


def test_rounding_across_the_narrow_bounds_of_gspo_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, the logprobs of two passes differ: here so that every ratio is clipped."""
    is_better = iter(score > sum(scores) / len(scores) for scores in SCORES for score in scores)

    def rounded(policy: Any, tokens: list[int]) -> torch.Tensor:
        return logprobs_of(policy, tokens) + (-ROUNDING if next(is_better) else ROUNDING)

    monkeypatch.setattr(self_test, "logprobs_of", rounded)
    policy = qwen(torch.bfloat16)
    settings = CommandLine(model="m", mode="none", objective="gspo").settings()
    assert settings.resolved_objective.clip_eps_high < ROUNDING
    assert message(self_test_of(policy, FastForward(PADDED), None, settings)) == ""


def test_a_whole_model_passes() -> None:
    policy = qwen()
    settings = CommandLine(model="m", mode="none").settings()
    forward = FastForward(PADDED)
    assert message(self_test_of(policy, forward, None, settings)) == ""


def dropout_on(patch: pytest.MonkeyPatch) -> None:
    def switch_on(policy: Any) -> list[Any]:
        policy.train()
        return []

    patch.setattr(learner, "adapter_dropouts", switch_on)


FAULTS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "micro-batch": (micro_batch_dropped, {}, "a micro-batch is left out"),
    "divided": (divided_again, {}, "divided by the number of micro-batches"),
    "dropout": (dropout_on, {"lora_dropout": 0.5}, "dropout is on"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    break_it, options, words = FAULTS[name]
    policy = adapted(dropout=options.get("lora_dropout", 0.0))
    break_it(monkeypatch)
    assert words in message(bench(policy, **options))


def test_a_gradient_that_is_not_finite_is_named() -> None:
    test = bench()
    parameter = next(p for p in test.learner.policy.parameters() if p.requires_grad)
    parameter.register_hook(lambda gradient: gradient * float("nan"))
    assert "a gradient is NaN" in message(test)
    assert not any(gradient is not None for gradient in test.learner.optimizer.gradients.tensors)


EVERY_FAULT = faults.FAULTS | faults.ALSO


@pytest.mark.parametrize("fault", EVERY_FAULT.values(), ids=EVERY_FAULT)
def test_every_fault_changes_code_that_exists(fault: Fault) -> None:
    """`make silent-faults` takes an hour, so it is run rarely."""
    with pytest.MonkeyPatch.context() as patch:
        fault.sabotage(patch)


def test_a_loss_of_the_users_whose_gradient_is_0_on_fresh_tokens_passes(tmp_path: Path) -> None:
    code = "def own(t, o):\n    return (t.weight * (t.ratio - 1).square()).sum()\n"
    (tmp_path / "my.py").write_text(code)
    assert message(bench(loss=f"{tmp_path}/my.py:own")) == ""
