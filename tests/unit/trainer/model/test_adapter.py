"""LoRA adapters: position, parameters and dropout; plain PEFT can load them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_core.tree.objectives import GRPO
from grpo_core.tree.weights import LoraOptions
from grpo_core.weights.directory_checks import LORA_RANKS
from grpo_trainer.errors import PolicyMismatch
from grpo_trainer.learner import GradientStats, accumulate_gradients
from grpo_trainer.model.adapter import adapter_dropouts, served_rank, trained_parameters
from grpo_trainer.model.loading import TrainedWeights
from grpo_trainer.model.logprobs import logprobs_of
from grpo_trainer.optim.master_optimizer import MasterOptimizer
from tests.unit.trainer.groups import collated, group
from tests.unit.trainer.tiny_policy import LORA, move, optimizer_of

TOKENS = list(range(1, 20))


def loaded(model: str, lora: LoraOptions = LORA, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(1)
    return TrainedWeights(model, lora).load(dtype).eval()


def test_an_adapter_changes_nothing_at_first_and_trains_nothing_else(model: str) -> None:
    policy = loaded(model, dtype=torch.bfloat16)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    assert torch.equal(logprobs_of(policy, TOKENS), logprobs_of(plain, TOKENS))
    trained = trained_parameters(policy)
    assert len(trained) == 2 * 2 * 2  # layers, modules, A and B
    assert {p.dtype for p in policy.parameters()} == {torch.bfloat16}

    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    optimizer = optimizer_of(policy)
    assert {master.dtype for master in optimizer.masters} == {torch.float32}
    for step in range(2):
        move(policy, optimizer, step)
    changed = {n for n, p in policy.named_parameters() if not torch.equal(p, before[n])}
    assert changed == set(trained)


def test_an_adapter_sits_in_the_chosen_layers_and_modules_only(model: str) -> None:
    trained = trained_parameters(loaded(model, replace(LORA, layers=(1,))))
    assert len(trained) == 4
    assert all(".layers.1." in name for name in trained)
    wrong = replace(LORA, target_modules=("q_proj", "c_attn"), layers=(0, 5))
    with pytest.raises(PolicyMismatch) as told:
        loaded(model, wrong)
    assert "the model has no modules c_attn; its linear layers are q_proj, k_proj" in str(
        told.value
    )
    assert "--lora-layer-indices [5]: the model has layers 0 to 1" in str(told.value)


def test_all_linear_layers_but_the_head_get_an_adapter(model: str) -> None:
    policy = loaded(model, replace(LORA, target_modules=("all-linear",)))
    adapted = {name.split(".lora_")[0].rpartition(".")[2] for name in trained_parameters(policy)}
    linear = ("q", "k", "v", "o", "gate", "up", "down")
    assert adapted == {f"{name}_proj" for name in linear}


def test_vllm_is_started_with_the_lowest_rank_that_it_serves() -> None:
    for r in range(1, 513):
        assert served_rank(r) == min(rank for rank in LORA_RANKS if rank >= r)
    with pytest.raises(PolicyMismatch, match="--lora-r 513"):
        served_rank(513)


def test_a_saved_adapter_loads_with_plain_peft(model: str, tmp_path: Path) -> None:
    policy = loaded(model)
    optimizer = optimizer_of(policy)
    for step in range(2):
        move(policy, optimizer, step)
    target = tmp_path / "final_adapter"
    weights = TrainedWeights(model, LORA)
    weights.write(policy, target, with_tokenizer=True)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    again = PeftModel.from_pretrained(base, str(target)).eval()
    assert torch.equal(logprobs_of(again, TOKENS), logprobs_of(policy, TOKENS))
    assert AutoTokenizer.from_pretrained(target).chat_template


def test_dropout_is_on_for_the_gradient_and_off_for_everything_that_is_compared(
    model: str,
) -> None:
    policy = loaded(model, replace(LORA, dropout=0.5))
    optimizer = optimizer_of(policy)
    move(policy, optimizer, 0)  # with B = 0 it would have no effect
    assert len(adapter_dropouts(policy)) == 4
    (one, gradient), (other, another) = (gradients(policy, optimizer, seed) for seed in (1, 2))
    assert not torch.allclose(gradient, another, rtol=1e-3)
    assert torch.equal(one.tokens.logp, other.tokens.logp)
    assert one.sums == other.sums
    assert one.loss != other.loss
    assert not any(module.training for module in policy.modules())

    exact = loaded(model, LORA)
    exact.load_state_dict(policy.state_dict())
    assert adapter_dropouts(exact) == []
    without, _ = gradients(exact, optimizer_of(exact), 1)
    assert torch.equal(without.tokens.logp, one.tokens.logp)


def gradients(
    policy: Any, optimizer: MasterOptimizer, seed: int
) -> tuple[GradientStats, torch.Tensor]:
    """Statistics of one step, and its gradients in one vector."""
    torch.manual_seed(seed)
    stats = accumulate_gradients(policy, collated(group(), group(scores=[0.0, 1.0])), GRPO, step=0)
    optimizer.gradients.gather()
    gathered = [g.flatten() for g in optimizer.gradients.tensors if g is not None]
    optimizer.gradients.clear()
    return stats, torch.cat(gathered)
