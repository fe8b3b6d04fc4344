from __future__ import annotations

from typing import Any

import pytest

from grpo_core.settings import load_settings
from grpo_trainer.forward_options import Choice, ForwardOptions
from grpo_trainer.settings import TrainerSettings

REQUIRED = ["--model-name", "m", "--weight-bridge-mode", "shared_vllm"]


def settings(*flags: str) -> TrainerSettings:
    return load_settings(TrainerSettings, [*REQUIRED, *flags], environment={})


def announced(*flags: str) -> tuple[str, str]:
    """(project, group) as environments are told."""
    registration = settings(*flags).registration(first_step=0)
    return registration.wandb_project, registration.wandb_group


def test_environments_log_to_the_project_and_group_of_the_trainer() -> None:
    named = ["--use-wandb", "--wandb-project", "p", "--wandb-group", "g"]
    assert announced(*named) == ("p", "g")
    assert announced("--wandb-project", "p") == ("p", "")
    assert announced() == ("", "")


def test_a_group_is_made_up_where_none_is_given_and_stays_the_same() -> None:
    chosen = settings("--use-wandb", "--wandb-project", "p")
    assert len(chosen.wandb_group) == 8
    assert chosen.wandb_group.isalpha()
    assert chosen.registration(0).wandb_group == chosen.wandb_group
    assert settings("--use-wandb", "--wandb-project", "p").wandb_group != chosen.wandb_group


def test_use_wandb_without_a_project_is_a_mistake(capsys: pytest.CaptureFixture[Any]) -> None:
    with pytest.raises(SystemExit) as stopped:
        settings("--use-wandb")
    assert stopped.value.code == 2
    assert "--wandb-project: " in capsys.readouterr().err


def test_the_token_of_run_api_comes_from_its_variable_and_is_not_shown(
    capsys: pytest.CaptureFixture[Any],
) -> None:
    variables = {"RUN_API_TOKEN": "a-secret"}
    chosen = load_settings(TrainerSettings, REQUIRED, environment=variables)
    assert chosen.run_api_token is not None
    assert chosen.run_api_token.get_secret_value() == "a-secret"
    assert "a-secret" not in chosen.model_dump_json()  # W&B is sent that
    with pytest.raises(SystemExit):
        load_settings(TrainerSettings, REQUIRED, environment={"RUN_API_TOKEN": "a-secret\n"})
    told = capsys.readouterr().err
    assert "--run-api-token: " in told
    assert "a-secret" not in told


def test_the_forward_pass_that_is_asked_for() -> None:
    assert settings().forward_options == ForwardOptions(Choice.AUTO, Choice.AUTO, compile=False)
    asked = settings("--packing", "on", "--fused-head", "off", "--compile")
    assert asked.forward_options == ForwardOptions(Choice.ON, Choice.OFF, compile=True)
    assert not settings("--no-compile").forward_options.compile
    with pytest.raises(SystemExit):
        settings("--packing", "yes")
