"""Torch's operators for flash attention, computed on a CPU as their documentation has it.

`varlen_attn` itself, its derivative and its shapes for torch.compile are torch's; only the kernels
below it, which are there for GPUs alone, are stood in for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_trainer import packed_attention
from grpo_trainer.packed_attention import Flash


@dataclass(frozen=True)
class Call:
    """`window`: positions to the left and to the right that count; -1: all."""

    window: tuple[int | None, int | None]
    key_heads: int


CALLS: list[Call] = []


@contextlib.contextmanager
def flash_on_cpu() -> Iterator[None]:
    CALLS.clear()
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", _forward, "CPU")
        library.impl("_flash_attention_backward", _backward, "CPU")
        yield


def use_flash(policy: Any, fewer_heads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the policy were on a GPU, and in a 16-bit type."""
    monkeypatch.setattr(Flash, "on", lambda _: Flash(takes_fewer_heads=fewer_heads))
    monkeypatch.setattr(Flash, "computes", lambda *_: True)
    packed_attention.use(policy)


def _forward(
    query: Tensor,  # [N, A, D]; key and value may have fewer heads
    key: Tensor,
    value: Tensor,
    bounds_q: Tensor,
    bounds_k: Tensor,
    max_q: int,
    max_k: int,
    dropout: float,
    is_causal: bool,
    _return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **others: Any,
) -> tuple[Tensor, ...]:
    assert not any(others.values())
    assert dropout == 0
    assert all(t.stride(-1) == 1 and t.dim() == 3 for t in (query, key, value))
    assert bounds_q.dtype == bounds_k.dtype == torch.int32
    assert max_q == max_k == int(bounds_q.diff().max())
    assert (is_causal and window_size_left == -1) or window_size_left > 0
    window = (window_size_left, window_size_right)
    CALLS.append(Call(window, key.shape[1]))
    found = _attention(query, key, value, bounds_q, scale, window)
    logsumexp = torch.zeros(query.shape[1], query.shape[0])
    unused = torch.zeros(2, dtype=torch.uint64)
    return found, logsumexp, unused, torch.zeros(0), torch.zeros(0)


def _backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _out: Tensor,
    _logsumexp: Tensor,
    bounds_q: Tensor,
    _bounds_k: Tensor,
    *_: Any,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    window = (window_size_left, window_size_right)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _attention(q, k, v, bounds_q, scale, window)

    return torch.func.vjp(forward, query, key, value)[1](gradient)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    scale: float | None,
    window: tuple[int | None, int | None],
) -> Tensor:
    left, right = window
    assert left is not None
    assert right is not None
    assert scale is not None
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    parts = []
    for start, end in bounds.unfold(0, 2, 1).tolist():
        q, k, v = (t[start:end].transpose(0, 1) for t in (query, key, value))  # [A, n, D]
        place = torch.arange(end - start)
        to_the_left = place[:, None] - place
        seen = (to_the_left >= -right) & ((to_the_left <= left) | (left < 0))
        scores = (q @ k.mT * scale).masked_fill(~seen, -torch.inf)
        parts.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(parts)
