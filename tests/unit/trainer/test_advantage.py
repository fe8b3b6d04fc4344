from __future__ import annotations

import pytest
import torch

from grpo_trainer.advantage import group_advantages


def test_by_hand() -> None:
    """Mean 1, population deviation sqrt((1 + 0 + 1) / 3)."""
    deviation = (2 / 3) ** 0.5
    advantages = group_advantages(torch.tensor([0.0, 1.0, 2.0])).tolist()
    assert advantages == pytest.approx([-1 / deviation, 0.0, 1 / deviation])


@pytest.mark.parametrize("scores", [[0.1] * 7, [1.0, 1.0], [3.0]])
def test_equal_scores_teach_nothing(scores: list[float]) -> None:
    """In float64 the mean of seven times 0.1 is not 0.1; the rounding must not be blown up."""
    assert group_advantages(torch.tensor(scores, dtype=torch.float64)).abs().max() < 1e-6


def test_a_shift_and_a_scale_of_the_scores_change_nothing() -> None:
    scores = torch.tensor([0.3, 0.1, 0.9, 0.4])
    torch.testing.assert_close(group_advantages(scores), group_advantages(1000 + 7 * scores))
