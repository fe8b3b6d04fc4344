"""Rewards of recipes, by the names that `reward_funcs` lists. `src/rewards.py` adds to them."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

from grpo_env.loading import FunctionTask, find_task
from grpo_env.maths.final_answer import stated_answer
from grpo_env.maths.math_grader import MathGrader
from grpo_env.tasks import Answer, Row, TaskOptions, reward_functions
from grpo_env.tasks.reward_functions import RewardFunction, as_reward
from grpo_env.tasks.rows import ANSWER, answer_text
from grpo_runs.offline.errors import RecipeInvalid

REWARDS: dict[str, RewardFunction] = {}
"""A reward gets the completion and its row. `row["answer"]` is the solution column."""

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
    """A reward by its name, or a function of a file: `my.py:reward`. It may have the form
    `(answer, row)`, or that of TRL or verl.

    Raises:
        RecipeInvalid: there is no such reward.
        TaskUnusable: the file cannot be loaded.
    """
    if name in REWARDS:
        return as_reward(REWARDS[name], _is_chat)
    source, colon, _ = name.partition(":")
    if colon or source.endswith(".py"):
        task = find_task(name)(TaskOptions())
        if isinstance(task, FunctionTask):
            return as_reward(task.function, _is_chat)
        return task.reward
    raise RecipeInvalid(
        f"reward_funcs: no reward {name!r}; there are {', '.join(REWARDS)}, and functions of "
        "files, for example my.py:reward. Add yours to src/rewards.py"
    )


def from_trl(function: Callable[..., Any]) -> RewardFunction:
    """A reward in TRL's form, `(completions, **columns) -> list[float]`, as one of ours. It is
    called with one completion at a time, as messages, and the columns of its row."""
    return reward_functions.from_trl(function, _is_chat)


def _is_chat(_row: Row) -> bool:
    """Recipes make every prompt a conversation."""
    return True


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


def right_answer(row: Row) -> str:
    """The row's answer, or the final one of a worked solution: `\\boxed{}`, `####` or the tag.

    Raises:
        ValueError: the row has none.
    """
    text = answer_text(row.get(ANSWER))
    return stated_answer(text) or text


def _said(answer: Answer) -> str | None:
    """The content of the last tags, or of the box in it."""
    said = tagged_answer(answer)
    return None if said is None else stated_answer(said) or said


@register("exact_answer")
def exact_answer(answer: Answer, row: Row) -> float:
    """1 if the last `<answer>…</answer>` holds the row's answer, apart from white space."""
    said = _said(answer)
    return float(said is not None and canonical(said) == canonical(right_answer(row)))


REWARDS["pure_accuracy_math"] = exact_answer


@register("exact_completion")
def exact_completion(answer: Answer, row: Row) -> float:
    """1 if the whole completion is the row's answer, apart from white space."""
    return float(canonical(answer) == canonical(answer_text(row.get(ANSWER))))


@register("equal_answer")
def equal_answer(answer: Answer, row: Row) -> float:
    """1 if the last `<answer>…</answer>` equals the row's answer as a number or as LaTeX.

    Raises `NotGraded`: it could not be compared in time."""
    return _grader().accuracy(_said(answer), right_answer(row))


COMPARING = {"exact_answer", "pure_accuracy_math", "equal_answer", "exact_completion"}
"""Those that need the row's answer."""


@register("answer_format")
def answer_format(answer: Answer, row: Row) -> float:  # noqa: ARG001
    """1 for `<think>…</think> <answer>…</answer>` and nothing else. The prompt may already hold the
    beginning."""
    opening = answer.opening
    is_open = opening.rfind("<think>") > opening.rfind("</think>")
    return float(_FORMAT.fullmatch((opening if is_open else "") + answer) is not None)


@cache
def _grader() -> MathGrader:
    return MathGrader()


def close_rewards() -> None:
    """End the processes that rewards have started."""
    if _grader.cache_info().currsize:
        _grader().close()
        _grader.cache_clear()
