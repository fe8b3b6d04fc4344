"""Checks the behaviour logprobs of data of any age by the mean of the importance ratio.

Tokens that were sampled from q, with behaviour logprobs log q, have a mean importance ratio of 1
under any other policy p: the sum of q * p/q is the sum of p. So a mean that differs from 1 by more
than chance shows wrong behaviour logprobs, however old the weights are that sampled the tokens.

The mean is taken for each environment and place, because the first and the last tokens of a
completion have faults of their own. Which token is the last one depends on what was sampled: a
policy that learns to stop makes all last tokens more likely. So their mean may differ by more.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_trainer.algo.logprob_comparison import TokenTable

WINDOW_STEPS = 8
MIN_TOKENS = 64
STANDARD_ERRORS = 6.0
MIN_EFFECT = {"first": 0.05, "last": 0.3, "all": 0.05}
"""By place. Smaller differences from 1 are accepted: environments drop groups, and which ones
depends weakly on the sampled tokens. In 150 healthy steps the mean of all tokens was 1.001."""
MAX_RATIO = 10.0
"""Larger ratios count as this one. Otherwise a few of them, which a wrong log produces, would make
the standard error as large as the mean."""


@dataclass(frozen=True)
class UnlikelyRatio:
    """`mean`: of the importance ratio. `errors`: how many standard errors it is away from 1."""

    env_id: int | None
    place: str
    tokens: int
    mean: float
    errors: float

    def __str__(self) -> str:
        return (
            f"the mean importance ratio of {self.tokens} tokens ({self.place} of each completion) "
            f"is {self.mean:.3f}, {abs(self.errors):.0f} standard errors away from 1"
        )


class RatioCheck:
    """Remembers the sums of the last steps."""

    def __init__(self) -> None:
        self._steps: deque[dict[tuple[int | None, str], Tensor]] = deque(maxlen=WINDOW_STEPS)

    def unlikely(self, table: TokenTable, env_ids: Sequence[int | None]) -> list[UnlikelyRatio]:
        """Add a step's tokens, and judge the last steps.

        Args:
            table: N trained tokens whose behaviour logprobs were logged
            env_ids: of each sequence of the batch
        """
        self._steps.append(_sums(table, env_ids))
        found = []
        for env_id, place in self._steps[-1]:
            seen = [step[env_id, place] for step in self._steps if (env_id, place) in step]
            n, off, square = torch.stack(seen).sum(0).tolist()
            errors = off / max(square, 1e-12) ** 0.5
            is_large = abs(off) > MIN_EFFECT[place] * n
            if n >= MIN_TOKENS and is_large and abs(errors) > STANDARD_ERRORS:
                found.append(UnlikelyRatio(env_id, place, int(n), 1 + off / n, errors))
        return found


def _sums(table: TokenTable, env_ids: Sequence[int | None]) -> dict[tuple[int | None, str], Tensor]:
    """By environment and place: number of tokens, sum of ratio - 1, sum of its squares: [3]"""
    names = list(dict.fromkeys(env_ids))
    of_sequence = torch.tensor([names.index(env_id) for env_id in env_ids])
    off = table.diff.double().clamp(max=math.log(MAX_RATIO)).expm1()  # [N]
    columns = (torch.ones_like(off), off, off.square())
    values = torch.stack(columns, dim=1)  # [N, 3]
    env = of_sequence[table.sequence]  # [N]
    found: dict[tuple[int | None, str], Tensor] = {}
    for place, is_there in _places(table).items():
        totals = torch.zeros(len(names), 3, dtype=torch.float64)
        totals.index_add_(0, env[is_there], values[is_there])
        found |= {(names[i], place): total for i, total in enumerate(totals) if total[0]}
    return found


def _places(table: TokenTable) -> dict[str, Tensor]:
    """[N] bool of each place."""
    edge = torch.ones(min(1, len(table)), dtype=torch.bool)
    changes = table.sequence[1:] != table.sequence[:-1]  # [N-1]
    return {
        "first": torch.cat([edge, changes]),
        "last": torch.cat([changes, edge]),
        "all": torch.ones(len(table), dtype=torch.bool),
    }
