from __future__ import annotations

import pytest

from grpo_env.tasks import Answer
from grpo_env.tasks.arithmetic import Arithmetic, Sum


@pytest.mark.parametrize("completion", ["8", "07", "7.0", "7 or 8", "77", "", "\u0667"])
def test_only_exactly_the_right_number_scores(completion: str) -> None:
    assert Sum(3, 4).grade(Answer(completion)) == 0.0
    assert Sum(3, 4).grade(Answer(" 7\n")) == 1.0


def test_the_seed_decides_the_order_of_all_hundred_sums() -> None:
    def draw(seed: int) -> list[Sum]:
        task = Arithmetic(seed)
        return [task.next_item() for _ in range(2000)]

    assert draw(1) == draw(1) != draw(2)
    assert {(item.a, item.b) for item in draw(0)} == {(a, b) for a in range(10) for b in range(10)}
