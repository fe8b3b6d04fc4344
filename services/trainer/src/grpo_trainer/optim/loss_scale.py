"""Keeps gradients that are computed in float16 within its range.

Below 6e-8 float16 holds nothing but 0, and gradients of a loss that is a mean over 100,000 tokens
are as small. So the loss is multiplied by a power of two before the backward pass, and the
gradients are divided by it where they are used: loss scaling (arXiv 1710.03740, section 3.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import structlog
from pydantic import BaseModel, ConfigDict, Field

from grpo_trainer.optim.gathered_gradients import GatheredGradients

log = structlog.get_logger()

GROWTH_STEPS = 100
"""Steps in a row without overflow after which the scale is doubled."""
T = TypeVar("T")


class ScaleRecord(BaseModel):
    """A saved scale. `good_steps`: since it was changed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    value: float = Field(2.0**16, ge=1)
    good_steps: int = Field(0, ge=0)


class LossScale:
    """Args: gradients: where those of a backward pass are gathered, multiplied by the scale."""

    def __init__(self, gradients: GatheredGradients) -> None:
        self._gradients = gradients
        self.record = ScaleRecord()

    @property
    def value(self) -> float:
        return self.record.value

    def without_overflow(self, backward: Callable[[float], T]) -> T:
        """What `backward`, which gathers a batch's gradients at the scale that it is given, returns
        at the largest scale, of this one and its halves, at which they are finite.

        If they are at none, not even at 1, the batch is to blame: the scale stays, and with it the
        gradients, which a step refuses.
        """
        before = self.record
        while True:
            found = backward(self.value)
            if math.isfinite(float(self._gradients.norm())):
                return found
            if self.value == 1:
                self.record = before
                return found
            self._gradients.clear()
            self.record = ScaleRecord(value=self.value / 2)
            log.info("loss_scale.halved", scale=self.value, reason="float16 overflowed")

    def step_taken(self) -> None:
        steps = self.record.good_steps + 1
        grows = steps == GROWTH_STEPS
        self.record = (
            ScaleRecord(value=2 * self.value)
            if grows
            else ScaleRecord(value=self.value, good_steps=steps)
        )
