"""Masters in fp32, which any rule updates in place, and in bf16, which are widened for it."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_trainer.optim.updates.base import Pace, State, UpdateRule
from grpo_trainer.optim.updates.rounding import Rounding


class _MastersOfRule:
    """What a parameter's state is, the rule alone decides.

    Decoupled weight decay (arXiv 1711.05101, algorithm 2) is added to the rule's update, and both
    at once to the weights. Libraries multiply by 1 - lr * weight decay first, which changes nothing
    where that product is below 6e-8: fp32 rounds the factor to 1.
    """

    def __init__(self, rule: UpdateRule) -> None:
        self._rule = rule

    def initial_state(self, master: Tensor) -> State:
        return self._rule.initial_state(master)

    def adopted(self, saved: State, master: Tensor) -> State:
        return self._rule.adopted(saved, master)

    def _step(self, weights: Tensor, gradient: Tensor, state: State, pace: Pace) -> None:
        """Args: weights: fp32, changed in place."""
        decay = pace.lr * pace.weight_decay
        if decay == 0:
            self._rule.update(weights, gradient, state, pace)
            return
        change = torch.zeros_like(weights)
        self._rule.update(change, gradient, state, pace)
        weights.add_(change.sub_(weights, alpha=decay))


class Float32Masters(_MastersOfRule):
    """Every update counts, however small."""

    dtype = torch.float32

    def begin(self, step: int) -> None:
        pass

    def take(
        self,
        master: Tensor,
        gradient: Tensor,
        state: State,
        pace: Pace,
        served: torch.dtype,  # noqa: ARG002
    ) -> None:
        self._step(master, gradient, state, pace)


class Bfloat16Masters(_MastersOfRule):
    """Half the memory. The update is computed in fp32 and its result rounded: stochastically, an
    update smaller than what bf16 resolves changes a part of the weights by more, and the mean is
    right; to the nearest, it is lost."""

    dtype = torch.bfloat16

    def __init__(self, rule: UpdateRule, rounding: Rounding) -> None:
        super().__init__(rule)
        self._rounding = rounding

    def begin(self, step: int) -> None:
        self._rounding.begin(step)

    def take(
        self,
        master: Tensor,
        gradient: Tensor,
        state: State,
        pace: Pace,
        served: torch.dtype,  # noqa: ARG002
    ) -> None:
        wide = master.float()
        self._step(wide, gradient, state, pace)
        self._rounding.round_into(master, wide)
