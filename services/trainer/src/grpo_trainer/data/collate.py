"""Converts usable groups of a batch to the tensors of its micro-batches.

Legend: B sequences of a micro-batch, T positions after the causal shift (longest sequence - 1).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise

import numpy
import torch
from torch import Tensor

from grpo_core.wire.fields import MASKED, PROMPT_LOGPROB
from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.algo.advantage import group_advantages
from grpo_trainer.data.group_checks import UsableGroup
from grpo_trainer.data.micro_batches import Cut, common_prefix
from grpo_trainer.data.stats import BatchStats, batch_stats


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward pass and of the loss."""

    inputs: Tensor  # [B, T] int64
    targets: Tensor  # [B, T] int64
    behaviour_logp: Tensor  # [B, T] float32, 1.0 where not sampled
    token_weight: Tensor  # [B, T] float32, sums to (sequences with trained tokens) / batch size
    advantages: Tensor  # [B] float32
    temperature: Tensor  # [B] float32
    lengths: tuple[int, ...]  # [B] inputs of each sequence, at least 1; padding follows them
    shared: tuple[int, ...]  # [B] first inputs that equal those of the previous sequence

    def to(self, device: torch.device) -> MicroBatch:
        """Move to `device`. Tensors that are already there are not copied."""
        return replace(
            self,
            inputs=self.inputs.to(device),
            targets=self.targets.to(device),
            behaviour_logp=self.behaviour_logp.to(device),
            token_weight=self.token_weight.to(device),
            advantages=self.advantages.to(device),
            temperature=self.temperature.to(device),
        )


@dataclass(frozen=True)
class Origin:
    """The group, environment and weights that one sequence comes from."""

    group: int
    """Index of its group in the batch."""
    env_id: int | None
    version: PolicyVersion | None
    """The policy version that sampled all of it; None if it is unknown or there are several."""
    siblings: int
    """Number of sequences in its group, itself included."""
    shared_tokens: int
    """Length of the common beginning of all these sequences: the prompt, often a little more."""


@dataclass(frozen=True)
class Batch:
    """One step's micro-batches, in host memory. `origins` has one entry for each row, in order."""

    micro_batches: list[MicroBatch]
    origins: list[Origin]
    stats: BatchStats

    def tokens(self, sequence: int, length: int) -> Tensor:
        """[length] the first `length` (at least 2) tokens of a sequence."""
        ends = list(accumulate(len(micro.lengths) for micro in self.micro_batches))
        number = bisect_right(ends, sequence)
        micro = self.micro_batches[number]
        row = sequence - ends[number] + len(micro.lengths)
        last = micro.targets[row, length - 2 : length - 1]
        return torch.cat([micro.inputs[row, : length - 1], last])


@dataclass(frozen=True)
class _Row:
    """One sequence, shifted: position t predicts targets[t]."""

    inputs: list[int]
    targets: list[int]
    trained: list[bool]
    behaviour_logp: list[float]
    advantage: float
    temperature: float


def collate(
    groups: Sequence[UsableGroup], seq_len: int, tokens_per_micro_batch: int, cut: Cut
) -> Batch:
    """Build one step's micro-batches.

    Sequences longer than `seq_len` tokens are cut at the end. All sequences have the same weight,
    and so do all trained tokens of one: token_weight = 1 / (its trained tokens * all sequences).

    Args:
        seq_len: in tokens
        cut: divides the sequences into micro-batches
    """
    rows = [row for group in groups for row in _rows(group, seq_len)]
    origins = [origin for i, group in enumerate(groups) for origin in _origins(i, group)]
    micro_batches = cut([row.inputs for row in rows], tokens_per_micro_batch)
    return Batch(
        micro_batches=[_micro_batch([rows[i] for i in part], len(rows)) for part in micro_batches],
        origins=[origins[i] for part in micro_batches for i in part],
        stats=batch_stats(groups, seq_len),
    )


def _rows(usable: UsableGroup, seq_len: int) -> Iterable[_Row]:
    group = usable.group
    advantages = group_advantages(torch.tensor(group.scores)).tolist()
    for i in range(group.size):
        tokens, masks = group.tokens[i][:seq_len], group.masks[i][:seq_len]
        yield _Row(
            inputs=tokens[:-1],
            targets=tokens[1:],
            trained=[mask != MASKED for mask in masks[1:]],
            behaviour_logp=usable.inference_logprobs[i][1:seq_len],
            advantage=0.0 if usable.zero_advantage[i] else advantages[i],
            temperature=usable.temperatures[i],
        )


def _origins(index: int, usable: UsableGroup) -> Iterable[Origin]:
    group = usable.group
    versions = usable.facts.policy_version
    if len(versions) != group.size:
        versions = []
    # The first and the last in alphabetical order differ where any two differ.
    shared = common_prefix(min(group.tokens), max(group.tokens))
    for i in range(group.size):
        first, last = versions[i] if versions else (None, None)
        version = first if first == last else None
        yield Origin(index, group.env_id, version, group.size, shared)


def _micro_batch(rows: list[_Row], batch_sequences: int) -> MicroBatch:
    inputs = [row.inputs for row in rows]
    lengths = tuple(max(1, len(row)) for row in inputs)
    column = torch.arange(max(lengths))  # [T]
    is_real = column < torch.tensor([len(row) for row in inputs]).unsqueeze(-1)  # [B, T]
    trained = _padded([row.trained for row in rows], is_real, 0.0, numpy.float32)  # [B, T]
    per_sequence = trained.sum(-1, keepdim=True).clamp_min(1)  # [B, 1]
    behaviour_logp = [row.behaviour_logp for row in rows]
    return MicroBatch(
        inputs=_padded(inputs, is_real, 0, numpy.int64),
        targets=_padded([row.targets for row in rows], is_real, 0, numpy.int64),
        behaviour_logp=_padded(behaviour_logp, is_real, PROMPT_LOGPROB, numpy.float32),
        token_weight=trained / per_sequence / batch_sequences,
        advantages=torch.tensor([row.advantage for row in rows]),
        temperature=torch.tensor([row.temperature for row in rows]),
        lengths=lengths,
        shared=(0, *(common_prefix(a, b) for a, b in pairwise(inputs))),
    )


def _padded(
    rows: Sequence[Sequence[float]], is_real: Tensor, fill: float, dtype: type[numpy.generic]
) -> Tensor:
    """Args: is_real: [B, T] the places of the values of `rows`"""
    # torch would take five times as long to read the lists.
    values = torch.from_numpy(numpy.fromiter(chain.from_iterable(rows), dtype))
    return torch.full(is_real.shape, fill, dtype=values.dtype).masked_scatter_(is_real, values)
