"""Rewards of recipes, by the names that `reward_funcs` lists. `src/rewards.py` adds to them."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

from grpo_env.grading.math_grader import MathGrader
from grpo_env.grading.parts import accuracy
from grpo_env.loading import find_task
from grpo_env.tasks import Answer, Row, TaskOptions
from grpo_offline.errors import RecipeInvalid

RewardFunction = Callable[[Answer, Row], Any]
REWARDS: dict[str, RewardFunction] = {}
"""A reward gets the completion and its row. `row["answer"]` is the solution column."""
ANSWER = "answer"

_ANSWER_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_FORMAT = re.compile(
    r"\s*<think>((?!</think>).)*</think>\s*<answer>((?!</answer>).)*</answer>\s*", re.S
)
_WITHOUT_MEANING = re.compile(r"\s+|\\[,;! ]|\\left|\\right|\$")


def register(name: str) -> Callable[[RewardFunction], RewardFunction]:
    """A decorator that adds a reward: `@register("short")`."""

    def add(function: RewardFunction) -> RewardFunction:
        REWARDS[name] = function
        return function

    return add


def find_reward(name: str) -> RewardFunction:
    """A reward by its name, or a function `(answer, row)` of a file: `my.py:reward`.

    Raises:
        RecipeInvalid: there is no such reward.
        TaskUnusable: the file cannot be loaded.
    """
    if name in REWARDS:
        return REWARDS[name]
    source, colon, _ = name.partition(":")
    if colon or source.endswith(".py"):
        return find_task(name)(TaskOptions()).reward
    raise RecipeInvalid(
        f"reward_funcs: no reward {name!r}; there are {', '.join(REWARDS)}, and functions of "
        "files, for example my.py:reward. Add yours to src/rewards.py"
    )


def from_trl(function: Callable[..., list[float]]) -> RewardFunction:
    """A reward in TRL's form, `(completions, **columns) -> list[float]`, as one of ours. It is
    called with one completion at a time, and the columns of its row."""

    def reward(answer: Answer, row: Row) -> float:
        columns = {name: [value] for name, value in row.items()}
        completions = [[{"role": "assistant", "content": str(answer)}]]
        [score] = function(**columns | {"completions": completions})
        return score

    return reward


def tagged_answer(text: str) -> str | None:
    """The content of the last `<answer>…</answer>`; None without one."""
    begins, answer = None, None
    for tag in _ANSWER_TAG.finditer(text):  # one pass, however many tags a model writes
        if not tag[1]:
            begins = tag.end() if begins is None else begins
        elif begins is not None:
            begins, answer = None, text[begins : tag.start()]
    return None if answer is None else answer.strip()


def canonical(text: str) -> str:
    """Without white space, dollars and LaTeX's spacing, which do not change an answer."""
    return _WITHOUT_MEANING.sub("", text).rstrip(".")


@register("exact_answer")
def exact_answer(answer: Answer, row: Row) -> float:
    """1 if the last `<answer>…</answer>` holds the row's answer, apart from white space."""
    said = tagged_answer(answer)
    return float(said is not None and canonical(said) == canonical(str(row[ANSWER])))


REWARDS["pure_accuracy_math"] = exact_answer


@register("exact_completion")
def exact_completion(answer: Answer, row: Row) -> float:
    """1 if the whole completion is the row's answer, apart from white space."""
    return float(canonical(answer) == canonical(str(row[ANSWER])))


@register("equal_answer")
def equal_answer(answer: Answer, row: Row) -> float:
    """1 if the last `<answer>…</answer>` equals the row's answer as a number or as LaTeX.

    Raises `NotGraded`: it could not be compared in time."""
    return accuracy(tagged_answer(answer), str(row[ANSWER]), _grader().is_equal)


@register("answer_format")
def answer_format(answer: Answer, row: Row) -> float:  # noqa: ARG001
    """1 for `<think>…</think> <answer>…</answer>` and nothing else."""
    return float(_FORMAT.fullmatch(answer) is not None)


@cache
def _grader() -> MathGrader:
    return MathGrader()


def close_rewards() -> None:
    """End the processes that rewards have started."""
    if _grader.cache_info().currsize:
        _grader().close()
        _grader.cache_clear()
