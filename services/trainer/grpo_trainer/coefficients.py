"""Control of an objective's coefficients: the KL penalty's weight follows the divergence from the
reference model, and MaxEnt-GRPO's tau the entropy of the weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

from grpo_core.tree.objective import ObjectiveOptions
from grpo_core.tree.objectives import KlControlName

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
        """Take the checkpoint's value, which a fixed coefficient ignores."""
        if self.control != "fixed" and saved is not None:
            self.value = saved

    def observe(self, divergence: float, sequences: int) -> None:
        """Follow the mean divergence of a step's sequences."""
        if self.control == "fixed":
            return
        share = min(1.0, sequences / self.horizon)
        error = min(ADAPTIVE_ERROR, max(-ADAPTIVE_ERROR, divergence / self.target - 1))
        self.value *= 1 + share * error


LEAST_TAU, MOST_TAU = 0.001, 10.0
_KEPT = 0.9
"""Of the moving average of the entropy, per step."""


@dataclass
class Tau:
    """The weight of the entropy of a group's weights, `value`. With a target, it follows the moving
    average of that entropy: log tau += rate (target - average), in [0.001, 10], widened by its
    first value.

    Args:
        initial: its first value
        target: mean entropy of a group's weights, in nats; None: tau stays
        rate: of log tau per step, for a distance of one nat
        warmup_steps: first steps, in which tau stays
    """

    initial: float
    target: float | None = None
    rate: float = 0.01
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        self.value = self.initial
        self.average: float | None = None

    @property
    def to_save(self) -> tuple[float, float] | None:
        """Value and average; None if tau does not change."""
        if self.target is None or self.average is None:
            return None
        return self.value, self.average

    def resume(self, saved: tuple[float, float] | None) -> None:
        """Take the checkpoint's value and average, which a fixed tau ignores."""
        if self.target is not None and saved is not None:
            self.value, self.average = saved

    def observe(self, entropy: float, step: int) -> None:
        """Follow the mean entropy of a step's groups. Args: step: steps taken before it"""
        if self.target is None:
            return
        known = entropy if self.average is None else self.average
        self.average = _KEPT * known + (1 - _KEPT) * entropy
        if step >= self.warmup_steps:
            moved = self.value * math.exp(self.rate * (self.target - self.average))
            least, most = min(LEAST_TAU, self.initial), max(MOST_TAU, self.initial)
            self.value = min(most, max(least, moved))


@dataclass(frozen=True)
class Coefficients:
    """The weights of an objective that follow the results of each step."""

    kl: KlCoefficient
    tau: Tau

    @property
    def values(self) -> tuple[float, float]:
        """Of the KL penalty, and of the entropy of MaxEnt-GRPO's weights."""
        return self.kl.value, self.tau.value

    def resume(self, kl: float | None, tau: tuple[float, float] | None) -> None:
        """Take the values of a checkpoint."""
        self.kl.resume(kl)
        self.tau.resume(tau)

    def observe(self, divergence: float, sequences: int, entropy: float | None, step: int) -> None:
        """Follow the results of a step.

        Args:
            divergence: mean KL divergence of its `sequences` from the reference model, per token
            entropy: mean over its groups of the entropy of their weights, in nats; None for other
                objectives
            step: steps taken before it
        """
        self.kl.observe(divergence, sequences)
        if entropy is not None:
            self.tau.observe(entropy, step)


def coefficients_of(options: ObjectiveOptions) -> Coefficients:
    """As they are at the start of a run."""
    target = options.kl_target or math.inf
    return Coefficients(
        KlCoefficient(options.kl_control, options.kl_coef, target, options.kl_horizon),
        Tau(
            options.resolved_objective.maxent_tau,
            options.maxent_target_entropy,
            options.maxent_tau_lr,
            options.maxent_tau_warmup_steps,
        ),
    )
