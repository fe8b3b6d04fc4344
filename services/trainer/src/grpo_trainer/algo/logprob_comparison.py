"""The trained tokens of a batch in one line, as server and trainer see them.

Legend: N trained tokens, sequence after sequence, each in its order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from grpo_trainer.data.collate import MicroBatch

MIN_TOKENS = 8
"""A mean over fewer says nothing."""
STANDARD_ERRORS = 3.0
"""A mean counts with so many standard errors taken off: a few outliers among few tokens are no
proof."""


@dataclass(frozen=True)
class TokenTable:
    """In host memory. Log-probabilities are at the temperature that the token's group names."""

    logp: Tensor  # [N] float32, the trainer's
    behaviour_logp: Tensor  # [N] float32, the server's, as logged
    temperature: Tensor  # [N] float32
    sequence: Tensor  # [N] int64, counted through the batch
    position: Tensor  # [N] int64, index of the token in its sequence

    @classmethod
    def of(cls, micro_batches: Sequence[MicroBatch], logp: Sequence[Tensor]) -> TokenTable:
        """Args: logp: [B, T] per micro-batch, in host memory as these are."""
        first = 0
        parts = []
        for micro, seen in zip(micro_batches, logp, strict=True):
            row, column = (micro.token_weight > 0).nonzero(as_tuple=True)
            parts.append(
                cls(
                    logp=seen[row, column],
                    behaviour_logp=micro.behaviour_logp[row, column],
                    temperature=micro.temperature[row],
                    sequence=row + first,
                    position=column + 1,
                )
            )
            first += len(micro.inputs)
        columns = ([getattr(part, field.name) for part in parts] for field in fields(cls))
        return cls(*map(torch.cat, columns))

    def __len__(self) -> int:
        return len(self.logp)

    def where(self, chosen: Tensor) -> TokenTable:
        """Args: chosen: [N] bool."""
        return TokenTable(*(getattr(self, field.name)[chosen] for field in fields(self)))

    @property
    def diff(self) -> Tensor:
        """[N] trainer's minus server's."""
        return self.logp - self.behaviour_logp

    def mean_distance(self) -> float:
        """Mean |difference|; needs a token at least."""
        return float(self.diff.abs().double().mean())

    def sequences(self) -> list[int]:
        """Of the sequences that have tokens here, in order."""
        return sorted(set(self.sequence.tolist()))

    def diff_abs_quantile(self, share: float) -> float | None:
        """Smallest |difference| that at least this share of the tokens does not exceed."""
        if not len(self):
            return None
        rank = max(1, math.ceil(share * len(self)))
        return float(self.diff.abs().kthvalue(rank).values)


@dataclass(frozen=True)
class Distance:
    """How far logged log-probabilities lie from the trainer's.

    `lower_bound`: the mean less three standard errors, 0 for fewer than 8 tokens. Where completions
    were sampled below temperature 1, that mean is in units of the logits, whose noise is what the
    tolerance is about.
    """

    tokens: int
    mean: float
    max: float
    lower_bound: float

    @classmethod
    def of(cls, table: TokenTable) -> Distance:
        if not len(table):
            return cls(0, 0.0, 0.0, 0.0)
        diff = table.diff.abs().double()  # a sum of what float32 holds may be more than it holds
        noise = diff * table.temperature.clamp(max=1.0)
        error = noise.std(correction=0) / len(table) ** 0.5
        lower_bound = (
            float(noise.mean() - STANDARD_ERRORS * error) if len(table) >= MIN_TOKENS else 0.0
        )
        return cls(len(table), float(diff.mean()), float(diff.max()), max(0.0, lower_bound))
