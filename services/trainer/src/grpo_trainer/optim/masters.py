"""Masters in fp32, which any rule updates in place, and in bf16, which are widened for it.

bf16 is the upper half of fp32's bits. Between two neighbouring bf16 numbers the lower 16 bits count
evenly from the one nearer to 0 to the other, so adding a uniform 16-bit number before they are cut
off reaches the farther one with a probability that equals the distance to the nearer one: the
expectation is the fp32 number itself (stochastic rounding: Gupta et al. 2015, arXiv 1502.02551,
section 3).
"""

from __future__ import annotations

import random
from typing import Protocol

import torch
from torch import Tensor

from grpo_trainer.optim.adamw import Pace, State, UpdateRule

LOWER_BITS = 16
CHUNK_ELEMENTS = 1 << 24
"""Rounded at a time: what it takes beside the weights is three times 64 MiB."""


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


class Rounding(Protocol):
    """Puts fp32 numbers into bf16 ones."""

    def begin(self, step: int) -> None:
        """The step with this index, counted from 0, comes next."""

    def round_into(self, target: Tensor, wide: Tensor) -> None:
        """Args: target: bf16; wide: fp32 of the same shape; both contiguous."""


class Nearest:
    """The nearer neighbour; of two equally near ones that with an even last bit."""

    def begin(self, step: int) -> None:
        pass

    def round_into(self, target: Tensor, wide: Tensor) -> None:
        target.copy_(wide)


class Stochastic:
    """Either neighbour. The random numbers of a step follow from `seed` and its index alone, so a
    run that goes on from a saved state draws what it would have drawn, and no state has to hold
    them.

    Args:
        device: of the weights
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._generator = torch.Generator(device)

    def begin(self, step: int) -> None:
        # Through a hash: neighbouring seeds and steps are to have nothing in common.
        self._generator.manual_seed(random.Random(f"{self._seed}/{step}").getrandbits(63))

    def round_into(self, target: Tensor, wide: Tensor) -> None:
        for low, high in zip(_chunks(target), _chunks(wide), strict=True):
            low.copy_(self._rounded(high))

    def _rounded(self, wide: Tensor) -> Tensor:
        """Numbers that bf16 can hold, still in fp32. Infinities have no lower bits, and stay; a
        NaN might be carried into a number, so it is kept aside."""
        noise = torch.empty_like(wide, dtype=torch.int32)
        noise.random_(0, 1 << LOWER_BITS, generator=self._generator)
        bits = noise.add_(wide.view(torch.int32)).bitwise_and_(-(1 << LOWER_BITS))
        return torch.where(wide.isnan(), wide, bits.view(torch.float32))


def _chunks(tensor: Tensor) -> tuple[Tensor, ...]:
    return torch.split(tensor.view(-1), CHUNK_ELEMENTS)
