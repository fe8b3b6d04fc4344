"""Options that say how the trainer computes log-probabilities; none of them changes what they are.

Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

TORCH, LIGER = "torch", "liger"


class Choice(StrEnum):
    AUTO = "auto"
    """Where it pays and the model allows it; where not, the log says why."""
    ON = "on"
    """Or an error that says why not."""
    OFF = "off"


@dataclass(frozen=True)
class ForwardOptions:
    """`packing`: sequences end to end, without padding. `fused_head`: log-probabilities without all
    logits at once. `compile`: the layers by torch.compile. `head_kernel`: whose code the fused head
    computes with."""

    packing: Choice = Choice.AUTO
    fused_head: Choice = Choice.AUTO
    compile: bool = False
    head_kernel: str = TORCH
