"""Lays out a micro-batch for the model: as padded rows, or as packed sequences.

Packed sequences stand end to end in one row. The beginning that a sequence shares with the previous
one, for example the prompt of their group, is computed once. So the row has each sequence's *own*
tokens; its attention gathers the keys and values of all its tokens from the row.

Legend: B sequences, T positions after the causal shift, N tokens of the row; S sequences of one
attention call, Q and K the largest number of their own and of all their tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from grpo_trainer.data.collate import MicroBatch, sent
from grpo_trainer.data.cuts import Division, by_length, by_prefix

CALL_SCORES = 20_000
"""What one more attention call costs, as a number of attention scores. Measured on 2 cores."""


@dataclass(frozen=True)
class ModelInputs:
    """The arguments of a model call. `places`: where the model computes each position of each
    sequence, counted over all rows; any place for padding."""

    arguments: dict[str, Any]  # by keyword
    places: Tensor  # [B, T] int64


@dataclass(frozen=True)
class Layout:
    """`cut` divides a step into the micro-batches that suit the layout."""

    inputs: Callable[[MicroBatch], ModelInputs]
    cut: Division


def padded(micro: MicroBatch) -> ModelInputs:
    """Padded rows: [B, T]."""
    places = torch.arange(micro.inputs.numel(), device=micro.inputs.device)
    return ModelInputs(
        {"input_ids": micro.inputs, "use_cache": False}, places.view(micro.inputs.shape)
    )


def packed(micro: MicroBatch) -> ModelInputs:
    """Packed sequences: [1, N]. Position ids continue after the shared beginning."""
    device = micro.inputs.device
    lengths, shared = torch.tensor(micro.lengths), torch.tensor(micro.shared)  # [B] each
    column = torch.arange(micro.inputs.shape[1])  # [T]
    is_own = (column >= shared.unsqueeze(-1)) & (column < lengths.unsqueeze(-1))  # [B, T]
    row, position = is_own.nonzero(as_tuple=True)  # [N] each
    places = torch.zeros(micro.inputs.shape, dtype=torch.long)
    places[is_own] = torch.arange(len(row))
    for number, length in enumerate(micro.shared):
        if length:
            places[number, :length] = places[number - 1, :length]
    # A sequence without own tokens needs no attention.
    parts = [
        Part(places[i, : micro.lengths[i]], micro.shared[i])
        for i in range(len(micro.lengths))
        if micro.lengths[i] > micro.shared[i]
    ]
    arguments = {
        "input_ids": micro.inputs[sent(row, device), sent(position, device)].unsqueeze(0),
        "position_ids": sent(position, device).unsqueeze(0),
        "bounds": PackedBounds(
            queries=sent(_bounds([part.own for part in parts]), device),
            keys=sent(_bounds([part.length for part in parts]), device),
            longest_queries=max(part.own for part in parts),
            longest_keys=max(part.length for part in parts),
            key_places=_key_places(parts, device),
        ),
        "attention_calls": AttentionCalls(parts, device),
        "use_cache": False,
    }
    return ModelInputs(arguments, sent(places, device))


class KeyPlaces(NamedTuple):
    """Which token of the row each gathered key belongs to, and all gathered keys of each token.
    Example: the sequences 0 1 2 and 0 1 3 of a row of four tokens:

        row       0 1 2 0 1 3
        gathered  0 3 1 4 2 5
        edges     0 2 4 5 6
    """

    row: Tensor  # [sum of lengths] int64, place in the row
    gathered: Tensor  # [sum of lengths] int64, places among the gathered keys, token after token
    edges: Tensor  # [N + 1] int64, where each token begins in `gathered`, and the last one ends


class PackedBounds(NamedTuple):
    """Where flash attention finds the sequences: their own tokens in the row, and all their tokens
    among the gathered keys."""

    queries: Tensor  # [parts + 1] int32, where each begins and the last one ends
    keys: Tensor  # [parts + 1] int32
    longest_queries: int
    longest_keys: int
    # None: no sequence shares a beginning, so the row has the keys. torch.compile compiles a layer
    # once more for such a row.
    key_places: KeyPlaces | None


@dataclass(frozen=True)
class Part:
    """A sequence whose attention is computed. `places`: of all its tokens, in the row; the first
    `shared` of them are also the beginning of a previous sequence."""

    places: Tensor  # [length] int64
    shared: int

    @property
    def length(self) -> int:
        return len(self.places)

    @property
    def own(self) -> int:
        return len(self.places) - self.shared


@dataclass(frozen=True)
class AttentionCall:
    """Sequences whose attention is computed together, padded to the longest one."""

    queries: Tensor  # [S, Q] int64, places of their own tokens
    keys: Tensor  # [S, K] int64, places of all their tokens
    first: Tensor  # [S, 1, 1, 1] int64, position of the first own token
    is_whole: bool  # no sequence shares a beginning, so queries and keys are the same tokens

    def mask(self, sliding_window: int | None, dtype: torch.dtype) -> Tensor | None:
        """[S, 1, Q, K] 0 where a query attends to a key, else -inf; None for plain causal
        attention."""
        longest = self.keys.shape[1]
        window = longest if sliding_window is None else sliding_window
        if self.is_whole and longest <= window:
            return None
        device = self.keys.device
        query = self.first + torch.arange(self.queries.shape[1], device=device).view(1, 1, -1, 1)
        key = torch.arange(longest, device=device).view(1, 1, 1, -1)
        attends = (key <= query) & (key > query - window)
        return torch.zeros(attends.shape, dtype=dtype, device=device).masked_fill_(
            attends.logical_not_(), -torch.inf
        )


class AttentionCalls:
    """How the attention of one micro-batch is computed without flash attention; the same in all
    layers.

    Not a tuple or a dataclass, because torch.compile would compile its lengths in.
    """

    def __init__(self, parts: Sequence[Part], device: torch.device) -> None:
        self._parts, self._device = parts, device
        self._masks: dict[int | None, list[Tensor | None]] = {}

    @cached_property
    def planned(self) -> tuple[list[AttentionCall], Tensor]:
        """The calls, and [N] the place of each token's result among those of all calls."""
        parts, device = self._parts, self._device
        calls = []
        results = torch.empty(sum(part.own for part in parts), dtype=torch.long)
        end = 0
        for together in _grouped(parts):
            width = max(part.own for part in together)
            queries = torch.zeros(len(together), width, dtype=torch.long)
            keys = torch.zeros(
                len(together), max(part.length for part in together), dtype=torch.long
            )
            for line, part in enumerate(together):
                queries[line, : part.own] = part.places[part.shared :]
                keys[line, : part.length] = part.places
                results[part.places[part.shared :]] = torch.arange(end, end + part.own)
                end += width
            first = torch.tensor([part.shared for part in together]).view(-1, 1, 1, 1)
            is_whole = not bool(first.any())
            queries, keys, first = (sent(places, device) for places in (queries, keys, first))
            calls.append(AttentionCall(queries, keys, first, is_whole))
        return calls, sent(results, device)

    def masks(self, sliding_window: int | None, dtype: torch.dtype) -> list[Tensor | None]:
        """The mask of each call; all layers with the same window share it. Not booleans, which
        every layer would convert and keep for its backward pass."""
        if sliding_window not in self._masks:
            calls, _ = self.planned
            self._masks[sliding_window] = [call.mask(sliding_window, dtype) for call in calls]
        return self._masks[sliding_window]


