"""Does the server serve the weights that the trainer holds? Log-probabilities on both sides tell.

Only a check after an update proves anything: before the first one, two equal copies pass as well.
That one shows how far two computations with the same weights differ, the noise; what comes later
is held against a multiple of it. And only an update that moves the log-probabilities further than
the noise can be told from none; how far they moved is measured beside the difference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import structlog
import torch
from torch import Tensor

from grpo_trainer.errors import ServedWeightsDiffer
from grpo_trainer.model.logprobs import logprobs_of, sampled_tokens, tolerance_of
from grpo_trainer.model.policy_protocol import CausalLM
from grpo_trainer.optim.master_optimizer import MasterOptimizer

log = structlog.get_logger()

MISMATCH = "LogProb Alignment: MISMATCH!"
START_FACTOR = 2.0
"""The noise itself may be so many times that bound: beyond, the two hold different weights."""
NOISE_FACTOR = 4.0
"""Bound in multiples of the noise: it grows as training makes the probe's tokens less likely."""
FAR_BETTER = 4.0
"""Other weights that explain the served log-probabilities so many times better are the ones served,
however small the difference. In bfloat16 a small update lies below the tolerance, and far above the
noise of one computation."""

ServedLogprobs = Callable[[list[int]], list[float]]
"""[T] token ids → [T-1], asked of the server at temperature 1."""


@dataclass(frozen=True)
class Alignment:
    """|server's - trainer's log-probability| over the probe's tokens.

    `moved`: mean |change| of the trainer's own since the last conclusive probe. Near the noise, a
    server that still serves those weights would pass as well.
    `previous`: mean |server's - trainer's at that probe|.
    `sampled_mean`: mean over tokens that the server sampled for the check, where it did.
    """

    mean: float
    max: float
    moved: float
    previous: float
    sampled_mean: float | None = None

    @classmethod
    def of(
        cls, served: Tensor, ours: Tensor, previous: Tensor, sampled_mean: float | None = None
    ) -> Alignment:
        """Args: log-probabilities of the same tokens, [T-1] each; previous: ours at that probe."""
        return cls(
            mean=mean_distance(served, ours),
            max=float((served - ours).abs().max()),
            moved=mean_distance(ours, previous),
            previous=mean_distance(served, previous),
            sampled_mean=sampled_mean,
        )

    @property
    def is_conclusive(self) -> bool:
        """Whether a server that serves the weights of the previous probe would have shown. Until
        then later probes are held against that one: small steps add up."""
        return self.moved > FAR_BETTER * self.mean


@dataclass
class Bound:
    """On the mean |difference| between what is served and what the trainer holds.

    Args:
        floor: `tolerance_of` the policy
        noise: the difference while nothing was trained yet; None where that was not measured
        learns: nothing was trained yet, so the next check measures it
    """

    floor: float
    noise: float | None = None
    learns: bool = False

    @property
    def value(self) -> float:
        if self.learns:
            return START_FACTOR * self.floor
        return max(self.floor, NOISE_FACTOR * (self.noise or 0.0))

    def learn(self, noise: float) -> None:
        """From the first check. What is compared later was trained, and may differ for that."""
        if self.learns:
            self.noise, self.learns = noise, False


class AlignmentProbe:
    """Compares log-probabilities of fixed tokens at temperature 1 on both sides.

    Made before the first update, so that the first measurement knows how far the weights moved.

    Args: bound: on their mean |difference|; it learns the noise from the first check
    """

    def __init__(self, policy: CausalLM, bound: Bound | None = None) -> None:
        self._policy = policy
        self._token_ids = sampled_tokens(policy)
        self._previous = logprobs_of(policy, self._token_ids)
        self.bound = bound or Bound(tolerance_of(policy), learns=True)

    def require(self, served_logprobs: ServedLogprobs, label: str) -> Alignment:
        """Args: label: of the moment, for the message.

        Raises:
            ServedWeightsDiffer: the server does not serve the policy's weights.
        """
        found = self.measure(served_logprobs)
        require_alignment(found, self.bound.value, label)
        self.bound.learn(found.mean)
        return found

    def measure(self, served_logprobs: ServedLogprobs) -> Alignment:
        ours = logprobs_of(self._policy, self._token_ids)  # [T-1]
        found = Alignment.of(torch.tensor(served_logprobs(self._token_ids)), ours, self._previous)
        if found.is_conclusive:
            self._previous = ours
        return found


@dataclass(frozen=True)
class SharedMemoryCheck:
    """Checks the server after the first update and after every `every_steps`-th, where both sides
    read one memory. The other modes check every publication (`PublicationCheck`)."""

    probe: AlignmentProbe
    optimizer: MasterOptimizer
    served_logprobs: ServedLogprobs
    every_steps: int

    def after_step(self, step: int) -> Alignment | None:
        """None where no check is due after the step with this index.

        Raises:
            ServedWeightsDiffer: other weights are served, or the update was not written.
        """
        if step != 0 and (step + 1) % self.every_steps != 0:
            return None
        require_written(self.optimizer, step)
        alignment = self.probe.require(self.served_logprobs, f"After step {step}")
        log_if_inconclusive(alignment)
        return alignment


def mean_distance(some: Tensor, others: Tensor) -> float:
    return float((some - others).abs().mean())


def require_written(optimizer: MasterOptimizer, step: int) -> None:
    """Whoever compares what is served with the policy asks the memory that both read. That it
    holds the update at all is another question, put here.

    Raises:
        ServedWeightsDiffer: a parameter does not hold what the optimizer computed.
    """
    unwritten = optimizer.unwritten_parameters()
    if unwritten:
        raise ServedWeightsDiffer(
            f"{MISMATCH} After step {step}, {unwritten} of "
            f"{len(optimizer.masters)} parameters do not hold what the optimizer computed: the "
            "update was not written, or something wrote over it, so stale weights are served"
        )


def require_alignment(alignment: Alignment, tolerance: float, label: str) -> None:
    """Args: label: of the moment, for the message.

    Raises:
        ServedWeightsDiffer: beyond the tolerance, or far nearer to the weights of the previous
            probe.
    """
    is_previous = FAR_BETTER * alignment.previous < alignment.mean
    if is_previous or not alignment.mean <= tolerance:
        raise ServedWeightsDiffer(
            f"{MISMATCH} {label} the server's log-probabilities differ "
            f"from the trainer's by {alignment.mean:.2g} on average, {alignment.max:.2g} at most "
            f"(tolerance {tolerance:.2g}), and from those of the previous check by "
            f"{alignment.previous:.2g}; the server does not serve the trained weights. Is another "
            "process writing them, or was the server started without --share-weights?"
        )


def log_if_inconclusive(alignment: Alignment) -> None:
    if not alignment.is_conclusive:
        log.info(
            "alignment.inconclusive",
            reason="the weights moved hardly further than rounding error",
            moved=alignment.moved,
            noise=alignment.mean,
        )
