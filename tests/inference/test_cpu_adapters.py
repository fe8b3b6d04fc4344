"""Adapters on a CPU: each row gets its own adapter, and rows without one get none."""

from __future__ import annotations

import pytest
import torch

ROWS, WIDTH, RANK, SLICES = 7, 8, 2, (4, 6)
SLOTS = torch.tensor([1, -1, 0, 1, -1, 0, 1])
"""By row; -1: no adapter. Every slot is in use."""


@pytest.mark.parametrize("slots", [SLOTS, torch.full((ROWS,), 1), torch.full((ROWS,), -1)])
def test_rows_of_any_mixture_get_their_own_adapter(slots: torch.Tensor) -> None:
    from grpo_vllm.engine.vllm_compat import cpu

    torch.manual_seed(0)
    x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, sum(SLICES))
    a = [torch.randn(2, 1, RANK, WIDTH) for _ in SLICES]
    b = [torch.randn(2, 1, size, RANK) for size in SLICES]
    expected = y.clone()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            parts = [bs[slot, 0] @ (as_[slot, 0] @ x[row]) for as_, bs in zip(a, b, strict=True)]
            expected[row] += 0.5 * torch.cat(parts)
    ends = torch.bincount(slots + 1, minlength=3).cumsum(0)
    rows = slots.argsort(stable=True)
    cpu._add_adapters(y, x, a, b, list(SLICES), 0.5, rows, ends)
    torch.testing.assert_close(y, expected)
