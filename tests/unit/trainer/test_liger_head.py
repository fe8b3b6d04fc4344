"""`--head-kernel liger`: its cases, where Triton interprets, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_trainer import liger_head
from grpo_trainer.errors import FastPathRefused, MissingPackage
from grpo_trainer.forward_options import LIGER, Choice, ForwardOptions
from grpo_trainer.forward_pass import build_forward_pass
from tests.unit.trainer.forward_rig import qwen
from tests.unit.trainer.interpreted import require_passing

CASES = Path(__file__).with_name("liger_head_cases.py")


def test_the_cases_of_ligers_arithmetic() -> None:
    require_passing(CASES)


def test_it_is_refused_without_a_gpu() -> None:
    options = ForwardOptions(fused_head=Choice.ON, head_kernel=LIGER)
    with pytest.raises(FastPathRefused, match=r"--head-kernel liger needs a GPU.* on cpu"):
        build_forward_pass(qwen(), options)


def test_a_missing_package_is_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liger_head, "find_spec", lambda _: None)
    with pytest.raises(MissingPackage, match=r"pip install liger-kernel==0\.8\.5"):
        liger_head.liger_arithmetic()
