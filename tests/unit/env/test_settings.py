from __future__ import annotations

from pathlib import Path

import pytest

from grpo_env.settings import EnvServerSettings, load_env_settings

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


def from_file(tmp_path: Path, content: str, *arguments: str) -> EnvServerSettings:
    file = tmp_path / "env.yaml"
    file.write_text(content)
    return load_env_settings(["gsm8k", "serve", "--config", str(file), *arguments])


TWO_EQUAL_SERVERS = """
env: {group_size: 4}
openai:
  - {model_name: m, base_url: "http://one:9001/v1", server_type: vllm}
  - {model_name: m, base_url: "http://one:9001/v1", server_type: vllm}
"""


def test_a_list_of_servers_is_one_policy_on_each_of_them(tmp_path: Path) -> None:
    twice = from_file(tmp_path, TWO_EQUAL_SERVERS).openai
    assert (twice.model_name, twice.base_url) == ("m", ["http://one:9001/v1"])

    two = from_file(tmp_path, TWO_EQUAL_SERVERS.replace("one", "two", 1)).openai
    assert two.base_url == ["http://two:9001/v1", "http://one:9001/v1"]

    # The command line wins over the list.
    options = ["--openai.base-url", "http://other:1"]
    assert from_file(tmp_path, TWO_EQUAL_SERVERS, *options).openai.base_url == ["http://other:1"]


@pytest.mark.parametrize(
    ("servers", "problem"),
    [
        ("[{model_name: m}, {model_name: n}]", "differ in model_name"),
        ("[{model_name: m}, {model_name: m, api_key: y}]", "differ in api_key"),
        ('[{model_name: m, base_url: "http://a"}, {model_name: m}]', "no base_url"),
        ("[]", "at least one server"),
        ("[one]", "each a mapping"),
        ('[{model_name: m, base_url: "http://a", servertype: vllm}]', "servertype"),
    ],
)
def test_a_list_that_is_no_one_policy_is_refused(
    tmp_path: Path, servers: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        from_file(tmp_path, f"openai: {servers}")

    assert caught.value.code == 2
    assert problem in capsys.readouterr().err


def test_the_words_of_atropos_are_understood_and_what_has_no_effect_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = from_file(
        tmp_path,
        """
env:
  tokenizer_name: t
  rollout_server_url: "http://localhost:8001"
  max_token_length: 8192
  start_tok_length: 8192
  group_size: 4
  batch_size: 64
  total_steps: 120
  use_wandb: true
  wandb_name: math
  ensure_scores_are_not_same: false
  max_num_workers_per_node: 24
openai:
  - {base_url: "http://localhost:9001/v1", model_name: m, api_key: x, num_requests_for_eval: 8}
slurm: false
""",
    )

    env = settings.env
    assert (env.group_size, env.total_steps, env.max_concurrent_groups) == (4, 120, 24)
    assert env.drop_equal_scores is False
    assert settings.wandb_name == "math"
    assert "without effect here: env.batch_size, env.start_tok_length, env.use_wandb, openai." in (
        capsys.readouterr().err
    )


def test_the_task_s_name_stands_in_for_a_missing_wandb_name() -> None:
    assert load_env_settings(BASE).wandb_name == "arithmetic"
    assert load_env_settings(["gsm8k", *BASE[1:]]).wandb_name == "gsm8k"


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
        ([*BASE, "--env.format-reward", "1"], "--env.format-reward"),
        ([*BASE, "--env.min-batch-allocation", "1.5"], "--env.min-batch-allocation"),
        ([*BASE, "--openai.base-url", "http://a,b"], "with its scheme"),
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


def test_the_token_of_run_api_comes_from_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_env_settings(BASE).run_api_token is None
    monkeypatch.setenv("RUN_API_TOKEN", "a-secret")
    token = load_env_settings(BASE).run_api_token
    assert token is not None
    assert token.get_secret_value() == "a-secret"
