"""Masters of the policy's weights: in fp32, or in bf16 with stochastic rounding.

bf16 is the upper half of fp32's bits. Between two neighbouring bf16 numbers the lower 16 bits count
evenly from the one nearer to 0 to the other, so adding a uniform 16-bit number before they are cut
off reaches the farther one with a probability that equals the distance to the nearer one: the
expectation is the fp32 number itself (stochastic rounding: Gupta et al. 2015, arXiv 1502.02551,
section 3).
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_trainer.optim.adamw import State, StepOptions, UpdateRule

LOWER_BITS = 16
CHUNK_ELEMENTS = 1 << 24
"""Rounded at a time: what it takes beside the weights is three times 64 MiB."""


@dataclass(eq=False)
class Masters:
    """Takes masters of one data type through a step.

    In fp32 every update counts, however small. bf16 takes half the memory: the update is computed
    in fp32 and its result rounded. Stochastically, an update smaller than what bf16 resolves
    changes a part of the weights by more, and the mean is right; to the nearest, it is lost.

    Decoupled weight decay (arXiv 1711.05101, algorithm 2) is added to the rule's update, and both
    at once to the weights. Libraries multiply by 1 - lr * weight decay first, which changes nothing
    where that product is below 6e-8: fp32 rounds the factor to 1.

    Args:
        dtype: float32 or bfloat16
        rounding: to bfloat16; None: to the nearest
    """

    rule: UpdateRule
    dtype: torch.dtype = torch.float32
    rounding: StochasticRounding | None = None

    def begin_step(self, step: int) -> None:
        """The step with this index, counted from 0, comes next."""
        if self.rounding is not None:
            self.rounding.begin_step(step)

    def initial_state(self, master: Tensor) -> State:
        return self.rule.initial_state(master)

    def restored(self, saved: State, master: Tensor) -> State:
        return self.rule.restored(saved, master)

    def step(
        self,
        master: Tensor,
        gradient: Tensor,
        state: State,
        options: StepOptions,
        served: torch.dtype,  # noqa: ARG002
    ) -> Tensor | None:
        """One step of one master, in place.

        Args:
            served: data type of the parameter that the master stands behind
        Returns:
            The new master rounded to the nearest `served`, if that cost nothing more; else None.
        """
        wide = master.float()  # fp32 masters themselves
        self._update(wide, gradient, state, options)
        if self.rounding is not None:
            self.rounding.round_into(master, wide)
        elif wide is not master:
            master.copy_(wide)
        return None

    def _update(
        self, weights: Tensor, gradient: Tensor, state: State, options: StepOptions
    ) -> None:
        """Args: weights: fp32, changed in place."""
        decay = options.lr * options.weight_decay
        if decay == 0:
            self.rule.update(weights, gradient, state, options)
            return
        change = torch.zeros_like(weights)
        self.rule.update(change, gradient, state, options)
        weights.add_(change.sub_(weights, alpha=decay))


class StochasticRounding:
    """Either neighbour. The random numbers of a step follow from `seed` and its index alone, so a
    run that goes on from a saved state draws what it would have drawn, and no state has to hold
    them.

    Args:
        device: of the weights
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._generator = torch.Generator(device)

    def begin_step(self, step: int) -> None:
        # Through a hash: neighbouring seeds and steps are to have nothing in common.
        self._generator.manual_seed(random.Random(f"{self._seed}/{step}").getrandbits(63))

    def round_into(self, target: Tensor, wide: Tensor) -> None:
        """Args: target: bf16; wide: fp32 of the same shape; both contiguous."""
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
