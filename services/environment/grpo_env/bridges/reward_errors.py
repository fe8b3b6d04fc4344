"""Finds exceptions in reward functions of verifiers, which itself counts them as a reward of 0."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_errors: ContextVar[list[Exception] | None] = ContextVar("reward_errors", default=None)
"""Of the rollouts that the current task scores."""


@contextmanager
def raised_reward_errors() -> Iterator[None]:
    """Raise the first exception of a watched function that was called inside."""
    errors: list[Exception] = []
    token = _errors.set(errors)
    try:
        yield
    finally:
        _errors.reset(token)
    if errors:
        raise errors[0]


def watch(rubric: Any) -> None:
    """Let the functions of a rubric, and of all rubrics in it, report their exceptions to
    `raised_reward_errors`."""
    rubric.funcs[:] = [_watched(function, rubric) for function in rubric.funcs]
    for part in getattr(rubric, "rubrics", ()):
        watch(part)
    for environment in getattr(rubric, "env_map", {}).values():
        watch(environment.rubric)


def _watched(function: Callable[..., Any], rubric: Any) -> Callable[..., Any]:
    rates_a_group = rubric._is_group_func(function)

    # verifiers passes what the signature asks for, and inspect.signature() follows `wraps`.
    @functools.wraps(function)
    async def call(*args: Any, **kwargs: Any) -> Any:
        try:
            value = function(*args, **kwargs)
            if inspect.isawaitable(value):
                value = await value
            return value if rates_a_group else float(value)
        except Exception as error:
            errors = _errors.get()
            if errors is not None:
                errors.append(error)
            raise

    return call
