"""Rewards of the tests."""

from __future__ import annotations

from typing import Any

from grpo_env.tasks import Graded


def length(answer: Any, row: dict[str, Any]) -> float:
    """Completions of a random model differ in this."""
    return (sum(map(ord, answer)) % 7) / 7 + row["bonus"]


def equal(_answer: Any, _row: dict[str, Any]) -> float:
    return 0.5


def by_step(answer: Any, row: dict[str, Any]) -> Graded:
    """With what a reward is told of the run."""
    return Graded(
        {"length": length(answer, row)}, metrics={"step": answer.step, "steps": answer.steps}
    )


def failing(answer: Any, row: dict[str, Any]) -> float:
    raise ValueError(f"no reward for {answer} to {row}")
