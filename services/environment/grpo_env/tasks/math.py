"""The task `math`: Atropos' `math_server_zero`, for base models without a chat template.

The prompt is Open-Reasoner-Zero's, character for character, because models and results that use it
depend on it (arXiv 2503.24290, https://github.com/Open-Reasoner-Zero/Open-Reasoner-Zero, MIT).
"""

from __future__ import annotations

import re
from dataclasses import replace

from grpo_env.maths.final_answer import (
    ANSWER_TAG,
    BOX,
    END_OF_ANSWER,
    END_OF_THINKING,
    THINK_TAG,
    find_result,
    last_box,
    require_short,
    stated_answer,
    tagged_box,
)
from grpo_env.maths.math_grader import MathGrader
from grpo_env.tasks.rows import Row, TaskOptions, answer_of, problem_text
from grpo_env.tasks.task import Answer, Graded, Task

_CONVERSATION = (
    "A conversation between User and Assistant. The User asks a question, and the Assistant solves "
    "it. The Assistant first thinks about the reasoning process in the mind and then provides the "
    "User with the answer. The reasoning process is enclosed within <think> </think> and answer is "
    "enclosed within <answer> </answer> tags, respectively, i.e., <think> reasoning process here "
    "</think> <answer> answer here </answer>. User: {question}\nAssistant: <think>"
)
_QUESTION = (
    "You must put your answer inside <answer> </answer> tags, i.e., <answer> answer here "
    "</answer>. And your final answer will be extracted automatically by the \\boxed{{}} tag.\n"
    "This is the problem:\n{problem}\n"
)

_TAGS = (THINK_TAG, END_OF_THINKING, ANSWER_TAG, END_OF_ANSWER)
_THINK_ANSWER = re.compile(r"(?s)\s*<think>.*</think>\s*<answer>(.*)</answer>\s*")

OPENING = THINK_TAG
"""The prompt ends in this tag, so the completion starts inside of it. Put the tag before the
completion to check its format."""

STOP = ("User:", "Human:", "Assistant:", END_OF_ANSWER)
"""Strings that end the sampling. The inference server leaves them out of the text."""

LONGEST_RESULT_CHARS = 1000
"""For matrices and polynomials."""


def zero_prompt(problem: str) -> str:
    """The text that the policy continues, without a chat template."""
    return _CONVERSATION.format(question=_QUESTION.format(problem=problem))


def boxed(gold: str) -> str:
    """The gold answer in a box, so that it is read as LaTeX."""
    return gold if BOX in gold else f"{BOX}{gold}}}"


def with_closing_tag(completion: str) -> str:
    """The completion with the `</answer>` that ended the sampling, if the answer is still open."""
    _, start, said = completion.rpartition(ANSWER_TAG)
    return completion + END_OF_ANSWER if start and END_OF_ANSWER not in said else completion


def find_boxed_answer(completion: str, *, finished: bool = True) -> str | None:
    """The last `\\boxed{…}` inside the last `<answer>…</answer>`.

    None if there is none, or if the token limit cut the completion off (`finished` is False).
    """
    if not finished:
        return None
    text = with_closing_tag(completion)
    return find_result(text, (tagged_box,), longest_chars=LONGEST_RESULT_CHARS)


def think_answer_format(text: str, *, finished: bool = True) -> float:
    """1.0 for `<think>…</think> <answer>…\\boxed{…}…</answer>` and nothing else, each tag once.

    If the prompt ends in `<think>`, put it before the completion.
    """
    if not finished or any(text.count(tag) != 1 for tag in _TAGS):
        return 0.0
    found = _THINK_ANSWER.fullmatch(text)
    return float(found is not None and last_box(found[1]) is not None)


_TRAINING_DATA = "zwhe99/DeepMath-103K"
_EVALUATION_DATA = "HuggingFaceH4/MATH-500"


class Math(Task):
    """Problems with LaTeX answers, asked without examples."""

    name = "math"
    has_process = True
    stop = STOP
    weights = {"accuracy": 1.0, "format": 0.0}  # noqa: RUF012 - nothing changes it

    def __init__(self, options: TaskOptions) -> None:
        super().__init__(options)
        self.checked_arguments()
        self.options = replace(
            options,
            data=options.data or _TRAINING_DATA,
            eval_data=options.eval_data or (None if options.data else _EVALUATION_DATA),
        )
        self._grader = MathGrader()

    def prompt(self, row: Row) -> str:
        require_short(_gold(row))  # a row without an answer is named at the start
        return zero_prompt(problem_text(row))

    def reward(self, answer: Answer, row: Row) -> Graded:
        """accuracy: 1 if the last box in the last `<answer>` equals the row's answer. format: 1 for
        `<think>…</think> <answer>…\\boxed{…}…</answer>` and nothing else.

        Raises:
            NotGraded: the result could not be compared in time.
        """
        gold = _gold(row)
        result = find_boxed_answer(answer, finished=answer.finished)
        text = OPENING + with_closing_tag(answer)
        return Graded(
            {
                "accuracy": self._grader.accuracy(result, boxed(gold)),
                "format": think_answer_format(text, finished=answer.finished),
            },
            f"result {result or 'none'}, expected {gold}",
        )

    def close(self) -> None:
        self._grader.close()


def _gold(row: Row) -> str:
    """The right answer, or the final one of a whole solution. Raises `ValueError`."""
    text = answer_of(row)
    return stated_answer(text) or text
