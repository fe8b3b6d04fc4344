"""Runs rewards and tools in a process of its own, in the main thread: as `signal.alarm` needs it.

The code of a user may hold the interpreter's lock for minutes, for example in a slow regular
expression, or end its process: that must be another process than the one that serves the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import io
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType
from typing import Any, TypeVar

from grpo_core.errors import GrpoError
from grpo_core.process import end_with_parent
from grpo_env.loading import specs_from
from grpo_env.tasks import Answer, Row, Task
from grpo_env.tasks.rewards import graded_of
from grpo_env.tasks.tools import contained

T = TypeVar("T")
TASKS_VARIABLE = "GRPO_REWARD_TASKS"
"""Holds the tasks to load while the process that forks the workers starts."""


class UserCodeFailed(Exception):
    """An error of a task's code, which other processes can read.

    kind: name of the error; place: file and line that raised it; trace: its traceback.
    """

    def __init__(self, kind: str, text: str, place: str = "", trace: str = "") -> None:
        super().__init__(kind, text, place, trace)
        self.kind, self.text, self.place, self.trace = kind, text, place, trace

    def __str__(self) -> str:
        return self.text

    @classmethod
    def of(cls, error: BaseException) -> UserCodeFailed:
        if isinstance(error, UserCodeFailed):
            return error
        frames = traceback.extract_tb(error.__traceback__)
        return cls(
            kind=type(error).__name__,
            text=str(error),
            place=f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "",
            trace="".join(traceback.format_exception(error)),
        )


class _Loaded:
    text = ""
    tasks: Mapping[str, Task]


def load(text: str) -> None:
    """Make the tasks that `specs_from` reads from the text. Raises the errors of their code."""
    if text != _Loaded.text:
        tasks = [spec.make() for spec in specs_from(text)]
        _Loaded.tasks, _Loaded.text = {task.name: task for task in tasks}, text


def begin(text: str) -> None:
    """Prepare a worker, outside the deadline of any call. An error of the tasks' code is raised
    again by the first call."""
    os.setsid()  # the programs that a call starts end with it
    end_with_parent()
    signal.signal(signal.SIGTERM, _end_session)
    with contextlib.suppress(Exception):
        contained(load, text)


def _end_session(_number: int, _frame: FrameType | None) -> None:
    os.killpg(0, signal.SIGKILL)


def reward(text: str, task: str, answer: Answer, row: Row) -> Any:
    """What the task's reward returns, as `graded_of` reads it here, where its libraries are
    imported; or a `UserCodeFailed`. Raises `GrpoError` as the reward does."""
    return _outcome(text, lambda: _Loaded.tasks[task].reward(answer, row), graded_of)


def tool(text: str, task: str, name: str, arguments: Mapping[str, Any]) -> Any:
    """What the tool returns, or a `UserCodeFailed`."""

    def call() -> Any:
        for function in _Loaded.tasks[task].tools:
            if callable(function) and function.__name__ == name:
                return function(**arguments)
        raise LookupError(name)

    return _outcome(text, call, lambda value: value)


def _outcome(text: str, call: Callable[[], Any], read: Callable[[Any], Any]) -> Any:
    try:
        contained(load, text)
        value = contained(call)
        if inspect.isawaitable(value):
            value = contained(asyncio.run, _awaited(value))
        return _portable(read(value))
    except GrpoError as error:
        raise _portable(error) from None
    except Exception as error:  # noqa: BLE001 - code of a user
        return UserCodeFailed.of(error)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # it would end this process later


def _portable(value: T) -> T:
    """The value, which another process can read: any other one would break the pool. Raises the
    errors of pickle."""
    pickle.loads(pickle.dumps(value))
    return value


async def _awaited(value: Any) -> Any:
    return await value


def _say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The error of a worker that does not start; nothing if the environment ended meanwhile."""
    if not issubclass(kind, FileNotFoundError | ConnectionError | EOFError):
        sys.__excepthook__(kind, error, trace)


if _text := os.environ.pop(TASKS_VARIABLE, ""):
    sys.excepthook = _say
    # Printed already when the environment loaded the task. An error is raised again in a worker.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(BaseException):
        load(_text)
