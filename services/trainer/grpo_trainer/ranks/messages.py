"""The leader's messages to the other ranks. A message is a header of fixed size; a batch follows it
as three tensors.

Legend: M micro-batches, B sequences, T positions, A advantages of a sequence (1 or T).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from grpo_trainer.data.collate import MicroBatch
from grpo_trainer.ranks.group import Ranks

HEADER_NUMBERS = 5


class Command(IntEnum):
    """What all ranks do next. The comment names the numbers of the message."""

    STOP = 0
    LOAD_MODEL = 1  # the places of data type and optimizer in their lists
    LOAD_STATE = 2
    COLLECT_STATE = 3
    COMPARE = 4  # a batch follows
    GRADIENTS = 5  # step, KL coefficient, MaxEnt's tau, dropout; a batch follows
    STEP = 6  # step
    WRITE = 7


@dataclass(frozen=True)
class Message:
    command: Command
    numbers: Sequence[float] = ()


def send(ranks: Ranks, message: Message) -> None:
    _header(ranks, [float(message.command), *message.numbers])


def receive(ranks: Ranks) -> Message:
    command, *numbers = _header(ranks, [])
    return Message(Command(int(command)), numbers)


def _header(ranks: Ranks, values: Sequence[float]) -> list[float]:
    header = torch.zeros(HEADER_NUMBERS, dtype=torch.float64)
    header[: len(values)] = torch.tensor(values, dtype=torch.float64)
    found: list[float] = ranks.from_leader(header, "the next message").tolist()
    return found


def send_batch(ranks: Ranks, micro_batches: Sequence[MicroBatch]) -> None:
    """Args: micro_batches: in host memory"""
    count = torch.tensor([len(micro_batches)])
    shapes = torch.tensor([_shape(micro) for micro in micro_batches])  # [M, 4]
    integers, floats = ([f(m) for m in micro_batches] for f in (_integers, _floats))
    for tensor in (count, shapes, torch.cat(integers), torch.cat(floats)):
        ranks.from_leader(tensor, "a batch")


def receive_batch(ranks: Ranks) -> list[MicroBatch]:
    """The micro-batches that the leader sends, in host memory."""
    count = int(ranks.from_leader(torch.zeros(1, dtype=torch.int64), "a batch"))
    shapes = ranks.from_leader(torch.zeros(count, 4, dtype=torch.int64), "a batch").tolist()
    sizes = [_sizes(*shape) for shape in shapes]
    lengths = [[sum(of_micro) for of_micro in pair] for pair in sizes]
    integers, floats = (
        torch.split(
            ranks.from_leader(torch.zeros(sum(all_of), dtype=dtype), "a batch"), list(all_of)
        )
        for all_of, dtype in zip(zip(*lengths, strict=True), _DTYPES, strict=True)
    )
    parts = zip(shapes, sizes, integers, floats, strict=True)
    return [
        _micro_batch(shape, torch.split(i, s[0]), torch.split(f, s[1])) for shape, s, i, f in parts
    ]


_DTYPES = (torch.int64, torch.float32)


def _shape(micro: MicroBatch) -> list[int]:
    return [*micro.inputs.shape, micro.advantages.shape[1], int(micro.reference_logp is not None)]


def _sizes(b: int, t: int, a: int, has_reference: int) -> tuple[list[int], list[int]]:
    """Of the tensors in `_integers` and `_floats`."""
    return [b * t, b * t, b, b, b], [b * t, b * t, b * a, b, b * t * has_reference]


def _integers(micro: MicroBatch) -> Tensor:
    rows = (micro.lengths, micro.shared, micro.is_logged)
    flat = [micro.inputs.flatten(), micro.targets.flatten(), *map(torch.tensor, rows)]
    return torch.cat([tensor.long() for tensor in flat])


def _floats(micro: MicroBatch) -> Tensor:
    reference = () if micro.reference_logp is None else (micro.reference_logp,)
    tensors = (micro.behaviour_logp, micro.token_weight, micro.advantages, micro.temperature)
    return torch.cat([tensor.float().flatten() for tensor in (*tensors, *reference)])


def _micro_batch(
    shape: Sequence[int], integers: Sequence[Tensor], floats: Sequence[Tensor]
) -> MicroBatch:
    b, t, a, has_reference = shape
    inputs, targets, lengths, shared, is_logged = integers
    behaviour_logp, token_weight, advantages, temperature, reference_logp = floats
    return MicroBatch(
        inputs=inputs.view(b, t),
        targets=targets.view(b, t),
        behaviour_logp=behaviour_logp.view(b, t),
        token_weight=token_weight.view(b, t),
        advantages=advantages.view(b, a),
        temperature=temperature,
        lengths=tuple(lengths.tolist()),
        shared=tuple(shared.tolist()),
        is_logged=tuple(map(bool, is_logged.tolist())),
        reference_logp=reference_logp.view(b, t) if has_reference else None,
    )
