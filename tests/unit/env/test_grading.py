from __future__ import annotations

from grpo_env.grading import grade_all
from grpo_env.tasks import Answer
from tests.unit.env.items import NotGradable


def test_what_cannot_be_graded_is_quarantined_and_never_scored() -> None:
    grades = grade_all(NotGradable(), [Answer(text) for text in ("0.5", "nan", "?", "inf", "-1")])

    assert grades.scores == (0.5, -1.0)
    assert grades.quarantined == (
        "completion 1: score nan",
        "completion 2: no number in the answer",
        "completion 3: score inf",
    )
