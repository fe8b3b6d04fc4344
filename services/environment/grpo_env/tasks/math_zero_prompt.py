"""The prompt and the result of Atropos' `math_server_zero`, for base models without chat template.

The prompt is Open-Reasoner-Zero's, character for character, because models and results that use it
depend on it (arXiv 2503.24290, https://github.com/Open-Reasoner-Zero/Open-Reasoner-Zero, MIT).
"""

from __future__ import annotations

from grpo_env.grading.final_answer import (
    ANSWER_TAG,
    BOX,
    END_OF_ANSWER,
    ResultForm,
    find_result,
)

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

OPENING = "<think>"
"""The prompt ends in this tag, so the completion starts inside of it. Put the tag before the
completion to check its format."""

STOP = ("User:", "Human:", "Assistant:", END_OF_ANSWER)
"""Strings that end the sampling. The inference server leaves them out of the text."""

LONGEST_RESULT_CHARS = 1000
"""For matrices and polynomials."""


def prompt(problem: str) -> str:
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
    return find_result(text, (ResultForm.TAGGED_BOX,), longest_chars=LONGEST_RESULT_CHARS)
