from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grpo_trainer.policy import token_logprobs


class FixedLogits(nn.Module):
    """Answers every position with the same logits."""

    def __init__(self, logits: list[float]) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(logits))

    def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
        assert not use_cache
        return SimpleNamespace(logits=self.logits.expand(*input_ids.shape, -1))


@pytest.mark.parametrize("temperature", [1.0, 2.0, 0.5])
def test_temperature_by_hand(temperature: float) -> None:
    """Logits (0, ln 9): at temperature t the odds are 9^(1/t)."""
    odds = 9 ** (1 / temperature)
    policy = FixedLogits([0.0, math.log(9)])
    ids = torch.tensor([[0, 1]])
    logp = token_logprobs(policy, ids, ids, torch.tensor([temperature]))
    assert logp.tolist()[0] == pytest.approx(
        [math.log(1 / (1 + odds)), math.log(odds / (1 + odds))], rel=1e-5
    )


def test_each_sequence_has_its_own_temperature() -> None:
    policy = FixedLogits([0.0, math.log(9)])
    ids = torch.zeros(2, 1, dtype=torch.long)
    logp = token_logprobs(policy, ids, ids, torch.tensor([1.0, 2.0]))
    assert logp.flatten().tolist() == pytest.approx([math.log(0.1), math.log(0.25)], rel=1e-5)
