"""Which options a mode reads, how lists are written, and when weights are published."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_trainer.mode_settings import LoraOptions
from grpo_trainer.settings import TrainerSettings, parse_settings
from grpo_trainer.weight_sync.handed_off import Cadence

REDIS = ("--redis-url", "redis://127.0.0.1:6379/0")


def settings(mode: str, *flags: str) -> TrainerSettings:
    redis = () if mode == "shared_vllm" else REDIS
    return parse_settings(["--model", "m", "--weight-bridge-mode", mode, *redis, *flags])


def refusal(capsys: pytest.CaptureFixture[Any], mode: str, *flags: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        settings(mode, *flags)
    assert stopped.value.code == 2
    told: str = capsys.readouterr().err
    return told


@pytest.fixture(autouse=True)
def no_redis_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REDIS_URL", raising=False)


def test_the_defaults_are_those_of_the_archived_trainer() -> None:
    assert settings("lora_only").lora == LoraOptions(16, 32, 0.05, ("q_proj", "v_proj"), None)
    assert settings("none").lora is None
    assert settings("none").gpu_memory_utilization == 0.45


@pytest.mark.parametrize(
    "written",
    [
        ["--lora-target-modules", "a", "b", "--lora-layer-indices", "0-2,7"],
        ["--lora_target_modules", "a,b", "--lora_layer_indices", "0", "1", "2", "7"],
        ["--lora-target-modules=a b", "--lora-layer-indices=7,0-2,1"],
        ["--lora-layer-indices", "0-1, 2, 7", "--lora-target-modules", "a", "b", "a"],
    ],
)
def test_lists_as_the_archived_trainer_takes_them_and_more(written: list[str]) -> None:
    lora = settings("lora_restart", *written).lora
    assert lora is not None
    assert (lora.target_modules, lora.layers) == (("a", "b"), (0, 1, 2, 7))


@pytest.mark.parametrize("wrong", ["3-1", "x", "-1", "1-", ""])
def test_layers_that_are_none(wrong: str, capsys: pytest.CaptureFixture[Any]) -> None:
    assert "--lora-layer-indices: " in refusal(capsys, "lora_only", f"--lora-layer-indices={wrong}")


def test_every_option_that_the_mode_does_not_read_is_told_at_once(
    capsys: pytest.CaptureFixture[Any],
) -> None:
    told = refusal(capsys, "none", "--lora-r", "8", "--lora-dropout", "0", "--pause-lease-s", "3")
    for option in ("--lora-r", "--lora-dropout", "--pause-lease-s"):
        assert f"{option}: not used in none" in told
    told = refusal(capsys, "shared_vllm", "--vllm-restart-interval", "3")
    assert "--vllm-restart-interval: not used in shared_vllm" in told


def test_options_for_a_server_that_is_there_are_left_alone() -> None:
    """Command lines of the archived trainer carry them in every mode."""
    sizes = ["--vllm-gpu", "1", "--vllm-gpu-memory-utilization", "0.3", "--max-model-len", "99"]
    chosen = settings("shared_vllm", *sizes)
    assert (chosen.vllm_gpu, chosen.gpu_memory_utilization) == (1, 0.3)


def test_redis_is_needed_where_weights_are_handed_over(
    capsys: pytest.CaptureFixture[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    without = ["--model", "m", "--weight-bridge-mode", "lora_only"]
    with pytest.raises(SystemExit):
        parse_settings(without)
    assert "--redis-url: mode lora_only needs" in capsys.readouterr().err
    monkeypatch.setenv("REDIS_URL", "redis://:secret@host/0")
    chosen = parse_settings(without)
    assert chosen.redis_url is not None
    assert "secret" not in chosen.model_dump_json()  # W&B is sent that
    assert "--redis-url" in refusal(capsys, "none", "--redis-url", "http://x")


@pytest.mark.parametrize(
    ("mode", "flags", "every"),
    [
        ("shared_vllm", [], 1),
        ("lora_only", [], 1),
        ("lora_only", ["--adapter-sync-interval", "4"], 4),
        ("lora_only", ["--vllm-restart-interval", "5"], 5),
        ("lora_only", ["--vllm-restart-interval", "5", "--adapter-sync-interval", "5"], 5),
        ("lora_restart", [], 3),
        ("none", ["--vllm-restart-interval", "7"], 7),
    ],
)
def test_how_often_weights_are_published(mode: str, flags: list[str], every: int) -> None:
    assert settings(mode, *flags).publish_every_steps == every


def test_two_intervals_that_differ_are_a_mistake(capsys: pytest.CaptureFixture[Any]) -> None:
    both = ["--vllm-restart-interval", "5", "--adapter-sync-interval", "4"]
    assert "one, or the same" in refusal(capsys, "lora_only", *both)


def test_weights_are_published_after_the_last_step_too() -> None:
    cadence = Cadence(every_steps=3, last_step=7, at_start=False)
    assert [step for step in range(1, 8) if cadence.is_due(step)] == [3, 6, 7]


def test_data_that_can_never_be_fresh_enough_is_a_mistake(
    capsys: pytest.CaptureFixture[Any],
) -> None:
    assert settings("none", "--max-staleness", "2").max_staleness == 2
    assert "up to 2 steps old" in refusal(capsys, "none", "--max-staleness", "1")
    assert settings("lora_only", "--max-staleness", "0").max_staleness == 0
