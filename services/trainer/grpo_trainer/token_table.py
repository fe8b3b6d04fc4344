"""Compares the server's and the trainer's logprobs of a batch's trained tokens.

Legend: N trained tokens, sequence after sequence, each in its order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from grpo_trainer.data.collate import MicroBatch
from grpo_trainer.model.logprobs import TokenValues

MIN_TOKENS = 8
"""A mean over fewer tokens proves nothing."""
STANDARD_ERRORS = 3.0
"""This many standard errors are subtracted from a mean, because a few outliers among few tokens
prove nothing."""


def mean_distance(some: Tensor, others: Tensor) -> float:
    """Mean |difference| of two logprobs of the same tokens, in nats."""
    return float((some - others).abs().double().mean())


@dataclass(frozen=True)
class TokenTable:
    """The trained tokens of a batch, in host memory. Logprobs are at the temperature that the
    token's group names."""

    logp: Tensor  # [N] float32, the trainer's
    entropy: Tensor  # [N] float32, of the trainer's distribution, NaN if it was not computed
    above: Tensor  # [N] float32, probability of all tokens above this one, NaN if not computed
    behaviour_logp: Tensor  # [N] float32, the server's, as logged
    temperature: Tensor  # [N] float32
    sequence: Tensor  # [N] int64, index of the sequence in the batch
    position: Tensor  # [N] int64, index of the token in its sequence

    @classmethod
    def of(cls, micro_batches: Sequence[MicroBatch], values: Sequence[TokenValues]) -> TokenTable:
        """Take the trained tokens. Args: values: [B, T] for each micro-batch, in host memory"""
        first = 0
        parts = []
        for micro, seen in zip(micro_batches, values, strict=True):
            row, column = (micro.token_weight > 0).nonzero(as_tuple=True)
            parts.append(
                cls(
                    logp=seen.logp[row, column],
                    entropy=seen.entropy[row, column],
                    above=seen.above[row, column],
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
        """The tokens that are `chosen`: [N] bool."""
        return TokenTable(*(getattr(self, field.name)[chosen] for field in fields(self)))

    def of_sequences(self, flags: Iterable[bool]) -> Tensor:
        """[N] a flag of each sequence of the batch, for its tokens."""
        return torch.tensor(list(flags))[self.sequence]

    @property
    def diff(self) -> Tensor:
        """[N] the trainer's logprob minus the server's."""
        return self.logp - self.behaviour_logp

    def mean_distance(self) -> float:
        """Mean |difference|; needs at least one token."""
        return mean_distance(self.logp, self.behaviour_logp)

    def sequences(self) -> list[int]:
        """Indices of the sequences with at least one trained token, in order."""
        return sorted(set(self.sequence.tolist()))

    def diff_abs_quantile(self, share: float) -> float | None:
        """The smallest |difference| that at least this share of the tokens does not exceed."""
        if not len(self):
            return None
        rank = max(1, math.ceil(share * len(self)))
        return float(self.diff.abs().kthvalue(rank).values)


@dataclass(frozen=True)
class Distance:
    """How far the behaviour logprobs are from the trainer's logprobs.

    `lower_bound`: the mean minus three standard errors; 0 for fewer than 8 tokens. Logprobs at a
    temperature T below 1 are noisier by the factor 1/T, so their differences are multiplied by T.
    """

    tokens: int
    mean: float
    max: float
    lower_bound: float

    @classmethod
    def of(cls, table: TokenTable) -> Distance:
        if not len(table):
            return cls(0, 0.0, 0.0, 0.0)
        diff = table.diff.abs().double()  # a sum of float32 values may overflow
        noise = diff * table.temperature.clamp(max=1.0)
        error = noise.std(correction=0) / len(table) ** 0.5
        lower_bound = (
            float(noise.mean() - STANDARD_ERRORS * error) if len(table) >= MIN_TOKENS else 0.0
        )
        return cls(len(table), float(diff.mean()), float(diff.max()), max(0.0, lower_bound))
