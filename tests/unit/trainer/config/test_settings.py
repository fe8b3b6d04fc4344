"""The trainer's options: one error per mistake, secrets stay secret, modes read their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_core.settings import load_settings
from grpo_core.tree.trainer import TrainerSettings
from grpo_core.tree.trainer_command import CommandLine
from grpo_trainer import train
from grpo_trainer.errors import NoInferenceServer


def settings(mode: str, *flags: str) -> TrainerSettings:
    return load_settings(CommandLine, ["--model", "m", "--mode", mode, *flags]).settings()


@pytest.fixture(autouse=True)
def no_variables_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REDIS_URL", "RUN_API_TOKEN", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def test_options_of_other_modes_are_ignored_with_one_line(
    capsys: pytest.CaptureFixture[Any],
) -> None:
    chosen = settings("none", "--pause-lease-s", "-1", "--lora_r=8", "--vllm-restart-interval", "5")
    told = capsys.readouterr().err
    assert told == (
        "grpo: ignored in mode none: --lora_r (only in mode lora_only or lora_restart), "
        "--pause-lease-s (only in mode shared_vllm)\n"
    )
    assert chosen.sync.publish_every_steps == 5


def test_the_archived_trainers_flags_for_one_process_are_accepted() -> None:
    flags = "--trainer-rank 0 --world-size 1 --init-method env:// --num-inference-nodes 0"
    chosen = settings("none", "--single-copy", "--debug-loading", "--log-dir", "x", *flags.split())
    assert (chosen.sync.mode, chosen.log_level) == ("shared_vllm", "DEBUG")


@pytest.mark.parametrize(
    ("variable", "right", "wrong"),
    [
        ("RUN_API_TOKEN", "a-secret", "a-secret\n"),
        ("VLLM_API_KEY", "a-secret", "a-secret\n"),
        ("REDIS_URL", "redis://:a-secret@host/0", "http://:a-secret@host"),
    ],
)
def test_secrets_come_from_variables_and_are_never_shown(
    variable: str, right: str, wrong: str, capsys: pytest.CaptureFixture[Any]
) -> None:
    required = ["--model", "m", "--mode", "lora_only"]
    variables = {"REDIS_URL": "redis://host"}
    chosen = load_settings(CommandLine, required, {**variables, variable: right})
    held = getattr(chosen, variable.lower())
    assert held.get_secret_value() == right
    assert "a-secret" not in chosen.model_dump_json()  # W&B receives these
    with pytest.raises(SystemExit):
        load_settings(CommandLine, required, {**variables, variable: wrong})
    told = capsys.readouterr().err
    assert f"grpo: {variable}: " in told
    assert "a-secret" not in told


@pytest.mark.parametrize(
    "written",
    [
        "--lora-target-modules a b --lora-layer-indices 7,0-2,1",
        "--lora_target_modules a,b --lora_layer_indices 0 1 2 7",
    ],
)
def test_lists_may_be_written_as_for_the_archived_trainer(written: str) -> None:
    lora = settings("lora_restart", *written.split()).lora
    assert lora is not None
    assert (lora.target_modules, lora.layers) == (("a", "b"), (0, 1, 2, 7))


@pytest.mark.parametrize("mode", ["shared_vllm", "none"])
def test_the_trained_layers_are_written_as_for_the_archived_trainer(mode: str) -> None:
    assert settings(mode).trained_layers is None
    found = settings(mode, "--train-layer-indices", "0-3,28-31")
    assert found.trained_layers == (0, 1, 2, 3, 28, 29, 30, 31)
    assert settings("lora_only").trained_layers is None


@pytest.mark.parametrize(
    ("mode", "flags", "every"),
    [
        ("shared_vllm", "", 1),
        ("lora_only", "--adapter-sync-interval 4", 4),
        ("lora_only", "--vllm-restart-interval 5", 5),
        ("lora_restart", "", 3),
        ("none", "", 1),
        ("none", "--publish restart", 3),
        ("none", "--vllm-restart-interval 7 --max-staleness 6", 7),
    ],
)
def test_the_mode_decides_how_often_weights_are_published(
    mode: str, flags: str, every: int
) -> None:
    assert settings(mode, *flags.split()).sync.publish_every_steps == every


def test_environments_log_to_the_project_and_group_of_the_trainer() -> None:
    flags = ("--use-wandb", "--wandb-project", "p")
    told = settings("none", *flags, "--wandb-group", "g").registration(first_step=0)
    assert (told.wandb_project, told.wandb_group) == ("p", "g")
    chosen = settings("none", *flags)  # without a group, a random one is chosen once
    assert chosen.registration(0).wandb_group == chosen.wandb_group != ""


def test_a_run_writes_its_configuration_before_it_needs_a_server(tmp_path: Path) -> None:
    nobody = ("--inference-url", "http://127.0.0.1:1", "--service-deadline-s", "0.1")
    with pytest.raises(NoInferenceServer):
        train.train(settings("shared_vllm", *nobody, "--save-path", str(tmp_path), "--lr", "3e-6"))
    written = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert (written["model"], written["lr"], written["steps"]) == ("m", 3e-6, 10)
