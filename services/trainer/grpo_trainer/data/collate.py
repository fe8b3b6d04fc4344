"""Converts usable sequences of a batch to the tensors of its micro-batches, of a bounded number of
tokens each.

Legend: B sequences of a micro-batch, T positions after the causal shift (longest sequence - 1).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, pairwise
from typing import Any

import numpy
import torch
from torch import Tensor

from grpo_core.tree.objectives import AggregationName, Objective
from grpo_core.wire.fields import PROMPT_LOGPROB
from grpo_core.wire.scored_group import ScoredGroup
from grpo_trainer.data.cuts import Cut
from grpo_trainer.data.groups import UsableSequence, common_prefix
from grpo_trainer.data.stats import data_metrics
from grpo_trainer.ranks import Ranks


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`. A copy to a GPU is queued there; the host does not wait for it."""
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=device.type != "cpu")


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward pass and of the loss.

    Example: a group with the prompt 5 6, the completions 7 (score 1) and 8 9 10 (score 0), with
    its advantages:

        inputs        5 6 0 0    5 6 8 9
        targets       6 7 0 0    6 8 9 10
        token_weight  0 1/2 0 0  0 1/6 1/6 1/6
        advantages    1          -1
        lengths       2          4
        shared        0          2
    """

    inputs: Tensor  # [B, T] int64
    targets: Tensor  # [B, T] int64
    behaviour_logp: Tensor  # [B, T] float32, 1.0 where not sampled
    token_weight: Tensor  # [B, T] float32, above 0 for trained tokens alone
    advantages: Tensor  # float32, [B, 1], or [B, T] if the environment sends one for each token;
    # 0 until `advantages.with_advantages`
    temperature: Tensor  # [B] float32
    lengths: tuple[int, ...]  # [B] inputs of each sequence, at least 1; padding follows them
    shared: tuple[int, ...]  # [B] first inputs that equal those of the previous sequence
    is_logged: tuple[bool, ...]  # [B] whether behaviour_logp is known, or must be recomputed
    reference_logp: Tensor | None = None  # [B, T] float32, of the reference model, if there is one
    places: tuple[Tensor, Tensor] | None = None  # see `trained`

    def trained(self) -> tuple[Tensor, Tensor]:
        """Rows and columns of the trained targets: [K] int64 each. After `to` they are known, so
        that a GPU need not be asked."""
        if self.places is not None:
            return self.places
        row, column = (self.token_weight > 0).nonzero(as_tuple=True)
        return row, column

    def _with_tensors(self, change: Callable[[Tensor], Tensor]) -> MicroBatch:
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        changed: dict[str, Any] = {name: change(value) for name, value in tensors.items()}
        return replace(self, **changed)

    def to(self, device: torch.device) -> MicroBatch:
        """Move to `device`. Tensors that are already there are not copied."""
        row, column = (sent(places, device) for places in self.trained())
        moved = self._with_tensors(lambda tensor: sent(tensor, device))
        return replace(moved, places=(row, column))

    def without_weight(self) -> MicroBatch:
        """A single token of it, which adds 0 to every sum."""
        return replace(
            self._with_tensors(lambda t: t[:1, :1] if t.dim() == 2 else t[:1]),
            token_weight=torch.zeros(1, 1),
            advantages=torch.zeros(1, 1),
            reference_logp=None if self.reference_logp is None else torch.zeros(1, 1),
            lengths=(1,),
            shared=(0,),
            is_logged=(True,),
            places=None,
        )

    def with_recomputed(self, logp: Tensor) -> MicroBatch:
        """With the trainer's logprobs from before the update in place of those that were not
        logged, so that their importance ratio is 1. Args: logp: [B, T]"""
        if all(self.is_logged):
            return self
        is_logged = torch.tensor(self.is_logged, device=logp.device).unsqueeze(-1)
        return replace(self, behaviour_logp=self.behaviour_logp.where(is_logged, logp.detach()))


@dataclass(frozen=True)
class TeacherDistance:
    """Over the trained tokens of a batch. `reverse_kl`: mean of the student's logprob minus the
    teacher's, in nats, over the tokens that the teacher scored; `scored`: their share."""

    reverse_kl: float | None
    scored: float


@dataclass(frozen=True)
class Batch:
    """The data of one step. On ranks above 0 there are the micro-batches alone.

    Args:
        micro_batches: in host memory
        sequences: of each row
        order: of each row, its number among the sequences of all groups
        groups: those that are trained on, without padding
        tokens: of prompts and completions, without padding
        metrics: of the groups, by name
        batch_id, received: the batch of run-api, and all its groups as received
        dropped: number of its groups that are "unusable", "stale" (both also of the batches that
            were skipped before this one) or "repeated" (trained on nevertheless)
        weights_entropy: mean over groups of the entropy of MaxEnt-GRPO's weights in nats, if they
            are the advantages
        teacher: comparison with a teacher, if its logprobs are part of the advantages

    Example: of batch 5 with the groups a, b and c of two completions each, b is too old. The first
    micro-batch holds the sequences 0 and 2, the second one 3 and 1:

        batch_id 5, received [a, b, c], dropped {stale: 1}, groups [a, c]
        order        0    2      3    1
        sequences    a0   c0     c1   a1
    """

    micro_batches: list[MicroBatch]
    sequences: Sequence[UsableSequence] = ()
    order: Sequence[int] = ()
    groups: Sequence[ScoredGroup] = ()
    tokens: int = 0
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    batch_id: int = 0
    received: Sequence[ScoredGroup] = ()
    dropped: Counter[str] = field(default_factory=Counter)
    weights_entropy: float | None = None
    teacher: TeacherDistance | None = None

    def in_group_order(self, rows: Sequence[Tensor]) -> Tensor:
        """[sequences] Args: rows: [B] of each micro-batch"""
        values = torch.cat([*rows])
        return torch.empty_like(values).index_copy_(0, torch.tensor(self.order), values)


