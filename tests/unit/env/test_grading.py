from __future__ import annotations

import math
from collections.abc import Sequence

from grpo_env.grading import grade_all
from grpo_env.tasks import Answer, Message
from grpo_env.tasks.arithmetic import Sum


class NotGradable:
    """Grades "nan" and "inf" as such and refuses "?"."""

    @property
    def messages(self) -> Sequence[Message]:
        return [{"role": "user", "content": "?"}]

    def grade(self, answer: Answer) -> float:
        if answer.text == "?":
            raise ValueError("no number in the answer")
        return float(answer.text)


def answers(*texts: str) -> list[Answer]:
    return [Answer(text) for text in texts]


def test_scores_keep_the_order_of_the_completions() -> None:
    assert grade_all(Sum(1, 1), answers("2", "3", "2")).scores == (1.0, 0.0, 1.0)


def test_what_cannot_be_graded_is_quarantined_and_never_scored() -> None:
    grades = grade_all(NotGradable(), answers("0.5", "nan", "?", "inf", "-1"))

    assert grades.scores == (0.5, -1.0)
    assert all(math.isfinite(score) for score in grades.scores)
    assert grades.quarantined == (
        "completion 1: score nan",
        "completion 2: no number in the answer",
        "completion 3: score inf",
    )
