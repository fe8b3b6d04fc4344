"""Options of the optimizer that do not fit each other, the weights or the installed packages stop
the run at its start."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from grpo_core.settings import load_settings
from grpo_trainer import loop
from grpo_trainer.errors import UnusableOptimizer
from grpo_trainer.settings import TrainerSettings
from grpo_trainer.updates import adamw_8bit
from grpo_trainer.updates.adamw_8bit import AdamW8bit
from grpo_trainer.updates.build import build_update
from tests.unit.trainer.forward_rig import qwen

REQUIRED = ["--model-name", "m", "--weight-bridge-mode"]
MASTERS = ("--master-dtype", "bfloat16")
EIGHT_BITS = ("--optimizer", "adamw_8bit")
WEIGHTS = [torch.zeros(8, dtype=torch.bfloat16)]


def settings(*flags: str, mode: str = "shared_vllm") -> TrainerSettings:
    environment = {"REDIS_URL": "redis://127.0.0.1:6379/0"}
    return load_settings(TrainerSettings, [*REQUIRED, mode, *flags], environment)


def test_options_that_exclude_each_other_are_all_told_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stopped:
        settings("--fused-step", *MASTERS, *EIGHT_BITS, mode="lora_only")
    assert stopped.value.code == 2
    told = capsys.readouterr().err
    assert "--master-dtype bfloat16: in lora_only an adapter is trained" in told
    assert "--fused-step: for --optimizer adamw alone" in told
    assert "--fused-step: for --master-dtype float32 alone" in told


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ((), ("Float32Masters", "AdamW32")),
        (EIGHT_BITS, ("Float32Masters", "AdamW8bit")),
        ((*EIGHT_BITS, *MASTERS), ("Bfloat16Masters", "AdamW8bit", "Stochastic")),
        ((*MASTERS, "--rounding", "nearest"), ("Bfloat16Masters", "AdamW32", "Nearest")),
    ],
)
def test_options_choose_the_parts_and_rounding_to_the_nearest_warns(
    flags: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    with capture_logs() as logs:
        update: Any = build_update(settings(*flags), WEIGHTS)
    found = [update, *vars(update).values()]
    assert tuple(type(part).__name__ for part in found) == parts
    assert [event["log_level"] for event in logs] == ["warning"] * ("Nearest" in parts)


def test_the_fused_step_without_a_gpu_is_refused_by_name() -> None:
    with pytest.raises(UnusableOptimizer, match="needs a GPU, and the weights are on cpu"):
        build_update(settings("--fused-step"), WEIGHTS)


def test_a_kernel_that_does_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw_8bit.AdamW8bit, "_update_8bit", lambda *_: None)
    with pytest.raises(UnusableOptimizer, match="a step of 1 is off by 1"):
        AdamW8bit(torch.device("cpu"))


def test_the_policys_optimizer_is_the_one_that_was_asked_for() -> None:
    optimizer = loop.build_optimizer(qwen(torch.bfloat16), settings(*MASTERS, *EIGHT_BITS))
    assert {master.dtype for master in optimizer.masters} == {torch.bfloat16}
    with pytest.raises(UnusableOptimizer, match="weights are in float32"):
        loop.build_optimizer(qwen(), settings(*MASTERS))
