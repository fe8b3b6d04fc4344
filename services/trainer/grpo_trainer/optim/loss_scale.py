"""Keeps gradients within float16's range.

float16 rounds values below 6e-8 to 0, and gradients of a mean over 100,000 tokens are that small.
So the loss is multiplied by a power of two before the backward pass, and the gradients are divided
by it when they are used: loss scaling (arXiv 1710.03740, section 3.2).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import structlog
from pydantic import BaseModel, ConfigDict, Field

from grpo_trainer.optim.gradients import Gradients

log = structlog.get_logger()

GROWTH_STEPS = 100
"""The loss scale is doubled after this many steps without overflow."""


class ScaleRecord(BaseModel):
    """A loss scale in a checkpoint. `good_steps`: steps since it was last changed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    value: float = Field(2.0**16, ge=1)
    good_steps: int = Field(0, ge=0)


class LossScale:
    """Args: gradients: collects the gradients of a backward pass, multiplied by the scale."""

    def __init__(self, gradients: Gradients) -> None:
        self._gradients = gradients
        self.record = ScaleRecord()

    @property
    def value(self) -> float:
        return self.record.value

    def attempts(self) -> Iterator[float]:
        """The scales to collect a batch's gradients with, until these are finite: the current one,
        then half of it, and so on.

        If they are not finite even at 1, the batch is the cause: the scale is restored, and
        `MasterOptimizer.gradient_norm` raises.
        """
        before = self.record
        yield self.value
        while not math.isfinite(self._gradients.norm()):
            if self.value == 1:
                self.record = before
                return
            self._gradients.clear()
            self.record = ScaleRecord(value=self.value / 2)
            log.info(
                "loss_scale.halved", scale=self.value, reason="the gradients overflowed float16"
            )
            yield self.value

    def step_taken(self) -> None:
        steps = self.record.good_steps + 1
        grows = steps == GROWTH_STEPS
        self.record = (
            ScaleRecord(value=2 * self.value)
            if grows
            else ScaleRecord(value=self.value, good_steps=steps)
        )
