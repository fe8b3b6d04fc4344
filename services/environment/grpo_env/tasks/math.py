"""The task `math`: Atropos' `math_server_zero`, for base models without a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from grpo_env.grading.final_answer import require_short, stated_answer
from grpo_env.grading.math_grader import MathGrader
from grpo_env.grading.parts import accuracy, think_answer_format
from grpo_env.tasks import Answer, Graded, Row, Split, Task, TaskOptions
from grpo_env.tasks import math_zero_prompt as math_zero
from grpo_env.tasks.arguments import checked_arguments
from grpo_env.tasks.row_forms import answer_of, question_text
from grpo_env.tasks.rows import rows_of

_TRAINING_DATA = "zwhe99/DeepMath-103K"
_EVALUATION_DATA = "HuggingFaceH4/MATH-500"
PROBLEM_COLUMNS = ("problem", "question", "prompt")
ANSWER_COLUMNS = ("answer", "final_answer", "solution")


class Math(Task):
    """Problems with LaTeX answers, asked without examples."""

    name = "math"
    stop = math_zero.STOP
    weights = {"accuracy": 1.0, "format": 0.0}  # noqa: RUF012 - nothing changes it

    def __init__(self, options: TaskOptions) -> None:
        super().__init__(options)
        checked_arguments(self.name, options.args, {})
        self.options = replace(
            options,
            data=options.data or _TRAINING_DATA,
            eval_data=options.eval_data or (None if options.data else _EVALUATION_DATA),
        )
        self._grader = MathGrader()

    def rows(self, split: Split) -> Sequence[Row] | None:
        return rows_of(self.options, split)

    def prompt(self, row: Row) -> str:
        require_short(_gold(row))  # a row without an answer is named at the start
        return math_zero.prompt(_problem(row))

    def reward(self, answer: Answer, row: Row) -> Graded:
        """accuracy: 1 if the last box in the last `<answer>` equals the row's answer. format: 1 for
        `<think>…</think> <answer>…\\boxed{…}…</answer>` and nothing else.

        Raises:
            NotGraded: the result could not be compared in time.
        """
        gold = _gold(row)
        result = math_zero.find_boxed_answer(answer, finished=answer.finished)
        text = math_zero.OPENING + math_zero.with_closing_tag(answer)
        return Graded(
            {
                "accuracy": accuracy(result, math_zero.boxed(gold), self._grader.is_equal),
                "format": think_answer_format(text, finished=answer.finished),
            },
            f"result {result or 'none'}, expected {gold}",
        )

    def close(self) -> None:
        self._grader.close()


def _problem(row: Row) -> str:
    """The text of the first column that the row has. Raises `ValueError`."""
    for column in PROBLEM_COLUMNS:
        value = row.get(column)
        if value is not None and (text := question_text(value)).strip():
            return text
    raise ValueError(
        f"expected one of the columns {', '.join(PROBLEM_COLUMNS)}, found "
        f"{', '.join(row) or 'none'}; name it with --columns problem=COLUMN"
    )


def _gold(row: Row) -> str:
    """The right answer, or the final one of a whole solution. Raises `ValueError`."""
    text = answer_of(row, ANSWER_COLUMNS)
    return stated_answer(text) or text
