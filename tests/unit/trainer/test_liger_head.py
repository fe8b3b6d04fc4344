"""`--head-kernel liger`: its arithmetic is torch's, and it is refused without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from grpo_trainer import liger_head
from grpo_trainer.errors import FastPathRefused
from grpo_trainer.forward_options import LIGER, Choice, ForwardOptions
from grpo_trainer.forward_pass import build_forward_pass
from grpo_trainer.fused_head import EAGER, linear_logprobs
from grpo_trainer.liger_head import liger_arithmetic
from grpo_trainer.settings import parse_settings
from tests.unit.trainer.forward_rig import qwen

ROWS, HIDDEN, VOCABULARY = 7, 16, 301
"""The vocabulary is no power of two: the last block of the kernel is not full."""


def require_torchs_numbers(dtype: torch.dtype) -> None:
    """Of liger's arithmetic in the fused head: values and every gradient."""
    drawn = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=True).to(dtype)
    hidden = torch.randn(ROWS, HIDDEN, generator=drawn).to(dtype)
    targets = torch.randint(VOCABULARY, (ROWS,), generator=drawn)
    temperature, weights = torch.linspace(0.5, 1.7, ROWS), torch.linspace(-1, 2, ROWS)
    outcomes = []
    for arithmetic in (EAGER, liger_arithmetic()):
        inputs = hidden.clone().requires_grad_()
        head.zero_grad(set_to_none=True)
        logp = linear_logprobs(inputs, head, targets, temperature, arithmetic, 3 * VOCABULARY)
        (weights * logp).sum().backward()  # type: ignore[no-untyped-call]
        outcomes.append([logp.detach(), inputs.grad, head.weight.grad, head.bias.grad])
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    for expected, found in zip(*outcomes, strict=True):
        assert float(expected.std()) > 1e-3
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def cross_entropy(scaled: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """As liger's kernel, which runs on a GPU alone: the gradient replaces the logits."""
    of_rows = torch.arange(len(targets))
    loss = -scaled.detach().log_softmax(-1)[of_rows, targets]
    if scaled.requires_grad:
        scaled = scaled.detach().copy_(scaled.detach().softmax(-1))
        scaled[of_rows, targets] -= 1
    return loss, scaled


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_temperature_sign_and_type_are_right_around_the_kernel(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liger_head, "_cross_entropy", cross_entropy)
    require_torchs_numbers(dtype)


@pytest.mark.full
def test_ligers_own_kernel_gives_torchs_numbers() -> None:
    """In a process in which Triton interprets from the beginning."""
    code = f"import torch; from {__name__} import require_torchs_numbers as require; "
    done = subprocess.run(
        [sys.executable, "-c", code + "require(torch.float32); require(torch.bfloat16)"],
        cwd=Path(__file__).parents[3],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert done.returncode == 0, done.stderr


def test_it_is_refused_without_a_gpu() -> None:
    options = ForwardOptions(fused_head=Choice.ON, head_kernel=LIGER)
    with pytest.raises(FastPathRefused, match=r"--head-kernel liger needs a GPU.* on cpu"):
        build_forward_pass(qwen(), options)


def test_it_needs_the_fused_head(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model-name", "m", "--weight-bridge-mode", "shared_vllm", "--head-kernel", "liger")
    assert parse_settings([*words, "--fused-head", "on"]).head_kernel == LIGER
    with pytest.raises(SystemExit):
        parse_settings([*words, "--fused-head", "off"])
    assert "computes inside the fused head" in capsys.readouterr().err
