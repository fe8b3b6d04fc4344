"""The tasks that the command line can name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from grpo_env.settings import TaskName
from grpo_env.tasks import Task
from grpo_env.tasks.arithmetic import Arithmetic

TASKS: Mapping[TaskName, Callable[[int], Task]] = {"arithmetic": Arithmetic}
"""Name → constructor that takes the seed."""


def build_task(name: TaskName, seed: int) -> Task:
    return TASKS[name](seed)
