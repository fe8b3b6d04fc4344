"""Calls code of a user or of a model, and lets no error of it out that is none of `Exception`, or
that a future cannot hold."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

ESCAPING = (StopIteration, StopAsyncIteration, SystemExit, KeyboardInterrupt)
"""A future cannot hold the first two: whoever waits for it would wait for ever. The others would
end this process, for example if a program that a model wrote calls `exit()`."""


class CodeStopped(RuntimeError):
    """The code raised one of `ESCAPING`."""

    def __init__(self, error: BaseException) -> None:
        detail = f": {error}" if str(error) not in ("", "None") else ""
        super().__init__(f"{type(error).__name__}{detail}")


def contained(function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Any:
    """The function's value. Raises `CodeStopped`, and any `Exception` of the function."""
    try:
        return function(*arguments, **options)
    except ESCAPING as error:
        raise CodeStopped(error) from error


async def contained_await(work: Awaitable[Any]) -> Any:
    """What `work` yields. Raises as `contained`."""
    try:
        return await work
    except ESCAPING as error:
        raise CodeStopped(error) from error
