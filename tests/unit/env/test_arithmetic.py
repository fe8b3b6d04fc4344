from __future__ import annotations

import pytest

from grpo_env.tasks import Answer
from grpo_env.tasks.arithmetic import Arithmetic, Sum


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("7", 1.0),
        (" 7\n", 1.0),
        ("8", 0.0),
        ("07", 0.0),
        ("7.0", 0.0),
        ("7 or 8", 0.0),
        ("77", 0.0),
        ("", 0.0),
        ("\u0667", 0.0),
    ],
)
def test_only_exactly_the_right_number_scores(completion: str, score: float) -> None:
    assert Sum(3, 4).grade(Answer(completion)) == score


def test_a_sum_is_one_user_message() -> None:
    assert Sum(3, 4).messages == [{"role": "user", "content": "3+4="}]


def test_the_seed_decides_the_sums() -> None:
    def draw(seed: int) -> list[Sum]:
        task = Arithmetic(seed)
        return [task.next_item() for _ in range(20)]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_all_hundred_sums_come_up() -> None:
    task = Arithmetic(0)
    drawn = {(item.a, item.b) for item in (task.next_item() for _ in range(2000))}

    assert drawn == {(a, b) for a in range(10) for b in range(10)}
