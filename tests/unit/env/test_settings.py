from __future__ import annotations

from pathlib import Path

import pytest

from grpo_env.settings import load_env_settings

BASE = ["arithmetic", "serve", "--openai.model-name", "m"]


def test_dashes_underscores_and_negative_numbers() -> None:
    settings = load_env_settings(
        [*BASE, "--env.group_size", "4", "--env.max-token-length=64", "--env.total_steps", "-1"]
    )

    assert settings.env.group_size == 4
    assert settings.env.max_token_length == 64
    assert settings.env.total_steps == -1
    assert settings.tokenizer_name == "m"


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "env.yaml"
    file.write_text("env: {group_size: 4, seed: 5}\nopenai: {model_name: from-file}\n")

    settings = load_env_settings(
        ["arithmetic", "serve", "--config", str(file), "--env.group_size", "6"]
    )

    assert settings.env.group_size == 6
    assert settings.env.seed == 5
    assert settings.openai.model_name == "from-file"


def test_variables_that_happen_to_carry_a_section_s_name_are_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ENV", "production")
    monkeypatch.setenv("TASK", "other")

    assert load_env_settings(BASE).env.group_size == 8


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["arithmetic", "serve"], "--openai.model-name: Field required"),
        ([*BASE, "--env.group_size", "1"], "pass --env.group-size 2 or more"),
        ([*BASE, "--env.temperature", "0"], "--env.temperature"),
        ([*BASE, "--env.max_batches_offpolicy", "0"], "--env.max-batches-offpolicy"),
        ([*BASE, "--env.rollout_server_url", "localhost:8000"], "with its scheme"),
        ([*BASE, "--openai.server_type", "openai"], "log-probability of every sampled token"),
        ([*BASE, "--env.grp", "3"], "unrecognized arguments"),
        (["chess", "serve"], "--task"),
        ([*BASE, "--config", "/nonexistent.yaml"], "cannot read /nonexistent.yaml"),
    ],
)
def test_a_mistake_ends_with_status_2_and_names_the_option(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        load_env_settings(arguments)

    assert caught.value.code == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize("content", ["env: [", "- a list", "env: {grp: 3}"])
def test_a_broken_file_ends_with_status_2(tmp_path: Path, content: str) -> None:
    file = tmp_path / "env.yaml"
    file.write_text(content)

    with pytest.raises(SystemExit) as caught:
        load_env_settings([*BASE, f"--config={file}"])
    assert caught.value.code == 2
