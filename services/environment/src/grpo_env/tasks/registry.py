"""The tasks that `env-server TASK` offers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

from grpo_env.config.settings import EnvSettings, TaskName
from grpo_env.tasks import Task
from grpo_env.tasks.arithmetic import Arithmetic
from grpo_env.tasks.gsm8k import Gsm8k
from grpo_env.tasks.gsm8k_data import DEFAULT_CONFIG, DEFAULT_DATA, read_problems
from grpo_env.tasks.math_grader import MathGrader


@contextmanager
def gsm8k(env: EnvSettings) -> Iterator[Task]:
    problems = read_problems(
        env.data or DEFAULT_DATA, env.data_config or DEFAULT_CONFIG, split="train"
    )
    with MathGrader() as grader:
        yield Gsm8k(problems, env.seed, grader.is_equal, env.format_reward)


TASKS: Mapping[TaskName, Callable[[EnvSettings], AbstractContextManager[Task]]] = {
    "arithmetic": lambda env: nullcontext(Arithmetic(env.seed)),
    "gsm8k": gsm8k,
}
"""Name → context manager that opens and closes the task. Opening raises a `GrpoError` if the task's
data or libraries are missing."""
