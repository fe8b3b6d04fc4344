"""Runs environments that were written for other libraries as tasks."""

from __future__ import annotations

from grpo_core.errors import GrpoError
from grpo_env.tasks import TaskOptions


class EnvironmentUnusable(GrpoError):
    """The environment cannot be loaded, or needs something that this task cannot do."""


class EnvironmentLost(GrpoError):
    """The server of the environment ended, or does not answer any more."""


DATA_OPTIONS = ("data", "data_config", "eval_data", "columns", "system_prompt")


def refuse_options(env_id: str, options: TaskOptions, *names: str) -> None:
    """Raises `EnvironmentUnusable` if the user set one of these fields of the options."""
    if given := [name for name in names if getattr(options, name)]:
        typed = ", ".join("--" + name.replace("_", "-") for name in given)
        raise EnvironmentUnusable(
            f"the environment {env_id} has its own prompts; omit {typed}, and use --task-args"
        )
