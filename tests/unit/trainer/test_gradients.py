"""Gradient accumulation, with a real (tiny) language model."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch

from grpo_trainer.errors import NonFiniteLoss
from grpo_trainer.gradients import GradientStats, accumulate_gradients
from tests.unit.trainer.forward_rig import qwen, ragged_batch


def gradients(micro_batch_size: int) -> tuple[GradientStats, list[torch.Tensor]]:
    policy = qwen()
    stats = accumulate_gradients(policy, ragged_batch(micro_batch_size), clip_eps=0.2, step=0)
    return stats, [p.grad for p in policy.parameters() if p.grad is not None]


def test_the_cut_into_micro_batches_changes_neither_loss_nor_gradient_nor_metrics() -> None:
    """The archived trainer divided by a constant instead of by what it had accumulated."""
    whole, reference = gradients(6)
    assert max(float(g.abs().max()) for g in reference) > 1e-3
    for size in (1, 2, 4):
        stats, parts = gradients(size)
        assert stats.loss == pytest.approx(whole.loss, rel=1e-4)
        assert asdict(stats.sums) == pytest.approx(asdict(whole.sums), rel=1e-4, abs=1e-6)
        torch.testing.assert_close(stats.tokens.logp, whole.tokens.logp)
        assert torch.equal(stats.tokens.sequence, whole.tokens.sequence)
        for part, expected in zip(parts, reference, strict=True):
            torch.testing.assert_close(part, expected, rtol=1e-4, atol=1e-6)


def test_every_trained_token_is_in_the_table_once() -> None:
    tokens = gradients(4)[0].tokens
    assert tokens.sequence.tolist() == [0] * 7 + [4] * 14 + [5] * 2
    assert tokens.position.tolist() == [*range(2, 9), *range(2, 16), 2, 3]
    ranked = sorted(tokens.diff.abs().tolist())
    assert tokens.diff_abs_quantile(0.99) == pytest.approx(ranked[22])
    assert tokens.diff_abs_quantile(0.5) == pytest.approx(ranked[11])


def test_a_non_finite_loss_stops_the_run_by_name() -> None:
    policy = qwen()
    with torch.no_grad():
        policy.model.embed_tokens.weight.fill_(float("nan"))
    with pytest.raises(NonFiniteLoss, match="step 3, micro-batch 0"):
        accumulate_gradients(policy, ragged_batch(), clip_eps=0.2, step=3)
