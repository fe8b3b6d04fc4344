"""Control of the KL penalty's coefficient by the divergence from the reference model."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_trainer.objectives import KlControlName

ADAPTIVE_ERROR = 0.2


@dataclass
class KlCoefficient:
    """The penalty's coefficient, `value`, which each step's divergence may change.

    - fixed: it stays.
    - adaptive: it grows or shrinks in proportion to the distance from the target, by at most a
      fifth of the sequences over the horizon (Ziegler et al., arXiv 1909.08593, section 2.2).

    Args:
        initial: its first value
        target: mean divergence per token; unused if fixed
        horizon: sequences over which an adaptive coefficient follows the divergence; unused if
            fixed
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
        share = min(1.0, sequences / self.horizon)
        error = min(ADAPTIVE_ERROR, max(-ADAPTIVE_ERROR, divergence / self.target - 1))
        self.value *= 1 + share * error
