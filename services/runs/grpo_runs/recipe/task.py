"""The task of a recipe: its data sets, its prompts, and its rewards by the names that
`reward_funcs` lists. `src/rewards.py` adds to them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache
from typing import Any

from grpo_env.loading import FunctionTask, find_task
from grpo_env.maths.final_answer import require_short, stated_answer
from grpo_env.maths.math_grader import MathGrader
from grpo_env.maths.numbers import exact_verdict, read_number
from grpo_env.tasks import Answer, Graded, Message, Row, Split, Task, TaskOptions, reward_functions
from grpo_env.tasks.items import training_items
from grpo_env.tasks.math import boxed
from grpo_env.tasks.reward_functions import (
    SINGLE,
    RewardFunction,
    RewardInvalid,
    as_reward,
    graded_of,
)
from grpo_env.tasks.rows import ANSWER, ANSWER_COLUMNS, answer_text, is_missing, messages_of
from grpo_env.tasks.tools import is_coroutine
from grpo_runs.offline.errors import RecipeInvalid
from grpo_runs.recipe.data import RecipeData

_END_OF_ANSWER = "</answer>"
_DEFAULTS: Mapping[str, Any] = {"data": None, "rewards": ["exact_answer"], "stop": []}


class RecipeTask(Task):
    """Arguments: data: those of `RecipeData`; rewards: names; stop: texts that end a completion."""

    name = "recipe"

    def __init__(self, options: TaskOptions) -> None:
        super().__init__(options)
        arguments = self.checked_arguments(**_DEFAULTS)
        self._data = RecipeData(**arguments["data"])
        self._rewards = {name: find_reward(name) for name in arguments["rewards"]}
        self.stop = tuple(arguments["stop"])

    def rows(self, split: Split) -> Sequence[Row] | None:
        found = self._data.rows(split)
        return None if found is None else [_with_answer(row) for row in found]

    def prompt(self, row: Row) -> Sequence[Message]:
        compared = self._rewards.keys() & COMPARING
        if compared and ANSWER not in row:
            raise ValueError(
                f"no column for the answer; expected one of {', '.join(ANSWER_COLUMNS)}, found "
                f"{', '.join(row)}; name it with dataset_solution_column"
            )
        if compared - {"exact_completion"}:
            require_short(right_answer(row))
        elif compared:
            answer_text(row[ANSWER])
        return messages_of(row, self.options.system_prompt)

    def reward(self, answer: Answer, row: Row) -> Graded | Awaitable[Graded]:
        """The score is 0 plus what `reward_weights` make of the rewards by their names."""
        whole = self._with_end(answer)
        values = {name: reward(whole, row) for name, reward in self._rewards.items()}
        if any(inspect.isawaitable(value) for value in values.values()):
            return _awaited(values, row)
        return _graded(values, row)

    @property
    def has_async_reward(self) -> bool:
        return any(map(is_coroutine, self._rewards.values()))

    def _with_end(self, answer: Answer) -> Answer:
        """The server leaves out the text that ended a completion."""
        is_open = answer.rfind("<answer>") > answer.rfind(_END_OF_ANSWER)
        if is_open and answer.finished and _END_OF_ANSWER in self.stop:
            return Answer(answer + _END_OF_ANSWER, **vars(answer))
        return answer

    def close(self) -> None:
        """End the processes that rewards have started."""
        if _grader.cache_info().currsize:
            _grader().close()
            _grader.cache_clear()


def row_count(options: Mapping[str, Any]) -> int:
    """Number of training rows. Args: options: of env-server. Raises `DataUnusable`."""
    task = RecipeTask(
        TaskOptions(args=options["task_args"], system_prompt=options.get("system_prompt"))
    )
    task.held_out = options.get("held_out", task.held_out)
    try:
        return len(training_items(task))
    finally:
        task.close()


def _with_answer(row: Row) -> Row:
    found = next((name for name in ANSWER_COLUMNS if not is_missing(row.get(name))), None)
    return row if found in (None, ANSWER) else {**row, ANSWER: row[found]}


async def _awaited(values: Mapping[str, Any], row: Row) -> Graded:
    found = {
        name: await value if inspect.isawaitable(value) else value for name, value in values.items()
    }
    return _graded(found, row)


def _graded(values: Mapping[str, Any], row: Row) -> Graded:
    """Each reward as one part, and each of its own parts as `<reward>.<part>`, which counts only in
    its sum. None: the reward does not apply to this row."""
    parts: dict[str, float | None] = {}
    metrics: dict[str, float] = {}
    reasons = [f"expected {row[ANSWER]}"] if ANSWER in row else []
    for name, value in values.items():
        parts[name] = None
        if value is None:
            continue
        graded = graded_of(value)
        metrics |= graded.metrics
        own = {part: number for part, number in graded.parts.items() if number is not None}
        parts[name] = sum(own.values()) if graded.score is None else graded.score
        if own.keys() - {SINGLE}:
            parts |= {f"{name}.{part}": number for part, number in own.items()}
        reasons += [graded.reason] if graded.reason else []
    if all(number is None for number in parts.values()):
        raise RewardInvalid("every reward of reward_funcs returned None for this row")
    return Graded(parts, "; ".join(reasons), score=0.0, metrics=metrics)


REWARDS: dict[str, RewardFunction] = {}
"""A reward gets the completion and its row. `row["answer"]` is the solution column."""
COMPARING = {"exact_answer", "pure_accuracy_math", "equal_answer", "exact_completion"}
"""Those that need the row's answer."""
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
    return float(said is not None and _is_exact(said, right_answer(row), row))


REWARDS["pure_accuracy_math"] = exact_answer


@register("exact_completion")
def exact_completion(answer: Answer, row: Row) -> float:
    """1 if the whole completion is the row's answer, apart from white space."""
    return float(_is_exact(answer, answer_text(row.get(ANSWER)), row))


def _is_exact(said: str, right: str, row: Row) -> bool:
    """Whether both texts are equal; also as values, if the row has no text but a number, a truth
    value or a date, which has no one spelling."""
    is_value = not isinstance(row.get(ANSWER), str)
    is_equal = is_value and exact_verdict(said, right)
    return bool(is_equal) or canonical(said) == canonical(right)


@register("equal_answer")
def equal_answer(answer: Answer, row: Row) -> float:
    """1 if the last `<answer>…</answer>` equals the row's answer as a text, a number or LaTeX.

    Raises `NotGraded`: it could not be compared in time."""
    right = right_answer(row)
    # Prose around a number does not matter. All else is LaTeX, as in the task `math`.
    gold = right if read_number(right) else boxed(right)
    return exact_answer(answer, row) or _grader().accuracy(_said(answer), gold)


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
