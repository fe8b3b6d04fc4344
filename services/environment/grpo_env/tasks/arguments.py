"""Checks the arguments that a user gives to a task with `--task-args`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def checked_arguments(
    task: str, given: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """The task's defaults, replaced by what the user has given.

    Raises:
        ValueError: an argument that the task does not have.
    """
    unknown = sorted(set(given) - set(defaults))
    if unknown:
        raise ValueError(
            f"--task-args: {task} has no argument {', '.join(unknown)}; it has "
            f"{', '.join(defaults)}"
        )
    return {**defaults, **given}
