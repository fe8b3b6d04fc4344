"""Asks the server whether it serves what the trainer holds: the proof that weights are shared.

Only a check after an update proves anything: before the first one, two equal copies pass as well.
That one shows how far two computations with the same weights differ, the noise; what comes later
is held against a multiple of it. And only an update that moves the log-probabilities further than
the noise can be told from none; how far they moved is measured beside the difference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog
import torch
from torch import Tensor

from grpo_trainer.errors import ServedWeightsDiffer
from grpo_trainer.model.policy import token_logprobs
from grpo_trainer.optim.optimizer import MasterOptimizer

log = structlog.get_logger()

PROBE_LENGTH = 32
TOLERANCE: dict[torch.dtype, float] = {torch.float32: 1e-3, torch.bfloat16: 0.05}
"""Bound on the mean |difference| per dtype of the served weights, where the noise is below a fourth
of it. Measured on tiny models (tests/inference/test_shared_weights.py): 4e-7 in float32, 0.001 to
0.006 in bfloat16."""
DEFAULT_TOLERANCE = 0.05
GPU_FLOAT32_TOLERANCE = 0.01
"""On a GPU vLLM's attention multiplies float32 in TF32, with 10 bits of mantissa. Not measured."""
START_FACTOR = 2.0
"""The noise itself may be so many times that bound: beyond, the two hold different weights."""
NOISE_FACTOR = 4.0
"""Bound in multiples of the noise: it grows as training makes the probe's tokens less likely."""
FAR_BETTER = 4.0
"""Other weights that explain the served log-probabilities so many times better are the ones served,
however small the difference. In bfloat16 a small update lies below the tolerance, and far above the
noise of one computation."""


@dataclass(frozen=True)
class Alignment:
    """|server's - trainer's log-probability| over the probe's tokens.

    `moved`: mean |change| of the trainer's own since a probe before, the last one from which it
    could be told. Near the noise, a server that still serves those weights would pass as well.
    `previous`: mean |server's - trainer's at that probe|.
    `sampled_mean`: mean over tokens that the server sampled for the check, where it did.
    """

    mean: float
    max: float
    moved: float
    previous: float
    sampled_mean: float | None = None


def tolerance_of(policy: Any) -> float:
    """Bound on the mean |difference| between two computations with the policy's weights."""
    weights = next(policy.parameters())
    if weights.is_cuda and weights.dtype == torch.float32:
        return GPU_FLOAT32_TOLERANCE
    return TOLERANCE.get(weights.dtype, DEFAULT_TOLERANCE)


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


def probe_tokens(vocabulary: int, length: int = PROBE_LENGTH) -> list[int]:
    """A fixed sequence spread over the vocabulary: [length]"""
    generator = torch.Generator().manual_seed(20240229)
    tokens: list[int] = torch.randint(vocabulary, (length,), generator=generator).tolist()
    return tokens


@torch.no_grad()
def sampled_tokens(policy: Any, length: int = PROBE_LENGTH) -> list[int]:
    """A sequence that the policy samples at temperature 1, the same one each time: [length]

    Of tokens that it would never sample, computations differ far more than of those that are
    trained on. Every call has one shape: what follows a position does not count for it.
    """
    device, generator = next(policy.parameters()).device, torch.Generator().manual_seed(20240229)
    tokens = torch.zeros(1, length, dtype=torch.long, device=device)
    tokens[0, 0] = probe_tokens(policy.config.vocab_size, 1)[0]
    for position in range(1, length):
        logits = policy(input_ids=tokens, use_cache=False).logits[0, position - 1].float().cpu()
        noise = torch.empty_like(logits).exponential_(generator=generator)
        tokens[0, position] = (logits - noise.log()).argmax()  # Gumbel's way to sample
    found: list[int] = tokens[0].tolist()
    return found


class AlignmentProbe:
    """Compares log-probabilities of fixed tokens at temperature 1 on both sides.

    Made before the first update, so that the first measurement knows how far the weights moved.

    Args: bound: on their mean |difference|; it learns the noise from the first check
    """

    def __init__(self, policy: Any, bound: Bound | None = None) -> None:
        self._policy = policy
        self._token_ids = sampled_tokens(policy)
        self._before = self._ours()
        self.bound = bound or Bound(tolerance_of(policy), learns=True)

    def require(self, served_logprobs: Callable[[list[int]], list[float]], label: str) -> Alignment:
        """Args:
            served_logprobs: [T] token ids → [T-1], asked of the server
            label: of the moment, for the message

        Raises:
            ServedWeightsDiffer: it does not serve the policy's weights.
        """
        found = self.measure(served_logprobs)
        require_alignment(found, self.bound.value, label)
        self.bound.learn(found.mean)
        return found

    def measure(self, served_logprobs: Callable[[list[int]], list[float]]) -> Alignment:
        """Args: served_logprobs: [T] token ids → [T-1], asked of the server."""
        ours, served = self._ours(), torch.tensor(served_logprobs(self._token_ids))
        found = Alignment(
            mean=mean_distance(served, ours),
            max=float((served - ours).abs().max()),
            moved=mean_distance(ours, self._before),
            previous=mean_distance(served, self._before),
        )
        if could_be_told(found):
            self._before = ours
        return found

    def _ours(self) -> Tensor:
        return logprobs_of(self._policy, self._token_ids)  # [T-1]


def mean_distance(some: Tensor, others: Tensor) -> float:
    return float((some - others).abs().mean())


@torch.no_grad()
def logprobs_of(policy: Any, token_ids: list[int]) -> Tensor:
    """The policy's log-probabilities of token_ids[1:] at temperature 1: [T] → [T-1]"""
    device = next(policy.parameters()).device
    ids = torch.tensor([token_ids], device=device)
    one = torch.ones(1, device=device)
    return token_logprobs(policy, ids[:, :-1], ids[:, 1:], one)[0].cpu()


def require_written(optimizer: MasterOptimizer, step: int) -> None:
    """Whoever compares what is served with the policy asks the memory that both read. That it
    holds the update at all is another question, put here.

    Raises:
        ServedWeightsDiffer: a parameter does not hold what the optimizer computed.
    """
    unwritten = optimizer.unwritten_parameters()
    if unwritten:
        raise ServedWeightsDiffer(
            f"LogProb Alignment: MISMATCH! After step {step}, {unwritten} of "
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
            f"LogProb Alignment: MISMATCH! {label} the server's log-probabilities differ "
            f"from the trainer's by {alignment.mean:.2g} on average, {alignment.max:.2g} at most "
            f"(tolerance {tolerance:.2g}), and from those of the previous check by "
            f"{alignment.previous:.2g}; the server does not serve the trained weights. Is another "
            "process writing them, or was the server started without --share-weights?"
        )


def could_be_told(alignment: Alignment) -> bool:
    """Whether a server that serves the weights of the probe before would have shown. Until then
    later probes are held against that one: small steps add up."""
    return alignment.moved > FAR_BETTER * alignment.mean


def mention_little_power(alignment: Alignment) -> None:
    if not could_be_told(alignment):
        log.info(
            "the check has little power here: the weights moved hardly further than the noise",
            moved=alignment.moved,
            noise=alignment.mean,
        )
