from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grpo_trainer.policy import token_logprobs


class FixedLogits(nn.Module):
    """Answers every position with the logits (0, ln 9)."""

    def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
        assert not use_cache
        return SimpleNamespace(logits=torch.tensor([0.0, math.log(9)]).expand(*input_ids.shape, 2))


def test_each_sequence_is_scored_at_its_own_temperature() -> None:
    """At temperature t the odds are 9^(1/t): 9, 3 and 81 to 1."""
    inputs, targets = torch.zeros(3, 2, dtype=torch.long), torch.tensor([[0, 1]] * 3)
    logp = token_logprobs(FixedLogits(), inputs, targets, torch.tensor([1.0, 2.0, 0.5]))
    odds = [9, 3, 81]
    expected = [[1 / (1 + o), o / (1 + o)] for o in odds]
    assert logp.exp().tolist() == [pytest.approx(row, rel=1e-5) for row in expected]
