"""Gradient accumulation, with a real (tiny) language model."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from grpo_core.wire import MASKED, PROMPT_LOGPROB, ScoredGroup
from grpo_trainer.batch import Batch, CollationLimits, collate
from grpo_trainer.errors import NonFiniteLoss
from grpo_trainer.gradients import GradientStats, accumulate_gradients
from grpo_trainer.optimizer import MasterOptimizer
from tests.unit.trainer.groups import usable


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


def batch(micro_batch_size: int) -> Batch:
    return collate(usable(*groups()), CollationLimits(64, micro_batch_size))


def gradients(micro_batch_size: int) -> tuple[GradientStats, list[torch.Tensor]]:
    policy = tiny_policy()
    masters = MasterOptimizer(policy.parameters(), 0.1, 0, 0.0, 1.0)
    stats = accumulate_gradients(policy, batch(micro_batch_size), clip_eps=0.2, step=0)
    return stats, [g for g in masters.gradients.tensors if g is not None]


def test_the_cut_into_micro_batches_changes_neither_loss_nor_gradient_nor_metrics() -> None:
    """The archived trainer divided by a constant instead of by what it had accumulated."""
    whole, reference = gradients(6)
    assert max(float(g.abs().max()) for g in reference) > 1e-3
    for size in (1, 2, 4):
        stats, parts = gradients(size)
        assert stats.loss == pytest.approx(whole.loss, rel=1e-4)
        assert asdict(stats.sums) == pytest.approx(asdict(whole.sums), rel=1e-4, abs=1e-6)
        torch.testing.assert_close(stats.tokens.logp, whole.tokens.logp)
        assert stats.tokens.sequence.tolist() == whole.tokens.sequence.tolist()
        for part, expected in zip(parts, reference, strict=True):
            torch.testing.assert_close(part, expected, rtol=1e-4, atol=1e-6)


def test_every_trained_token_is_in_the_table_once() -> None:
    tokens = gradients(4)[0].tokens
    assert tokens.sequence.tolist() == [0, 1, 1, 1, 1, 2, 2, 3, 4, 4, 4, 4, 5, 5]
    assert tokens.position.tolist() == [2, 2, 3, 4, 5, 2, 3] * 2
    torch.testing.assert_close(
        tokens.behaviour_logp, torch.tensor([-3.0, -3.0, -4.0, -3.0, -4.0, -3.4, -3.5] * 2)
    )
    ranked = sorted(tokens.diff.abs().tolist())
    assert tokens.diff_abs_quantile(0.99) == pytest.approx(ranked[13])
    assert tokens.diff_abs_quantile(0.5) == pytest.approx(ranked[6])


def test_a_non_finite_loss_stops_the_run_by_name() -> None:
    policy = tiny_policy()
    with torch.no_grad():
        policy.model.embed_tokens.weight.fill_(float("nan"))
    with pytest.raises(NonFiniteLoss, match="step 3, micro-batch 0"):
        accumulate_gradients(policy, batch(6), clip_eps=0.2, step=3)
