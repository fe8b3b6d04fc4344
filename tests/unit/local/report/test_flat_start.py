"""The hint for a run whose first steps change nothing."""

from __future__ import annotations

import pytest

from grpo_local.report.step_table import flat_start_hint
from tests.unit.local.records import record


@pytest.mark.parametrize(
    ("steps", "rise", "ratio", "is_shown"),
    [
        (10, 0.0, 1.0002, True),
        (10, 0.0, None, True),
        (10, 0.05, 1.0002, False),
        (10, 0.0, 1.02, False),
        (9, 0.0, 1.0, False),
        (11, 0.0, 1.0, False),
    ],
)
def test_a_hint_is_shown_once_if_neither_policy_nor_reward_moves(
    steps: int, rise: float, ratio: float | None, is_shown: bool
) -> None:
    noise = (0.01, -0.01)
    first = [
        record(n + 1, **{"reward/mean": 0.3 + noise[n % 2] + rise * n, "grpo/mean_ratio": ratio})
        for n in range(steps)
    ]
    hint = flat_start_hint(first, 1e-5)
    assert (hint is not None) is is_shown
    assert hint is None or "raise --lr (now 1e-05)" in hint
