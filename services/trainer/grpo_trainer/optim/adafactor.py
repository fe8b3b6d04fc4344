"""Adafactor's update rule: one second moment per row and per column, and no first moment."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim._adafactor import adafactor

from grpo_trainer.optim.adamw import STEP, State, StepOptions, UpdateRule, scaled

ROW, COLUMN, VECTOR = "row_var", "col_var", "variance"
BETA2_DECAY = -0.8
MAX_UPDATE_RMS = 1.0
"""The paper's section 6: β2 of step t is 1 - t^-0.8, and larger updates are scaled down."""
EPS1 = 1e-15
"""torch squares it, and 1e-30 is the paper's smallest second moment."""
_RELATIVE_LR = 2.0**-40
_NO_DECAY = 0.0
"""The module `masters` adds weight decay."""


class Adafactor(UpdateRule):
    """Adafactor (arXiv 1804.04235, algorithms 4 and 5) in fp32. The step size is the learning rate
    itself, not a fraction of the weights' size.

    Kinds of state: step; row_var and col_var in matrices; variance in vectors.
    """

    def initial_state(self, weights: Tensor) -> State:
        shape, device = weights.shape, weights.device
        if weights.dim() < 2:
            moments = {VECTOR: torch.zeros(shape, device=device)}
        else:
            moments = {
                ROW: torch.zeros((*shape[:-1], 1), device=device),
                COLUMN: torch.zeros((*shape[:-2], 1, shape[-1]), device=device),
            }
        return {STEP: torch.zeros(()), **moments}

    def update(self, weights: Tensor, gradient: Tensor, state: State, options: StepOptions) -> None:
        adafactor(
            [weights],
            [scaled(gradient, options.gradient_scale)],
            [state.get(ROW)],
            [state.get(COLUMN)],
            [state.get(VECTOR)],
            [state[STEP]],
            d=MAX_UPDATE_RMS,
            # torch's step size is min(lr, 1 / sqrt(step)) times the RMS of the weights, or times
            # eps2 if that is larger. With these two values the step size is the learning rate.
            lr=_RELATIVE_LR,
            eps2=options.lr / _RELATIVE_LR,
            beta2_decay=BETA2_DECAY,
            weight_decay=_NO_DECAY,
            eps1=EPS1,
            maximize=False,
        )
