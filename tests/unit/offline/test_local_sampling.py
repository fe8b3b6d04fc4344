"""Tokens that the trainer samples by itself have the logprobs of its policy."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_core.wire.policy_version import PolicyVersion
from grpo_offline.backends import local
from grpo_offline.backends.local import LocalGeneration
from grpo_offline.errors import StaleServer
from grpo_offline.sampling import require_own_policy
from grpo_trainer.config.forward import ForwardOptions
from grpo_trainer.model.forward import _probe_batch, build_forward_pass
from grpo_trainer.model.logprobs import logprobs_of
from grpo_trainer.model.policy import vocabulary_of
from tests.unit.trainer.tiny_policy import model_directory

PROMPT = [10, 20, 30]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_directory(tmp_path_factory.mktemp("model"))


def policy_of(model: Path, gradient_checkpointing: bool = False) -> Any:
    policy: Any = AutoModelForCausalLM.from_pretrained(model).eval()
    options = ForwardOptions(gradient_checkpointing=gradient_checkpointing)
    forward = build_forward_pass(policy, options)
    # As after a training step.
    forward(policy, _probe_batch(vocabulary_of(policy))).logp.sum().backward()  # type: ignore[no-untyped-call]
    return policy


def sampled(model: Path, policy: Any, **sampling: Any) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(model)
    generation = LocalGeneration(policy, tokenizer, lambda: PolicyVersion(1, 0), seed=0)
    return asyncio.run(generation.generate(PROMPT, **sampling)).completions()


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_logprobs_are_those_of_the_policy(model: Path, gradient_checkpointing: bool) -> None:
    policy = policy_of(model, gradient_checkpointing)
    for completion in sampled(model, policy, max_tokens=16, n=4):
        ours = logprobs_of(policy, [*PROMPT, *completion.token_ids])[len(PROMPT) - 1 :]
        torch.testing.assert_close(torch.tensor(completion.logprobs), ours, atol=1e-4, rtol=0)


def test_completions_beyond_the_limit_are_sampled_in_further_passes(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = policy_of(model)
    monkeypatch.setattr(local, "LOGITS_AT_ONCE", 2 * 16 * policy.config.vocab_size)
    sizes = []
    generate = policy.generate
    monkeypatch.setattr(
        policy,
        "generate",
        lambda *a, **k: sizes.append(k["num_return_sequences"]) or generate(*a, **k),
    )
    assert len(sampled(model, policy, max_tokens=16, n=5)) == 5
    assert sizes == [2, 2, 1]


class Engine:
    """Samples with one policy."""

    def __init__(self, model: Path, policy: Any) -> None:
        self.model, self.policy = model, policy

    async def sample_plainly(self, prompt_ids: list[int], max_tokens: int) -> Any:
        tokenizer = AutoTokenizer.from_pretrained(self.model)
        generation = LocalGeneration(self.policy, tokenizer, lambda: PolicyVersion(1, 0), seed=0)
        answer = await generation.generate(prompt_ids, max_tokens=max_tokens)
        return answer.completions()[0]


def test_tokens_of_another_policy_are_named_however_rollouts_are_sampled(model: Path) -> None:
    policy, other = policy_of(model), policy_of(model)
    asyncio.run(require_own_policy(Engine(model, policy), policy))  # type: ignore[arg-type]
    with torch.no_grad():
        for weights in other.parameters():
            weights.mul_(1.5)
    with pytest.raises(StaleServer, match="differ from those of the trainer's policy by"):
        asyncio.run(require_own_policy(Engine(model, other), policy))  # type: ignore[arg-type]
