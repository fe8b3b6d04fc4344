"""The learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from grpo_core.tree.optim import OptimizerOptions, ScheduleName

LearningRate = Callable[[int], float]
"""The learning rate of the step with this index, counted from 0."""


@dataclass(frozen=True)
class Schedule:
    """Grows linearly to `peak` over `warmup_steps` steps. Then it stays there (constant), or falls
    to 0 over the steps that are left, along a line or half a cosine (arXiv 1608.03983, equation 5).
    """

    name: ScheduleName
    peak: float
    warmup_steps: int
    steps: int

    @classmethod
    def of(cls, options: OptimizerOptions, steps: int) -> Schedule:
        """Args: steps: of the run"""
        warmup_steps = options.warmup_steps or math.ceil(round(options.warmup_ratio * steps, 6))
        return cls(options.lr_schedule, options.lr, warmup_steps, steps)

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.name == "constant":
            return self.peak
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        if self.name == "linear":
            return self.peak * (1 - done)
        return self.peak * (1 + math.cos(math.pi * done)) / 2
