"""The gradients of one step: taken over as they appear, added up, and kept within float16's range.

Below 6e-8 float16 holds nothing but 0, and gradients of a loss that is a mean over 100,000 tokens
are as small. So the loss is multiplied by a power of two before the backward pass, and the
gradients are divided by it where they are used: loss scaling (arXiv 1710.03740, section 3.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import structlog
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

log = structlog.get_logger()

GROWTH_STEPS = 100
"""Steps in a row without overflow after which the scale is doubled."""
T = TypeVar("T")


class GatheredGradients:
    """A parameter's gradient is gathered in fp32 from the second backward pass on. The first one is
    kept as it came, which in bf16 is half as large and loses nothing: it was computed in bf16.

    Args:
        parameters: each gives up its `.grad` as soon as that is complete
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.tensors: list[Tensor | None] = [None] * len(parameters)
        for index, parameter in enumerate(parameters):
            hook = partial(self._take_over, index)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def norm(self) -> Tensor:
        """L2 norm over all of them, in fp32: a scalar where they are."""
        norms = [
            torch.linalg.vector_norm(gradient, dtype=torch.float32)
            for gradient in self.tensors
            if gradient is not None
        ]
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())

    def pop(self, index: int) -> Tensor | None:
        """That of a parameter, which is the caller's from now on; None where there was none."""
        gradient, self.tensors[index] = self.tensors[index], None
        return gradient

    def clear(self) -> None:
        """Forget what was gathered: it is computed again."""
        self.tensors = [None] * len(self.tensors)

    def _take_over(self, index: int, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        held = self.tensors[index]
        self.tensors[index] = gradient if held is None else held.float().add_(gradient)


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
