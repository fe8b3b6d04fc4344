"""The tasks that `env-server TASK` offers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

from grpo_env.config.settings import EnvServerSettings, TaskName
from grpo_env.grading.math_grader import MathGrader
from grpo_env.tasks import Task
from grpo_env.tasks.arithmetic import Arithmetic
from grpo_env.tasks.gsm8k import Gsm8k
from grpo_env.tasks.gsm8k_data import DEFAULT_CONFIG, DEFAULT_DATA, read_problems


@contextmanager
def gsm8k(settings: EnvServerSettings) -> Iterator[Task]:
    problems = read_problems(
        settings.data or DEFAULT_DATA, settings.data_config or DEFAULT_CONFIG, split="train"
    )
    with MathGrader() as grader:
        yield Gsm8k(problems, settings.seed, grader.is_equal, settings.format_reward)


TASKS: Mapping[TaskName, Callable[[EnvServerSettings], AbstractContextManager[Task]]] = {
    "arithmetic": lambda settings: nullcontext(Arithmetic(settings.seed)),
    "gsm8k": gsm8k,
}
"""Name → context manager that opens and closes the task. Opening raises a `GrpoError` if the task's
data or libraries are missing."""
