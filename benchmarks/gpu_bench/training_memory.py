"""How much memory a training step takes by what it keeps, without activations.

Bytes per weight: those of `grpo_trainer.optim.optimizer` and its update rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FLOAT32_BYTES, BFLOAT16_BYTES = 4, 2
MOMENTS_8BIT_BYTES = 2 * (1 + FLOAT32_BYTES / 256)
"""Two moments of a byte, with a float32 scale for every 256."""


@dataclass(frozen=True)
class BytesPerWeight:
    """`gradients`: where the last of them has been gathered; the staging copy takes their place."""

    weights: float
    masters: float
    moments: float
    gradients: float

    @property
    def total(self) -> float:
        return self.weights + self.masters + self.moments + self.gradients


def bytes_per_weight(
    options: Mapping[str, object], micro_batches: int, number_bytes: int
) -> BytesPerWeight:
    """Args:
    options: of `TrainerSettings`; what is left out has its default
    number_bytes: of a served weight
    """
    is_8bit = options.get("optimizer") == "adamw_8bit"
    is_bfloat16 = options.get("master_dtype") == "bfloat16"
    return BytesPerWeight(
        weights=number_bytes,
        masters=BFLOAT16_BYTES if is_bfloat16 else FLOAT32_BYTES,
        moments=MOMENTS_8BIT_BYTES if is_8bit else 2 * FLOAT32_BYTES,
        # From the second backward pass on gradients are added up in float32.
        gradients=number_bytes if micro_batches == 1 else FLOAT32_BYTES,
    )


def step_bytes_per_weight(kept: BytesPerWeight, number_bytes: int) -> float:
    """Read and written by one optimizer step in one pass, and by the write after it: the gradient
    read, masters and moments read and written, the weights to serve staged where the masters are of
    another type, and then copied."""
    staged = 0 if kept.masters == number_bytes else number_bytes
    return kept.gradients + 2 * (kept.masters + kept.moments) + staged + 2 * number_bytes
