"""Masters in fp32, which any rule updates in place, and in bf16, which are widened for it."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_trainer.updates.base import Pace, State, UpdateRule
from grpo_trainer.updates.rounding import Rounding


class _MastersOfRule:
    """What a parameter's state is, the rule alone decides."""

    def __init__(self, rule: UpdateRule) -> None:
        self._rule = rule

    def initial_state(self, master: Tensor) -> State:
        return self._rule.initial_state(master)

    def adopted(self, saved: State, master: Tensor) -> State:
        return self._rule.adopted(saved, master)


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
        self._rule.update(master, gradient, state, pace)


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
        self._rule.update(wide, gradient, state, pace)
        self._rounding.round_into(master, wide)
