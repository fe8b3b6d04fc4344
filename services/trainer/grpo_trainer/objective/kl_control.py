"""Control of the KL penalty's coefficient by the divergence from the reference model."""

from __future__ import annotations

import math
from dataclasses import dataclass

from grpo_trainer.objectives import KlControlName

ADAPTIVE_ERROR = 0.2
BAND, BAND_FACTOR = (0.8, 1.2), 1.5
DUAL_RATE = 0.1
LEAST, MOST = 0.001, 0.2
"""Bounds of a coefficient under band and dual control."""
_MOST_ERROR = 1000.0
"""Below the overflow of exp."""


@dataclass
class KlCoefficient:
    """The penalty's coefficient, `value`, which each step's divergence may change.

    - fixed: it stays.
    - adaptive: it grows or shrinks in proportion to the distance from the target, by at most a
      fifth of the sequences over the horizon (Ziegler et al., arXiv 1909.08593, section 2.2).
    - band: it is multiplied by 1.5 above 1.2 times the target, and divided by 1.5 below 0.8 times
      the target (as in PPO, arXiv 1707.06347, section 4).
    - dual: gradient ascent on the logarithm of the multiplier of the constraint that the divergence
      is at most the target (arXiv 2007.03964, section 3).

    Band and dual stay in [0.001, 0.2], widened by the first value.

    Args:
        initial: its first value
        target: mean divergence per token; unused if fixed
        horizon: sequences over which an adaptive coefficient follows the divergence
    """

    control: KlControlName
    initial: float
    target: float
    horizon: int

    def __post_init__(self) -> None:
        self.value = self.initial

    @property
    def to_save(self) -> float | None:
        """What a checkpoint needs: None if the value does not change."""
        return None if self.control == "fixed" or not self.initial else self.value

    def resume(self, saved: float | None) -> None:
        """Args: saved: the checkpoint's value, which a fixed coefficient ignores"""
        if self.control != "fixed" and saved is not None:
            self.value = saved

    def observe(self, divergence: float, sequences: int) -> None:
        """Args: divergence: mean of a step's sequences"""
        if self.control == "fixed":
            return
        ratio = divergence / self.target
        if self.control == "adaptive":
            share = min(1.0, sequences / self.horizon)
            self.value *= 1 + share * min(ADAPTIVE_ERROR, max(-ADAPTIVE_ERROR, ratio - 1))
            return
        if self.control == "dual":
            factor = math.exp(DUAL_RATE * min(ratio - 1, _MOST_ERROR))
        else:
            factor = BAND_FACTOR ** ((ratio > BAND[1]) - (ratio < BAND[0]))
        least, most = min(LEAST, self.initial), max(MOST, self.initial)
        self.value = min(most, max(least, self.value * factor))
