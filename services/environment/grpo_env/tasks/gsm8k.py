"""The task `gsm8k`: word problems whose result is one number (Cobbe et al., arXiv 2110.14168)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from grpo_env.maths.final_answer import MARK, find_result
from grpo_env.maths.math_grader import MathGrader
from grpo_env.tasks.rows import Row, Split, TaskOptions, answer_of, problem_text, rows_of
from grpo_env.tasks.task import Answer, Graded, Task
from grpo_env.tasks.tool_calls import Message

INSTRUCTION = "Reason step by step. End with the line\n#### <number>"
"""Short, because with one token per character a problem alone has up to a thousand tokens."""

_HUB_ID, _HUB_CONFIG = "openai/gsm8k", "main"
_COLUMNS = ("question", "problem", "prompt")
_GOLD = re.compile(r"-?[0-9]+(\.[0-9]+)?")
_NUMBER = r"[-+]?\$?[0-9][0-9,]*(?:\.[0-9]+)?%?"
_ENDS_IN_NUMBER = re.compile(rf"(?:.*[^0-9.,])?{_NUMBER}\.?")
_BARE_NUMBER = re.compile(rf"(?:{MARK} *)?{_NUMBER}")
_MARKED_NUMBER = re.compile(rf"{MARK} *{_NUMBER}")


class Gsm8k(Task):
    """GSM8K, or data in its layout."""

    name = "gsm8k"
    has_process = True
    max_completion_tokens = 512
    weights = {"accuracy": 1.0, "format": 0.3}  # noqa: RUF012 - nothing changes it

    def __init__(self, options: TaskOptions) -> None:
        super().__init__(options)
        self.checked_arguments()
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
        """accuracy: 1 if the stated result equals the gold answer. format: see there; even a model
        that solves no problem gets groups with different scores. Length earns nothing.

        Raises:
            NotGraded: the result could not be compared in time.
        """
        result = find_result(answer, finished=answer.finished)
        return Graded(
            {
                "accuracy": self._grader.accuracy(result, row["gold"]),
                "format": marked_number_format(answer, finished=answer.finished),
            },
            f"result {result or 'none'}, expected {row['gold']}",
        )

    def close(self) -> None:
        self._grader.close()


def marked_number_format(text: str, *, finished: bool = True) -> float:
    """A third for each of three steps towards a last line `#### <number>`: the last line ends in a
    number; it is only a number, with or without the mark; it has the mark, and no other line has.

    Each step includes the previous ones, so that a policy that reaches one step also finds the next
    one in its own samples. An answer that the token limit cut off earns nothing.
    """
    last = text.rstrip().rpartition("\n")[2].strip() if finished else ""
    if _MARKED_NUMBER.fullmatch(last) and text.count(MARK) == 1:
        return 1.0
    if _BARE_NUMBER.fullmatch(last):
        return 2 / 3
    return 1 / 3 if _ENDS_IN_NUMBER.fullmatch(last) else 0.0


def problem_of(row: dict[str, Any]) -> Row:
    """The row with its problem as `question`, and the right result as `gold`: a plain number,
    without thousands separators. Raises `ValueError`: with the mistake in the row."""
    question, answer = problem_text(row, _COLUMNS), answer_of(row)
    if MARK not in answer:
        raise ValueError(f"the right answer has no {MARK!r} before the result")
    gold = answer.rpartition(MARK)[2].strip().replace(",", "")
    if not _GOLD.fullmatch(gold):
        raise ValueError(f"the right answer: expected a number after {MARK!r}, got {gold[:40]!r}")
    return {**row, "question": question, "gold": gold}
