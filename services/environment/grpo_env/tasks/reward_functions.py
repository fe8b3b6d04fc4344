"""Reward functions in the forms of this project, TRL and verl, and the values that they return."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from statistics import fmean
from typing import Any

from grpo_core.wire.fields import FLOAT32_MAX
from grpo_env.tasks.rows import PROMPT_COLUMNS, Row
from grpo_env.tasks.task import Answer, Graded
from grpo_env.tasks.tools import is_coroutine

RewardFunction = Callable[[Answer, Row], Any]


def _prompt(row: Row) -> Any:
    return next((row[name] for name in PROMPT_COLUMNS if row.get(name) is not None), None)


def as_reward(
    function: Callable[..., Any],
    is_chat: Callable[[Row], bool] = lambda row: not isinstance(_prompt(row), str),
) -> RewardFunction:
    """The function itself, unless its parameters say that it was written for TRL
    (`completions`, `completion_ids`) or for verl (`solution_str`). Args: is_chat: as `from_trl`"""
    try:
        names = inspect.signature(function).parameters
    except (TypeError, ValueError):  # of C code
        return function
    if names.keys() & {"completions", "completion_ids"}:
        return from_trl(function, is_chat)
    if "solution_str" in names:
        return from_verl(function)
    return function


@dataclass(frozen=True)
class TrainerState:
    """What a reward of TRL reads of it: steps that are done, and of the whole run."""

    global_step: int
    max_steps: int


@dataclass(frozen=True)
class _Logs:
    """What a reward of TRL logs in one call, beside its scores."""

    metrics: dict[str, list[float]] = field(default_factory=dict)
    extra: dict[str, list[Any]] = field(default_factory=dict)

    def log_metric(self, name: str, value: float) -> None:
        self.metrics.setdefault(name, []).append(value)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        self.extra.setdefault(column, []).extend(values)

    def graded(self, scores: Sequence[Any]) -> Any:
        """The only score, with the means of metrics, and extra columns as the reason."""
        [score] = scores
        if score is None or not (self.metrics or self.extra):
            return score
        reasons = (f"{name} {', '.join(map(str, values))}" for name, values in self.extra.items())
        metrics = {name: fmean(values) for name, values in self.metrics.items()}
        return Graded({SINGLE: score}, "; ".join(reasons), metrics=metrics)


def from_trl(function: Callable[..., Any], is_chat: Callable[[Row], bool]) -> RewardFunction:
    """A reward in TRL's form, `(completions, **columns) -> list[float]`. It is called with one
    completion at a time, the columns of its row, `trainer_state`, `log_extra` and `log_metric`.

    Args:
        is_chat: whether completions are messages, as they are in TRL if the prompt is
    """

    def reward(answer: Answer, row: Row) -> Any:
        columns: dict[str, Any] = {name: [value] for name, value in row.items()}
        chat = is_chat(row)
        if answer.messages:
            columns["prompts"] = [list(answer.messages[:-1]) if chat else _prompt(row)]
        said = [{"role": "assistant", "content": str(answer)}] if chat else str(answer)
        logs = _Logs()
        columns |= {
            "completions": [said],
            "completion_ids": [list(answer.token_ids)],
            "trainer_state": TrainerState(answer.step, answer.steps),
            "log_extra": logs.log_extra,
            "log_metric": logs.log_metric,
        }
        return _then(function(**_known(function, columns)), logs.graded)

    return _like(function, reward)


def from_verl(function: Callable[..., Any]) -> RewardFunction:
    """A reward in verl's form: `compute_score(data_source, solution_str, ground_truth,
    extra_info)`, which returns a number or a dict with the key `score`."""

    def reward(answer: Answer, row: Row) -> Any:
        nested = row.get("reward_model")
        found = nested.get("ground_truth") if isinstance(nested, Mapping) else None
        values = {
            "data_source": row.get("data_source"),
            "solution_str": str(answer),
            "ground_truth": row.get("answer") if found is None else found,
            "extra_info": row.get("extra_info"),
        }
        return _then(function(**_known(function, values)), _scored)

    return _like(function, reward)


def _like(function: Callable[..., Any], reward: RewardFunction) -> RewardFunction:
    """The reward; a coroutine function if the function is one."""
    if not is_coroutine(function):
        return reward

    async def awaited(answer: Answer, row: Row) -> Any:
        return await reward(answer, row)

    return awaited


def _known(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(values)
    return {name: value for name, value in values.items() if name in parameters}


def _then(value: Any, convert: Callable[[Any], Any]) -> Any:
    """What `convert` makes of the value, or of what it yields if it is awaitable."""
    if not inspect.isawaitable(value):
        return convert(value)

    async def awaited() -> Any:
        return convert(await value)

    return awaited()


def _scored(value: Any) -> Any:
    if not (isinstance(value, Mapping) and "score" in value):
        return value
    parts = {k: v for k, v in value.items() if k != "score" and isinstance(v, int | float)}
    return Graded(parts, score=value["score"])


SINGLE = "reward"
"""The name of the only part, if a reward is a single number."""


class RewardInvalid(ValueError):
    """A reward returned something that is not a number or named numbers."""


def graded_of(value: Any) -> Graded:
    """What a reward returned, as named finite numbers. None stays None: a part that says nothing
    about this answer.

    Args:
        value: a number; a dict of numbers; `Graded`. Numbers may be of numpy or torch: scalars,
            and arrays without a dimension.

    Raises:
        RewardInvalid: it is anything else, it is empty, every part is None, or a number is beyond
            float32.
    """
    if isinstance(value, Graded):
        score = None if value.score is None else _number(SINGLE, value.score)
        metrics = {name: _number(name, number) for name, number in value.metrics.items()}
        return Graded(_numbers(value.parts, score is not None), str(value.reason), score, metrics)
    if isinstance(value, Mapping):
        return Graded(_numbers(value))
    return Graded(_numbers({SINGLE: value}))


def _numbers(parts: Mapping[Any, Any], may_be_empty: bool = False) -> dict[str, float | None]:
    found = {
        str(name): None if value is None else _number(str(name), value)
        for name, value in parts.items()
    }
    if not (may_be_empty or found):
        raise RewardInvalid("the reward is empty; expected a number, or named numbers")
    if not may_be_empty and all(value is None for value in found.values()):
        raise RewardInvalid(
            "the reward is None; a part may be None, or one of several rewards, but not all"
        )
    return found


def _number(name: str, value: Any) -> float:
    which = "the reward" if name == SINGLE else f"the part {name!r} of the reward"
    plain = value.item() if getattr(value, "shape", None) == () else value
    if not isinstance(plain, Real):  # bool is Real too
        raise RewardInvalid(
            f"{which} is {value!r}, a {type(value).__name__}; expected a number, or named numbers"
        )
    try:
        number = float(plain)
    except OverflowError:  # an integer of hundreds of digits
        number = math.inf
    if not abs(number) <= FLOAT32_MAX:
        raise RewardInvalid(f"{which} is {number:g}, which is not finite in float32")
    return number
