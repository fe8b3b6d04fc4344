"""Groups whose completions begin alike further than independent sampling can explain.

Completions of one prompt are sampled independently, so that all of them begin with the same tokens
is a matter of chance, and the policy knows how small a chance. A prompt among the trained tokens
is such a beginning, whatever log-probabilities were sent with it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from grpo_trainer.data.collate import Origin
from grpo_trainer.verify.token_table import TokenTable

CHANCE_NATS = 30.0
"""exp(-30) is 1e-13."""
DRIFT_NATS = 0.2
"""What a token's log-probability may have lost since it was sampled. It is not held against the
group: over a long beginning that is all but certain, it would add up."""
MAX_SIBLINGS = 7
"""More would only multiply the errors of the policy's log-probabilities."""


def unlikely_groups(table: TokenTable, origins: Sequence[Origin]) -> set[int]:
    """Groups (by their place in the batch) whose shared trained tokens have a chance below 1e-13.

    The first completion may begin as it likes; each of its siblings repeats it by chance.

    Args:
        table: trained tokens of any of the batch's sequences
    """
    shared = torch.tensor([origin.shared_tokens for origin in origins])
    begun = table.where(table.position < shared[table.sequence])
    surprise = (begun.logp + DRIFT_NATS).clamp(max=0.0)
    nats: defaultdict[int, float] = defaultdict(float)
    for number, value in zip(begun.sequence.tolist(), surprise.tolist(), strict=True):
        origin = origins[number]
        nats[origin.group] += value / origin.siblings * min(origin.siblings - 1, MAX_SIBLINGS)
    return {group for group, total in nats.items() if total < -CHANCE_NATS}
