"""The task `gsm8k`: word problems whose result is one number (Cobbe et al., arXiv 2110.14168)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from grpo_env.maths.final_answer import MARK, find_result
from grpo_env.maths.math_grader import MathGrader
from grpo_env.maths.parts import accuracy, marked_number_format
from grpo_env.tasks.rows import rows_of
from grpo_env.tasks.task import (
    Answer,
    Graded,
    Message,
    Row,
    Split,
    Task,
    TaskOptions,
    checked_arguments,
)

INSTRUCTION = "Reason step by step. End with the line\n#### <number>"
"""Short, because with one token per character a problem alone has up to a thousand tokens."""

_HUB_ID, _HUB_CONFIG = "openai/gsm8k", "main"
_GOLD = re.compile(r"-?[0-9]+(\.[0-9]+)?")


class Gsm8k(Task):
    """GSM8K, or data in its layout."""

    name = "gsm8k"
    max_completion_tokens = 512
    weights = {"accuracy": 1.0, "format": 0.3}  # noqa: RUF012 - nothing changes it

    def __init__(self, options: TaskOptions) -> None:
        super().__init__(options)
        checked_arguments(self.name, options.args, {})
        self.options = replace(
            options,
            data=options.data or _HUB_ID,
            data_config=options.data_config or _HUB_CONFIG,
        )
        self._grader = MathGrader()

    def rows(self, split: Split) -> Sequence[Row] | None:
        return rows_of(self.options, split, problem_of)

    def prompt(self, row: Row) -> list[Message]:
        system = self.options.system_prompt
        instruction = INSTRUCTION if system is None else system
        question: Message = {"role": "user", "content": row["question"]}
        return [{"role": "system", "content": instruction}, question] if instruction else [question]

    def reward(self, answer: Answer, row: Row) -> Graded:
        """accuracy: 1 if the stated result equals the gold answer. format: each of three steps
        towards a last line `#### <number>` earns a third, so that even a model that solves no
        problem gets groups with different scores. Length earns nothing.

        Raises:
            NotGraded: the result could not be compared in time.
        """
        result = find_result(answer, finished=answer.finished)
        return Graded(
            {
                "accuracy": accuracy(result, row["gold"], self._grader.is_equal),
                "format": marked_number_format(answer, finished=answer.finished),
            },
            f"result {result or 'none'}, expected {row['gold']}",
        )

    def close(self) -> None:
        self._grader.close()


def problem_of(row: dict[str, Any]) -> Row:
    """The row with the right result as `gold`, a plain number without thousands separators.

    Raises:
        ValueError: with the mistake in the row.
    """
    fields = [row.get("question"), row.get("answer")]
    question, answer = (field if isinstance(field, str) else "" for field in fields)
    if not question.strip():
        raise ValueError("the field 'question' is empty")
    if MARK not in answer:
        raise ValueError(f"the field 'answer' has no {MARK!r} before the result")
    gold = answer.rpartition(MARK)[2].strip().replace(",", "")
    if not _GOLD.fullmatch(gold):
        raise ValueError(f"field 'answer': expected a number after {MARK!r}, got {gold[:40]!r}")
    return {**row, "gold": gold}
