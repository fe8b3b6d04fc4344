"""Collects the gradients of one step, adds them up, and keeps them within float16's range.

float16 rounds values below 6e-8 to 0, and gradients of a mean over 100,000 tokens are that small.
So the loss is multiplied by a power of two before the backward pass, and the gradients are divided
by it when they are used: loss scaling (arXiv 1710.03740, section 3.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import structlog
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from grpo_trainer.ranks import Ranks

log = structlog.get_logger()

GROWTH_STEPS = 100
"""The loss scale is doubled after this many steps without overflow."""


def own_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that is divided among ranks (a view); else the tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    if to_local is None:
        return tensor
    with torch.no_grad():
        part: Tensor = to_local()
        return part


class GatheredGradients:
    """Adds up each parameter's gradients over the backward passes of a step.

    The first gradient keeps its data type: in bf16 it takes half the memory and loses nothing,
    because it was computed in bf16. From the second pass on, the sum is in fp32.

    Args:
        parameters: their `.grad` is taken as soon as it is complete
    """

    total: Callable[[Tensor], Tensor] | None = None
    """Adds up a number over all ranks, in place, if each of them holds a part of every gradient."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.tensors: list[Tensor | None] = [None] * len(parameters)
        self._norm: Tensor | None = None
        for index, parameter in enumerate(parameters):
            hook = partial(self._take_over, index)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def norm(self) -> Tensor:
        """L2 norm over all gradients, in fp32: a scalar on their device. Computed once, until the
        gradients change."""
        if self._norm is not None:
            return self._norm
        norms = [
            torch.linalg.vector_norm(gradient, dtype=torch.float32)
            for gradient in self.tensors
            if gradient is not None
        ]
        norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
        self._norm = norm if self.total is None else self.total(norm.square()).sqrt()
        return self._norm

    @torch.no_grad()
    def add_up(self, ranks: Ranks, masters: Sequence[Tensor]) -> None:
        """Add up the gradients of all ranks, in fp32. A parameter may have none on some ranks.

        Args:
            masters: have the gradients' shapes
        """
        self._norm = None
        has = ranks.total(torch.tensor([int(gradient is not None) for gradient in self.tensors]))
        for index, master in enumerate(masters):
            if not has[index]:
                continue
            gradient = self.tensors[index]
            wide = torch.zeros_like(master, dtype=torch.float32)
            if gradient is not None:
                wide.copy_(gradient)
            self.tensors[index] = gradient = None  # frees its memory
            self.tensors[index] = ranks.total(wide)

    def pop(self, index: int) -> Tensor | None:
        """Remove and return a parameter's gradient; None if there is none."""
        gradient, self.tensors[index], self._norm = self.tensors[index], None, None
        return gradient

    def clear(self) -> None:
        """Drop all gradients, so that they can be computed again."""
        self.tensors, self._norm = [None] * len(self.tensors), None

    def _take_over(self, index: int, parameter: Tensor) -> None:
        gradient, parameter.grad, self._norm = parameter.grad, None, None
        assert gradient is not None
        gradient = own_part(gradient)
        previous = self.tensors[index]
        self.tensors[index] = gradient if previous is None else previous.float().add_(gradient)


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
