"""A micro-batch as the model takes it: padded rows, or sequences end to end without padding.

Legend: B sequences, T positions after the causal shift, N positions of the longest row of the
model call. Attention is causal, so padding on the right needs no mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from grpo_trainer.data.collate import MicroBatch


@dataclass(frozen=True)
class LaidOut:
    """`starts`: where each sequence begins among all positions of the call, row after row."""

    model_inputs: dict[str, Any]  # keyword arguments of the model
    starts: Tensor  # [B] int64

    def places(self, row: Tensor, column: Tensor) -> Tensor:
        """Of positions of the micro-batch among those of the call: [K], [K] → [K]."""
        return self.starts[row] + column


class SequenceLengths:
    """`values`: in host memory, where a loop over the sequences needs them.

    No tuple: torch.compile would compile in how many there are, and read each.
    """

    def __init__(self, values: tuple[int, ...]) -> None:
        self.values = values


Layout = Callable[[MicroBatch], LaidOut]


def padded(micro: MicroBatch) -> LaidOut:
    """[B, T] as it is."""
    rows, width = micro.inputs.shape
    starts = torch.arange(0, rows * width, width, device=micro.inputs.device)
    return LaidOut({"input_ids": micro.inputs, "use_cache": False}, starts)


def packed(micro: MicroBatch) -> LaidOut:
    """[1, N], N the sum of the lengths. Positions count from 0 in every sequence; where sequences
    meet is told under the names that transformers gives to flash attention, and as lengths."""
    device = micro.inputs.device
    sizes = torch.tensor(micro.lengths)  # [B]
    bounds = torch.tensor([0, *accumulate(micro.lengths)])  # [B + 1]
    row = torch.arange(len(sizes)).repeat_interleave(sizes)  # [N]
    column = torch.arange(len(row)) - bounds[:-1].repeat_interleave(sizes)  # [N]
    position_ids = column.to(device)
    sequence_bounds = bounds.int().to(device)
    longest = max(micro.lengths)
    model_inputs = {
        "input_ids": micro.inputs[row.to(device), position_ids].unsqueeze(0),
        "position_ids": position_ids.unsqueeze(0),
        "cu_seq_lens_q": sequence_bounds,
        "cu_seq_lens_k": sequence_bounds,
        "max_length_q": longest,
        "max_length_k": longest,
        "sequence_lengths": SequenceLengths(micro.lengths),
        "use_cache": False,
    }
    return LaidOut(model_inputs, bounds[:-1].to(device))
