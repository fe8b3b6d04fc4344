"""AdamW with fp32 moments, as torch computes it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from grpo_trainer.optim.updates.base import BETA1, BETA2, EPS, STEP, Pace, State

EXP_AVG, EXP_AVG_SQ = "exp_avg", "exp_avg_sq"


class AdamW32:
    """AdamW (arXiv 1711.05101, algorithm 2) with both moments in fp32, whatever the masters are in.

    A second moment in bf16 would stop following its gradients: a step moves it by one part in a
    thousand, and bf16 resolves four.

    Args:
        fused: one kernel reads and writes everything (torch's own); made for GPUs
    """

    def __init__(self, fused: bool = False) -> None:
        self._fused = fused

    def initial_state(self, weights: Tensor) -> State:
        return {
            STEP: torch.zeros((), device=self._place_of_step(weights)),
            EXP_AVG: torch.zeros_like(weights, dtype=torch.float32),
            EXP_AVG_SQ: torch.zeros_like(weights, dtype=torch.float32),
        }

    def adopted(self, saved: State, weights: Tensor) -> State:
        moved = {kind: tensor.to(weights.device, copy=True) for kind, tensor in saved.items()}
        return moved | {STEP: saved[STEP].to(self._place_of_step(weights), copy=True)}

    def update(self, weights: Tensor, gradient: Tensor, state: State, pace: Pace) -> None:
        adamw(
            [weights],
            [_scaled(gradient, pace.gradient_scale)],
            [state[EXP_AVG]],
            [state[EXP_AVG_SQ]],
            [],
            [state[STEP]],
            foreach=False,
            fused=self._fused,
            amsgrad=False,
            beta1=BETA1,
            beta2=BETA2,
            lr=pace.lr,
            weight_decay=0.0,  # `masters` adds it
            eps=EPS,
            maximize=False,
        )

    def _place_of_step(self, weights: Tensor) -> torch.device:
        """The fused kernel reads the count itself; else Python does and must not wait for a GPU."""
        return weights.device if self._fused else torch.device("cpu")


def _scaled(gradient: Tensor, scale: float) -> Tensor:
    wide = gradient.float()
    return wide if scale == 1.0 else wide.mul_(scale)
