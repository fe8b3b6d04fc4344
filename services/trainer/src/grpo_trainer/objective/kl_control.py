"""Control of the KL penalty's coefficient by the divergence from the reference model."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_trainer.objective.recipes import KlControlName

ADAPTIVE_ERROR = 0.2
BAND = 1.5
BAND_DEPTH = 64


@dataclass
class KlCoefficient:
    """The penalty's coefficient, `value`, which each step's divergence may change.

    - fixed: it stays.
    - adaptive: it grows or shrinks in proportion to the distance from the target, by at most a
      fifth of the sequences over the horizon (Ziegler et al., arXiv 1909.08593, section 2.2).
    - band: it is doubled above 1.5 times the target, and halved below the target divided by 1.5
      (PPO, arXiv 1707.06347, section 4), at least 1/64 of its first value: unlike PPO's, this
      divergence begins at 0.
    - dual: gradient ascent on the multiplier of the constraint that the divergence is at most the
      target (arXiv 2007.03964, section 3). It can reach 0 and return.

    Args:
        initial: its first value
        target: mean divergence per token; unused if fixed
        horizon: sequences over which an adaptive or dual coefficient follows the divergence
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
        error = divergence / self.target - 1
        share = min(1.0, sequences / self.horizon)
        if self.control == "adaptive":
            self.value *= 1 + share * min(ADAPTIVE_ERROR, max(-ADAPTIVE_ERROR, error))
        elif self.control == "dual":
            self.value = max(0.0, self.value + self.initial * share * error)
        elif divergence > BAND * self.target:
            self.value *= 2
        elif divergence < self.target / BAND:
            self.value = max(self.value / 2, self.initial / BAND_DEPTH)