def broadcast_batch(batch: Batch | None, ranks: Ranks) -> Batch:
    """Rank 0's micro-batches, on every rank. Args: batch: None on other ranks"""
    known = None if batch is None else [vars(micro) for micro in batch.micro_batches]
    found = ranks.broadcast(known, "a batch") or []
    return batch or Batch([MicroBatch(**fields) for fields in found])


def collate(
    sequences: Sequence[UsableSequence],
    seq_len: int,
    tokens_per_micro_batch: int,
    cut: Cut,
    objective: Objective,
) -> Batch:
    """Build one step's micro-batches. Sequences longer than `seq_len` tokens are cut at the end.

    Args:
        sequences: of whole groups, group after group
        seq_len: in tokens
        cut: divides the sequences into micro-batches
        objective: decides the token weights
    """
    weigh = partial(
        token_weights,
        aggregation=objective.aggregation,
        sequences=len(sequences),
        tokens=sum(sum(sequence.trained[1:seq_len]) for sequence in sequences),
        constant=objective.aggregation_tokens or seq_len,
    )
    inputs = [sequence.tokens[:seq_len][:-1] for sequence in sequences]
    parts = cut(inputs, tokens_per_micro_batch)
    order = [i for part in parts for i in part]
    groups = [sequence.group for sequence in sequences if sequence.index == 0]
    return Batch(
        [_micro_batch([sequences[i] for i in part], seq_len, weigh) for part in parts],
        [sequences[i] for i in order],
        order,
        groups,
        sum(min(len(sequence.tokens), seq_len) for sequence in sequences),
        data_metrics(groups, seq_len),
    )


def _micro_batch(
    sequences: Sequence[UsableSequence], seq_len: int, weigh: Callable[[Tensor], Tensor]
) -> MicroBatch:
    """Position t predicts targets[t]. Args: weigh: [B, T] bool, which targets are trained on →
    [B, T] their weights"""
    inputs = [sequence.tokens[:seq_len][:-1] for sequence in sequences]
    targets = slice(1, seq_len)
    lengths = tuple(max(1, len(row)) for row in inputs)
    column = torch.arange(max(lengths))  # [T]
    is_real = column < torch.tensor([len(row) for row in inputs]).unsqueeze(-1)  # [B, T]
    trained = [sequence.trained[targets] for sequence in sequences]
    behaviour_logp = [sequence.behaviour_logp[targets] for sequence in sequences]
    return MicroBatch(
        inputs=_padded(inputs, is_real, 0, numpy.int64),
        targets=_padded([s.tokens[targets] for s in sequences], is_real, 0, numpy.int64),
        behaviour_logp=_padded(behaviour_logp, is_real, PROMPT_LOGPROB, numpy.float32),
        token_weight=weigh(_padded(trained, is_real, False, numpy.bool_)),
        advantages=torch.zeros(len(sequences), 1),
        temperature=torch.tensor([sequence.temperature for sequence in sequences]),
        lengths=lengths,
        is_logged=tuple(s.is_logged or s.has_own_logprobs for s in sequences),
        shared=(0, *(common_prefix(a, b) for a, b in pairwise(inputs))),
    )


def _padded(
    rows: Sequence[Sequence[float]], is_real: Tensor, fill: float, dtype: type[numpy.generic]
) -> Tensor:
    """[B, T] the values of `rows` where `is_real`, `fill` elsewhere."""
    # torch would take five times as long to read the lists.
    values = torch.from_numpy(numpy.fromiter(chain.from_iterable(rows), dtype))
    return torch.full(is_real.shape, fill, dtype=values.dtype).masked_scatter_(is_real, values)


def token_weights(
    is_trained: Tensor, aggregation: AggregationName, sequences: int, tokens: int, constant: int
) -> Tensor:
    """[B, T] weight of each token; 0 if it is not trained on.

    Args:
        is_trained: [B, T] bool, of some of the batch's sequences
        aggregation: sequence: the mean over a sequence's tokens, then over sequences (DeepSeekMath,
            arXiv 2402.03300, equation 3). token: the mean over all tokens (DAPO, arXiv 2503.14476,
            equation 12). constant: the sum over all tokens, divided by a number that does not
            depend on their lengths (Dr. GRPO, arXiv 2503.20783, section 3.2)
        sequences: number of sequences in the batch
        tokens: number of trained tokens in the batch
        constant: divisor for each sequence, in tokens
    """
    trained = is_trained.float()
    if aggregation == "token":
        return trained / max(1, tokens)
    if aggregation == "constant":
        return trained / (sequences * constant)
    return trained / trained.sum(-1, keepdim=True).clamp_min(1) / sequences
