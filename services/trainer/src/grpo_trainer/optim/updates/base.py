"""What an update rule is, and what takes one master through a step.

A rule (`UpdateRule`) knows Adam's moments and how they are kept; it works on fp32 weights. How
masters are held and rounded is the other half (`MasterUpdate`), so the two combine freely.

Everything happens one parameter at a time: what a step needs beside weights, moments and gradients
is a few times the largest parameter, and a gradient is free as soon as it is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

State = dict[str, Tensor]
"""What a rule remembers of one parameter, by kind; empty before its first step."""

STEP = "step"
"""The kind that counts a parameter's steps: a scalar, float32."""

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8
"""Adam's constants (arXiv 1412.6980, section 2), as in torch and bitsandbytes."""


@dataclass(frozen=True)
class Pace:
    """What all parameters of a step share. `gradient_scale`: at most 1, clips the gradients' norm
    and undoes the loss scale; those that were gathered are without it."""

    lr: float
    weight_decay: float
    gradient_scale: float = 1.0


class UpdateRule(Protocol):
    """AdamW in one way of keeping its moments."""

    def initial_state(self, weights: Tensor) -> State:
        """Before a parameter's first step."""

    def adopted(self, saved: State, weights: Tensor) -> State:
        """A copy of a saved state, every tensor where the rule wants it."""

    def update(self, weights: Tensor, gradient: Tensor, state: State, pace: Pace) -> None:
        """One step, in place, without weight decay: that is added where masters are held.

        Args:
            weights: fp32, contiguous
            gradient: of any floating type; it may be used up
            state: changed as well
        """


class MasterUpdate(Protocol):
    """Takes masters of one data type through a step."""

    dtype: torch.dtype

    def begin(self, step: int) -> None:
        """The step with this index, counted from 0, comes next."""

    def initial_state(self, master: Tensor) -> State: ...

    def adopted(self, saved: State, master: Tensor) -> State: ...

    def take(
        self, master: Tensor, gradient: Tensor, state: State, pace: Pace, served: torch.dtype
    ) -> Tensor | None:
        """One step of one master, in place.

        Args:
            served: data type of the parameter that the master stands behind
        Returns:
            The new master rounded to the nearest `served`, where that cost nothing more; else None.
        """
