"""Items whose grading a test decides."""

from __future__ import annotations

from grpo_env.tasks import Answer, Message


class NotGradable:
    """Grades "nan" and "inf" as such, any other number as itself; refuses "?"."""

    messages: tuple[Message, ...] = ({"role": "user", "content": "?"},)

    def grade(self, answer: Answer) -> float:
        if answer.text == "?":
            raise ValueError("no number in the answer")
        return float(answer.text)
