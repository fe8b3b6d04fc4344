"""An adapter: where it sits, what is trained, when it drops, and that plain PEFT loads it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_trainer.adapter import adapter_dropouts, served_rank, trained_parameters
from grpo_trainer.alignment import logprobs_of
from grpo_trainer.checkpoint import save_adapter
from grpo_trainer.errors import PolicyMismatch
from grpo_trainer.gradients import GradientStats, accumulate_gradients
from grpo_trainer.mode_settings import LoraOptions
from grpo_trainer.optimizer import MasterOptimizer
from grpo_trainer.trained_weights import Adapter, WholeModel
from tests.unit.trainer.groups import collated, group
from tests.unit.trainer.tiny_policy import LORA, model_directory, move, optimizer_of

TOKENS = list(range(1, 20))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(model_directory(tmp_path_factory.mktemp("tiny") / "model"))


def loaded(model: str, lora: LoraOptions = LORA, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(1)
    return Adapter(model, lora).load(dtype).eval()


def test_it_changes_nothing_at_first_and_trains_nothing_else(model: str) -> None:
    policy = loaded(model, dtype=torch.bfloat16)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    assert torch.equal(logprobs_of(policy, TOKENS), logprobs_of(plain, TOKENS))
    trained = trained_parameters(policy)
    assert len(trained) == 2 * 2 * 2  # layers, modules, A and B
    assert {p.dtype for p in trained.values()} == {torch.float32}
    frozen = {p.dtype for name, p in policy.named_parameters() if name not in trained}
    assert frozen == {torch.bfloat16}


def test_an_update_moves_the_adapter_and_leaves_the_model(model: str) -> None:
    policy = loaded(model)
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    optimizer = optimizer_of(policy)
    move(policy, optimizer, 0)
    move(policy, optimizer, 1)
    changed = {n for n, p in policy.named_parameters() if not torch.equal(p, before[n])}
    assert changed == set(trained_parameters(policy))


def test_some_layers_only(model: str) -> None:
    trained = trained_parameters(loaded(model, replace(LORA, layers=(1,))))
    assert len(trained) == 4
    assert all(".layers.1." in name for name in trained)


def test_modules_and_layers_that_the_model_has_not_are_all_listed(model: str) -> None:
    wrong = replace(LORA, target_modules=("q_proj", "c_attn"), layers=(0, 5))
    with pytest.raises(PolicyMismatch) as told:
        loaded(model, wrong)
    assert "--lora-target-modules c_attn" in str(told.value)
    assert "--lora-layer-indices [5]: the model has layers 0 to 1" in str(told.value)


@pytest.mark.parametrize(("r", "served"), [(1, 1), (2, 8), (16, 16), (17, 32), (512, 512)])
def test_the_rank_that_vllm_is_started_with(r: int, served: int) -> None:
    assert served_rank(r) == served


def test_a_rank_that_vllm_does_not_serve() -> None:
    with pytest.raises(PolicyMismatch, match="--lora-r 513"):
        served_rank(513)


def test_what_is_saved_loads_with_plain_peft(model: str, tmp_path: Path) -> None:
    policy = loaded(model)
    optimizer = optimizer_of(policy)
    move(policy, optimizer, 0)
    move(policy, optimizer, 1)
    target = tmp_path / "final_adapter"
    save_adapter(policy, model, target)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    again = PeftModel.from_pretrained(base, str(target)).eval()
    assert torch.equal(logprobs_of(again, TOKENS), logprobs_of(policy, TOKENS))
    assert AutoTokenizer.from_pretrained(target).chat_template
    assert Adapter(model, LORA).are_in(policy, target)
    move(policy, optimizer, 2)
    assert not Adapter(model, LORA).are_in(policy, target)
    assert not Adapter(model, LORA).are_in(policy, tmp_path / "nowhere")


def test_a_whole_model_is_recognised_too(model: str, tmp_path: Path) -> None:
    weights = WholeModel(model)
    policy = weights.load(torch.bfloat16)
    weights.write(policy, tmp_path / "served")
    assert weights.are_in(policy, tmp_path / "served")
    move(policy, optimizer_of(policy), 0)
    assert not weights.are_in(policy, tmp_path / "served")


def gradients(
    policy: Any, optimizer: MasterOptimizer, seed: int
) -> tuple[GradientStats, torch.Tensor]:
    for index in range(len(optimizer.masters)):
        optimizer.gradients.pop(index)
    torch.manual_seed(seed)
    stats = accumulate_gradients(policy, collated(group(), group(scores=[0.0, 1.0])), 0.2, step=0)
    found = [g for g in optimizer.gradients.tensors if g is not None]
    return stats, torch.cat([g.flatten() for g in found])


def test_dropout_is_on_for_the_gradient_and_off_for_everything_that_is_compared(
    model: str,
) -> None:
    policy = loaded(model, replace(LORA, dropout=0.5))
    optimizer = optimizer_of(policy)
    move(policy, optimizer, 0)  # B = 0 would hide it
    assert len(adapter_dropouts(policy)) == 4
    one, gradient = gradients(policy, optimizer, 1)
    other, another = gradients(policy, optimizer, 2)
    assert not torch.allclose(gradient, another, rtol=1e-3)
    assert torch.equal(one.tokens.logp, other.tokens.logp)
    assert one.sums == other.sums
    assert one.loss != other.loss
    assert not any(module.training for module in policy.modules())

    exact = loaded(model, LORA)
    exact.load_state_dict(policy.state_dict())
    without, _ = gradients(exact, optimizer_of(exact), 1)
    assert adapter_dropouts(exact) == []
    assert torch.equal(without.tokens.logp, one.tokens.logp)
