"""`--head-kernel liger`: its cases, where Triton interprets, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_trainer.errors import FastPathRefused
from grpo_trainer.forward_options import LIGER, Choice, ForwardOptions
from grpo_trainer.forward_pass import build_forward_pass
from grpo_trainer.settings import parse_settings
from tests.unit.trainer.forward_rig import qwen
from tests.unit.trainer.interpreted import require_passing

CASES = Path(__file__).with_name("liger_head_cases.py")


def test_the_cases_of_ligers_arithmetic() -> None:
    require_passing(CASES)


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
