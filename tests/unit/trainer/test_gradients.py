"""Gradient accumulation, with a real (tiny) language model."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from grpo_core.wire import MASKED, PROMPT_LOGPROB, ScoredGroup
from grpo_trainer.batch import CollationLimits, collate
from grpo_trainer.errors import NonFiniteLoss
from grpo_trainer.loop import accumulate_gradients
from grpo_trainer.optimizer import MasterOptimizer


def tiny_policy() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config)


def groups() -> list[ScoredGroup]:
    """Completions of different lengths, so that the cut into micro-batches pads differently."""
    p = PROMPT_LOGPROB
    return [
        ScoredGroup(
            tokens=[[1, 2, 3], [1, 2, 4, 5, 6, 7], [1, 2, 9, 8]],
            masks=[[MASKED] * 2 + [3], [MASKED] * 2 + [4, 5, 6, 7], [MASKED] * 2 + [9, 8]],
            scores=[1.0, 0.0, 0.2],
            inference_logprobs=[[p, p, -3.0], [p, p, -3.0, -4.0, -3.0, -4.0], [p, p, -3.4, -3.5]],
        )
    ] * 2


def gradients(micro_batch_size: int) -> tuple[float, list[torch.Tensor]]:
    policy = tiny_policy()
    masters = MasterOptimizer(policy.parameters(), 0.1, 0, 0.0, 1.0)
    batch = collate(groups(), CollationLimits(64, micro_batch_size, vocab_size=32))
    stats = accumulate_gradients(policy, batch, clip_eps=0.2, step=0)
    return stats.loss, [m.grad for m in masters.masters if m.grad is not None]


def test_the_cut_into_micro_batches_changes_neither_loss_nor_gradient() -> None:
    """The archived trainer divided by a constant instead of by what it had accumulated."""
    whole_loss, whole = gradients(6)
    assert max(float(g.abs().max()) for g in whole) > 1e-3
    for size in (1, 2, 4):
        loss, parts = gradients(size)
        assert loss == pytest.approx(whole_loss, rel=1e-4)
        for part, reference in zip(parts, whole, strict=True):
            torch.testing.assert_close(part, reference, rtol=1e-4, atol=1e-6)


def test_a_non_finite_loss_stops_the_run_by_name() -> None:
    policy = tiny_policy()
    with torch.no_grad():
        policy.model.embed_tokens.weight.fill_(float("nan"))
    batch = collate(groups(), CollationLimits(64, 6, vocab_size=32))
    with pytest.raises(NonFiniteLoss, match="step 3, micro-batch 0"):
        accumulate_gradients(policy, batch, clip_eps=0.2, step=3)
