"""Checks the behaviour logprobs of data of any age by the mean of the importance ratio.

Tokens that were sampled from q, with behaviour logprobs log q, have a mean importance ratio of 1
under any other policy p: the sum of q * p/q is the sum of p. So a mean that differs from 1 by more
than chance shows wrong behaviour logprobs, however old the weights are that sampled the tokens.

The mean is taken for each environment and place: first, last and other tokens of a completion have
their own typical faults.
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
MIN_EFFECT = 0.05
"""Smaller differences from 1 are accepted: environments drop groups, and which ones depends weakly
on the sampled tokens. Measured in 1,000 healthy steps: see `tests/silent_faults`."""
MAX_RATIO = 10.0
"""Larger ratios count as this one. Otherwise a few of them, which a wrong log produces, would make
the standard error as large as the mean."""
PLACES = ("first", "last", "other")


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
            f"the mean importance ratio of {self.tokens} {self.place} tokens of completions is "
            f"{self.mean:.3f}, {abs(self.errors):.0f} standard errors away from 1"
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
            if n >= MIN_TOKENS and abs(off) > MIN_EFFECT * n and abs(errors) > STANDARD_ERRORS:
                found.append(UnlikelyRatio(env_id, place, int(n), 1 + off / n, errors))
        return found


def _sums(table: TokenTable, env_ids: Sequence[int | None]) -> dict[tuple[int | None, str], Tensor]:
    """By environment and place: number of tokens, sum of ratio - 1, sum of its squares: [3]"""
    names = list(dict.fromkeys(env_ids))
    of_sequence = torch.tensor([names.index(env_id) for env_id in env_ids])
    keys = len(PLACES) * of_sequence[table.sequence] + _place(table)  # [N]
    off = table.diff.double().clamp(max=math.log(MAX_RATIO)).expm1()  # [N]
    columns = (torch.ones_like(off), off, off.square())
    size = len(PLACES) * len(names)
    totals = torch.stack([torch.bincount(keys, column, size) for column in columns], dim=1)
    pairs = ((env_id, place) for env_id in names for place in PLACES)
    return {pair: total for pair, total in zip(pairs, totals, strict=True) if total[0]}


def _place(table: TokenTable) -> Tensor:
    """[N] index in PLACES. The only token of a sequence is a first one."""
    edge = torch.ones(1, dtype=torch.bool)
    changes = table.sequence[1:] != table.sequence[:-1]  # [N-1]
    is_first, is_last = torch.cat([edge, changes]), torch.cat([changes, edge])
    return torch.where(is_first, 0, torch.where(is_last, 1, 2))
