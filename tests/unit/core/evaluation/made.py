"""Evaluations for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_core.evaluation.results import EvalItem, EvalResult


def item(name: str, *rewards: float, task: str = "gsm8k", **parts: Sequence[float]) -> EvalItem:
    """Answers of 10, 20, ... tokens; the last one is cut off."""
    n = len(rewards)
    return EvalItem.graded(
        task,
        name,
        rewards,
        [{key: values[i] for key, values in parts.items()} for i in range(n)],
        lengths=[10 * (i + 1) for i in range(n)],
        truncated=[i == n - 1 for i in range(n)],
    )


def result(items: Sequence[EvalItem], **given: Any) -> EvalResult:
    facts = {"task": "gsm8k", "temperature": 0.7, "duration_s": 12.5}
    return EvalResult.of(items, **{**facts, **given})
