"""Which options of the optimizer go together, with each other, with the weights and with what is
installed. Where they do not, the run stops at its start and says so."""

from __future__ import annotations

from pathlib import Path
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
from tests.unit.trainer.tiny_policy import model_directory

ROOT = Path(__file__).parents[3]
REQUIRED = ["--model-name", "m", "--weight-bridge-mode"]


def settings(*flags: str, mode: str = "shared_vllm") -> TrainerSettings:
    environment = {"REDIS_URL": "redis://127.0.0.1:6379/0"}
    return load_settings(TrainerSettings, [*REQUIRED, mode, *flags], environment)


def weights(dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [torch.zeros(8, dtype=dtype), torch.zeros(4, dtype=dtype)]


MASTERS = ("--master-dtype", "bfloat16")


@pytest.mark.parametrize(
    ("flags", "mode", "told"),
    [
        (("--rounding", "stochastic"), "none", "--rounding stochastic: for --master-dtype bf"),
        (MASTERS, "lora_only", "--master-dtype bfloat16: in lora_only an adapter is trained"),
        (MASTERS, "lora_restart", "in lora_restart an adapter is trained"),
        (("--fused-step", *MASTERS), "none", "--fused-step: for --master-dtype float32 alone"),
        (("--fused-step", "--optimizer", "adamw_8bit"), "none", "for --optimizer adamw alone"),
        (("--optimizer", "adafactor"), "none", "--optimizer: Input should be 'adamw' or"),
    ],
)
def test_what_does_not_go_together_is_a_mistake(
    flags: tuple[str, ...], mode: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        settings(*flags, mode=mode)
    assert stopped.value.code == 2
    assert told in capsys.readouterr().err


def test_all_mistakes_are_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings("--fused-step", *MASTERS, "--optimizer", "adamw_8bit", mode="lora_only")
    told = capsys.readouterr().err
    assert "an adapter is trained" in told
    assert "--fused-step: for --optimizer adamw alone" in told
    assert "--fused-step: for --master-dtype float32 alone" in told


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ((), ("Float32Masters", "AdamW32")),
        (("--rounding", "nearest"), ("Float32Masters", "AdamW32")),
        (("--optimizer", "adamw_8bit"), ("Float32Masters", "AdamW8bit")),
        (MASTERS, ("Bfloat16Masters", "AdamW32", "Stochastic")),
        (("--optimizer", "adamw_8bit", *MASTERS), ("Bfloat16Masters", "AdamW8bit", "Stochastic")),
        ((*MASTERS, "--rounding", "nearest"), ("Bfloat16Masters", "AdamW32", "Nearest")),
    ],
)
def test_what_the_options_stand_for(flags: tuple[str, ...], parts: tuple[str, ...]) -> None:
    update: Any = build_update(settings(*flags), weights())
    found = [update, *vars(update).values()]
    assert tuple(type(part).__name__ for part in found) == parts


def test_bf16_masters_behind_other_weights_are_refused_by_name() -> None:
    for dtype, name in {torch.float32: "float32", torch.float16: "float16"}.items():
        with pytest.raises(UnusableOptimizer, match=rf"weights are in {name} \(2 of 2 tensors\)"):
            build_update(settings(*MASTERS), weights(dtype))
    mixed = [*weights(), *weights(torch.float32), *weights(torch.float16)]
    with pytest.raises(
        UnusableOptimizer, match=r"float32 \(2 of 6 tensors\) and float16 \(2 of 6 tensors\)"
    ):
        build_update(settings(*MASTERS), mixed)


def test_rounding_to_the_nearest_is_a_choice_that_warns() -> None:
    with capture_logs() as logs:
        build_update(settings(*MASTERS), weights())
    assert logs == []
    with capture_logs() as logs:
        build_update(settings(*MASTERS, "--rounding", "nearest"), weights())
    assert [event["log_level"] for event in logs] == ["warning"]
    assert "about 5 change" in logs[0]["event"]


def test_the_fused_step_without_a_gpu_is_refused_by_name() -> None:
    with pytest.raises(UnusableOptimizer, match="needs a GPU, and the weights are on cpu"):
        build_update(settings("--fused-step"), weights())


class OnGpu:
    """As far as it is asked before anything is computed."""

    device = torch.device("cuda", 0)

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


def test_the_fused_step_into_float16_is_refused_by_name() -> None:
    parameters: Any = [OnGpu(torch.float16), OnGpu(torch.bfloat16)]
    with pytest.raises(UnusableOptimizer, match=r"weights are in float16 \(1 of 2 tensors\)"):
        build_update(settings("--fused-step"), parameters)
    update = build_update(settings("--fused-step"), parameters[1:])
    assert type(update).__name__ == "FusedAdamW"


def test_a_device_without_a_kernel_is_refused_by_name() -> None:
    """torch's meta device computes nothing."""
    with pytest.raises(UnusableOptimizer, match="no working 8-bit optimizer for meta"):
        AdamW8bit(torch.device("meta"))


def test_a_kernel_that_does_nothing_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw_8bit.AdamW8bit, "_update_8bit", lambda *_: None)
    with pytest.raises(UnusableOptimizer, match="a step of 1 is off by 1"):
        AdamW8bit(torch.device("cpu"))


def test_the_policys_optimizer_is_the_one_that_was_asked_for(tmp_path: Path) -> None:
    from grpo_trainer.trained_weights import WholeModel

    directory = model_directory(tmp_path / "model")
    policy = WholeModel(str(directory)).load(torch.bfloat16, torch.device("cpu"))
    optimizer = loop.build_optimizer(policy, settings(*MASTERS, "--optimizer", "adamw_8bit"))
    assert {master.dtype for master in optimizer.masters} == {torch.bfloat16}
    exact = WholeModel(str(directory)).load(torch.float32, torch.device("cpu"))
    with pytest.raises(UnusableOptimizer, match="weights are in float32"):
        loop.build_optimizer(exact, settings(*MASTERS))