def _key_places(parts: Sequence[Part], device: torch.device) -> KeyPlaces | None:
    if not any(part.shared for part in parts):
        return None
    row = torch.cat([part.places for part in parts])
    edges = functional.pad(row.bincount().cumsum(0), (1, 0))
    return KeyPlaces(*(sent(places, device) for places in (row, row.argsort(stable=True), edges)))


def _grouped(parts: Sequence[Part]) -> list[list[Part]]:
    """Sequences of nearly the same length together, so that padding costs less than another call
    would. Those without a shared beginning are apart, because they need no mask."""
    calls: list[list[Part]] = []
    queries = keys = 0
    for part in sorted(parts, key=lambda part: (part.shared > 0, -part.own, -part.length)):
        wide, long = max(queries, part.own), max(keys, part.length)
        call = calls[-1] if calls else []
        joined = wide * long * (len(call) + 1)
        apart = queries * keys * len(call) + part.own * part.length + CALL_SCORES
        if call and joined <= apart and (call[0].shared > 0) == (part.shared > 0):
            call.append(part)
            queries, keys = wide, long
        else:
            calls.append([part])
            queries, keys = part.own, part.length
    return calls


def _bounds(sizes: Sequence[int]) -> Tensor:
    """Where each part begins and the last one ends: [parts + 1] int32."""
    return torch.tensor([0, *sizes]).cumsum(0).int()


PADDED = Layout(padded, by_length)
PACKED = Layout(packed, by_prefix)
