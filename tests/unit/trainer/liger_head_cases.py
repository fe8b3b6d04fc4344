"""liger's arithmetic of the fused head against torch's. Run by test_liger_head.py, where Triton
interprets; on a GPU with LIGER_TEST_DEVICE=cuda, where it compiles."""

from __future__ import annotations

import os

import pytest
import torch

from grpo_trainer.fused_head import EAGER, linear_logprobs
from grpo_trainer.liger_head import liger_arithmetic

DEVICE = torch.device(os.environ.get("LIGER_TEST_DEVICE", "cpu"))
ROWS, HIDDEN, VOCABULARY = 7, 16, 301
"""The vocabulary is no power of two: the last block of the kernel is not full."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_and_gradients_are_torchs(dtype: torch.dtype) -> None:
    drawn = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=True).to(DEVICE, dtype)
    hidden = torch.randn(ROWS, HIDDEN, generator=drawn).to(DEVICE, dtype)
    targets = torch.randint(VOCABULARY, (ROWS,), generator=drawn).to(DEVICE)
    temperature = torch.linspace(0.5, 1.7, ROWS, device=DEVICE)
    weights = torch.linspace(-1, 2, ROWS, device=DEVICE)
    outcomes = []
    for arithmetic in (EAGER, liger_arithmetic()):
        inputs = hidden.clone().requires_grad_()
        head.zero_grad(set_to_none=True)
        found = linear_logprobs(
            inputs, head, targets, temperature, arithmetic, chunk_logits=3 * VOCABULARY
        )
        (weights * found).sum().backward()  # type: ignore[no-untyped-call]
        outcomes.append([found.detach(), inputs.grad, head.weight.grad, head.bias.grad])
    assert float(outcomes[0][0].std()) > 0.1
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    for expected, got in zip(*outcomes, strict=True):
        assert float(expected.abs().max()) > 0
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
