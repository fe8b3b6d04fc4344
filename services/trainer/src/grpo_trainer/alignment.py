"""Asks the server whether it serves what the trainer holds: the proof that weights are shared.

Only a check after an update proves anything: before the first one, two equal copies pass as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from grpo_trainer.errors import ServedWeightsDiffer
from grpo_trainer.policy import token_logprobs
from grpo_trainer.weight_sync.base import WeightSync

PROBE_LENGTH = 32
TOLERANCE: dict[torch.dtype, float] = {torch.float32: 1e-3, torch.bfloat16: 0.15}
"""Bound on the mean |difference|, per dtype of the served weights. Measured on tiny models: 1e-6
in float32, 0.01 in bfloat16 (tests/integration/test_shared_weights.py); other weights are off by
0.2 and more."""
DEFAULT_TOLERANCE = 0.15


@dataclass(frozen=True)
class Alignment:
    """|server's - trainer's log-probability| over the probe's tokens."""

    mean: float
    max: float


def probe_tokens(vocabulary: int, length: int = PROBE_LENGTH) -> list[int]:
    """A fixed sequence spread over the vocabulary: [length]"""
    generator = torch.Generator().manual_seed(20240229)
    tokens: list[int] = torch.randint(vocabulary, (length,), generator=generator).tolist()
    return tokens


@torch.no_grad()
def measure_alignment(policy: Any, sync: WeightSync, token_ids: list[int]) -> Alignment:
    """Compare log-probabilities of `token_ids` [T] at temperature 1 on both sides."""
    device = next(policy.parameters()).device
    ids = torch.tensor([token_ids], device=device)
    was_training = policy.training
    policy.eval()
    ours = token_logprobs(policy, ids[:, :-1], ids[:, 1:], torch.ones(1, device=device))[0].cpu()
    policy.train(was_training)
    served = torch.tensor(sync.served_logprobs(token_ids))
    difference = (ours - served).abs()
    return Alignment(mean=float(difference.mean()), max=float(difference.max()))


def require_alignment(alignment: Alignment, dtype: torch.dtype, step: int) -> None:
    """Raises `ServedWeightsDiffer` beyond the tolerance of `dtype`."""
    tolerance = TOLERANCE.get(dtype, DEFAULT_TOLERANCE)
    if not alignment.mean <= tolerance:
        raise ServedWeightsDiffer(
            f"LogProb Alignment: MISMATCH! After step {step} the server's log-probabilities differ "
            f"from the trainer's by {alignment.mean:.4f} on average, {alignment.max:.4f} at most "
            f"(tolerance {tolerance}); the server does not serve the trained weights. Is another "
            "process writing them, or was the server started without --share-weights?"
        )
