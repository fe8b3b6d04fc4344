"""Collects the gradients of one step, adds them up, and keeps them within float16's range.

float16 rounds values below 6e-8 to 0, and gradients of a mean over 100,000 tokens are that small.
So the loss is multiplied by a power of two before the backward pass, and the gradients are divided
by it when they are used: loss scaling (arXiv 1710.03740, section 3.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import structlog
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from grpo_trainer.optim.buckets import Bucket, in_order
from grpo_trainer.ranks import Ranks

log = structlog.get_logger()

GROWTH_STEPS = 100
"""The loss scale is doubled after this many steps without overflow."""


class GatheredGradients:
    """The gradients of a step, added up over its backward passes."""

    total: Callable[[Tensor], Tensor] | None = None
    """Adds up a number over all ranks, in place, if each of them holds a part of every gradient."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets
        self._norm: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor | None]:
        """Of each parameter: views."""
        return in_order(self._buckets, Bucket.gradients)

    def gather(self) -> None:
        """Take the gradients from the parameters; between two backward passes, so that their sum is
        in fp32."""
        for bucket in self._buckets:
            if bucket.gather():
                self._norm = None

    def norm(self) -> Tensor:
        """L2 norm over all gradients, in fp32: a scalar on their device. Computed once, until the
        gradients change."""
        if self._norm is not None:
            return self._norm
        norms = [bucket.row_norms() for bucket in self._buckets if bucket.gradient is not None]
        norm = torch.linalg.vector_norm(torch.cat(norms)) if norms else torch.zeros(())
        self._norm = norm if self.total is None else self.total(norm.square()).sqrt()
        return self._norm

    @torch.no_grad()
    def add_up(self, ranks: Ranks) -> None:
        """Add up the gradients of all ranks, in fp32. A parameter may have none on some ranks."""
        self._norm = None
        for bucket in self._buckets:
            has = ranks.total(torch.tensor(bucket.has_gradient, dtype=torch.int64))
            bucket.add_up(ranks.total, has.bool().tolist())

    def clear(self) -> None:
        """Drop all gradients, so that they can be computed again."""
        self._norm = None
        for bucket in self._buckets:
            bucket.clear()


class ScaleRecord(BaseModel):
    """A loss scale in a checkpoint. `good_steps`: steps since it was last changed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    value: float = Field(2.0**16, ge=1)
    good_steps: int = Field(0, ge=0)


class LossScale:
    """Args: gradients: collects the gradients of a backward pass, multiplied by the scale."""

    def __init__(self, gradients: GatheredGradients) -> None:
        self._gradients = gradients
        self.record = ScaleRecord()

    @property
    def value(self) -> float:
        return self.record.value

    def attempts(self) -> Iterator[float]:
        """The scales to collect a batch's gradients with, until these are finite: the current one,
        then half of it, and so on.

        If they are not finite even at 1, the batch is the cause: the scale is restored, and the
        next optimizer step refuses the gradients.
        """
        before = self.record
        yield self.value
        while not math.isfinite(float(self._gradients.norm())):
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
