"""Asks the server whether it serves what the trainer holds: the proof that weights are shared.

Only a check after an update proves anything: before the first one, two equal copies pass as well.
And only an update that moves the log-probabilities further than the noise of the data type can be
told from none; how far they moved is measured beside the difference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog
import torch
from torch import Tensor

from grpo_trainer.errors import ServedWeightsDiffer
from grpo_trainer.optimizer import MasterOptimizer
from grpo_trainer.policy import token_logprobs

log = structlog.get_logger()

PROBE_LENGTH = 32
TOLERANCE: dict[torch.dtype, float] = {torch.float32: 1e-3, torch.bfloat16: 0.05}
"""Bound on the mean |difference| per dtype of the served weights. Measured on tiny models (tests/
inference/test_shared_weights.py): 4e-7 in float32, 0.001 to 0.006 in bfloat16."""
DEFAULT_TOLERANCE = 0.05
GPU_FLOAT32_TOLERANCE = 0.01
"""On a GPU vLLM's attention multiplies float32 in TF32, with 10 bits of mantissa. Not measured."""


@dataclass(frozen=True)
class Alignment:
    """|server's - trainer's log-probability| over the probe's tokens.

    `moved`: mean |change| of the trainer's own since the probe before. Where it is below the
    tolerance, a server that still serves the weights of the probe before would pass as well.
    `sampled_mean`: mean over tokens that the server sampled for the check, where it did.
    """

    mean: float
    max: float
    moved: float
    sampled_mean: float | None = None


def tolerance_of(policy: Any) -> float:
    """Bound on the mean |difference| between two computations with the policy's weights."""
    weights = next(policy.parameters())
    if weights.is_cuda and weights.dtype == torch.float32:
        return GPU_FLOAT32_TOLERANCE
    return TOLERANCE.get(weights.dtype, DEFAULT_TOLERANCE)


def probe_tokens(vocabulary: int, length: int = PROBE_LENGTH) -> list[int]:
    """A fixed sequence spread over the vocabulary: [length]"""
    generator = torch.Generator().manual_seed(20240229)
    tokens: list[int] = torch.randint(vocabulary, (length,), generator=generator).tolist()
    return tokens


class AlignmentProbe:
    """Compares log-probabilities of fixed tokens at temperature 1 on both sides.

    Made before the first update, so that the first measurement knows how far the weights moved.
    """

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self._token_ids = probe_tokens(policy.config.vocab_size)
        self._before = self._ours()

    def measure(self, served_logprobs: Callable[[list[int]], list[float]]) -> Alignment:
        """Args: served_logprobs: [T] token ids → [T-1], asked of the server."""
        ours = self._ours()
        difference = (ours - torch.tensor(served_logprobs(self._token_ids))).abs()
        moved = float((ours - self._before).abs().mean())
        self._before = ours
        return Alignment(float(difference.mean()), float(difference.max()), moved)

    def _ours(self) -> Tensor:
        return logprobs_of(self._policy, self._token_ids)  # [T-1]


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


def require_alignment(alignment: Alignment, tolerance: float, step: int) -> None:
    """Raises `ServedWeightsDiffer` beyond the tolerance."""
    if not alignment.mean <= tolerance:
        raise ServedWeightsDiffer(
            f"LogProb Alignment: MISMATCH! After step {step} the server's log-probabilities differ "
            f"from the trainer's by {alignment.mean:.4f} on average, {alignment.max:.4f} at most "
            f"(tolerance {tolerance}); the server does not serve the trained weights. Is another "
            "process writing them, or was the server started without --share-weights?"
        )
    if alignment.moved <= tolerance:
        log.info(
            "the check has little power at this step: the weights moved less than the tolerance",
            moved=alignment.moved,
            tolerance=tolerance,
        )
