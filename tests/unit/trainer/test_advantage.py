from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_trainer.advantage import group_advantages


def advantages(scores: list[float]) -> list[float]:
    return group_advantages(torch.tensor(scores)).tolist()


def test_three_scores_by_hand() -> None:
    """Mean 1, population deviation sqrt((1 + 0 + 1) / 3)."""
    deviation = (2 / 3) ** 0.5
    assert advantages([0.0, 1.0, 2.0]) == pytest.approx([-1 / deviation, 0.0, 1 / deviation])


@given(
    st.lists(st.integers(-1000, 1000), min_size=2, max_size=16).filter(lambda s: len(set(s)) > 1)
)
def test_shift_and_scale_of_the_scores_change_nothing(scores: list[int]) -> None:
    plain = advantages([float(score) for score in scores])
    assert sum(plain) == pytest.approx(0, abs=1e-5)
    assert sum(a * a for a in plain) == pytest.approx(len(scores), rel=1e-5)
    assert advantages([7.0 * score - 1000 for score in scores]) == pytest.approx(plain, abs=1e-6)


@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(1, 32))
def test_equal_scores_give_zeros(score: float, size: int) -> None:
    assert advantages([score] * size) == [0.0] * size


def test_rounding_noise_of_equal_scores_stays_small() -> None:
    """In float64 the mean of seven times 0.1 is not 0.1."""
    equal = torch.tensor([0.1] * 7, dtype=torch.float64)
    assert group_advantages(equal).abs().max() < 1e-6
