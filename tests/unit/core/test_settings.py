from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import Field, SecretStr

from grpo_core.security import plain
from grpo_core.settings import (
    Command,
    CommandSettings,
    Mistake,
    load_settings,
    resolved_yaml,
    without_secrets,
)
from grpo_core.settings.command import URL_VARIABLES
from grpo_core.settings.machine import SMOLLM2, unusable_model
from grpo_core.tree.environment import EnvironmentOptions
from grpo_core.tree.run_api import RunApiSettings
from grpo_core.tree.sections import given_words, url_variables
from grpo_core.tree.server import ServerSettings
from grpo_core.tree.trainer_command import CommandLine
from grpo_runs.settings.compare import CompareSettings
from grpo_runs.settings.run import RunSettings
from tests.unit.conftest import Refused


class Unlucky(RunApiSettings):
    def start_mistakes(self) -> Iterator[Mistake]:
        raise OSError("libcudart.so.12: cannot open shared object file")


class Example(CommandSettings):
    command: ClassVar[Command] = Command(
        prog="example", passes_on="passed_on", aliases={"env.group-size": "group_size"}
    )

    batch_size: int = Field(2, ge=1)
    run_id: str = "default"
    group_size: int = 8
    token: SecretStr | None = Field(None, min_length=3)
    passed_on: tuple[str, ...] = ()


def load(*words: str, environment: dict[str, str] | None = None) -> Example:
    return load_settings(Example, words, environment or {})


def test_options_of_others_are_passed_on_as_written() -> None:
    foreign = ["--hf_overrides.rope_scaling=a_b", "--enforce_eager"]
    assert load("--batch-size", "3", *foreign).passed_on == tuple(foreign)


def test_options_behind_two_dashes_are_passed_on_even_if_they_resemble_own_ones() -> None:
    behind = ["--", "--batch-sizes", "4", "--batch-size=5"]
    settings = load("--batch-size", "3", *behind)
    assert (settings.batch_size, settings.passed_on) == (3, tuple(behind[1:]))


def test_every_mistake_names_its_option_and_only_a_secret_is_not_shown(refused: Refused) -> None:
    told = refused(load, "--batch-size", "0", "--token", "xy")
    assert "example: --batch-size: " in told
    assert "expected a whole number, at least 1; got '0'" in told
    assert "example: --token: " in told
    assert "xy" not in told


@pytest.mark.parametrize(
    ("settings_type", "words"),
    [
        (RunApiSettings, []),
        (ServerSettings, ["--model", "m"]),
        (CommandLine, ["--model", "m", "--mode", "none"]),
        (RunSettings, ["--model", "m"]),
    ],
)
def test_no_command_shows_what_a_redis_url_holds(
    settings_type: type[CommandSettings],
    words: list[str],
    refused: Refused,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = "redis://:hunter2@h:1/0"
    assert "hunter" not in repr(load_settings(settings_type, words, {"REDIS_URL": url}))
    with pytest.raises(SystemExit, match="0"):
        load_settings(settings_type, [*words, "--help"], {"REDIS_URL": url})
    assert "hunter" not in "".join(capsys.readouterr())
    for wrong in ("http://:hunter2@h", "redis://:hunter2/x@h:1", "redis://:hunter2\u2100@h:1"):
        told = refused(load_settings, settings_type, words, {"REDIS_URL": wrong})
        assert (told.count("REDIS_URL: "), "hunter" in told) == (1, False)


@pytest.mark.parametrize(
    ("settings_type", "words"),
    [
        (RunApiSettings, ["--redis-url", "redis://h/0?password=hunter2"]),
        (ServerSettings, ["--model", "m", "--hf-token", "hunter2"]),
        (
            CommandLine,
            ["--model=m", "--mode=none", "--redis-url=redis://h", "--vllm-flags=--api-key hunter2"],
        ),
        (RunSettings, ["--model=m", "--redis-url=redis://h", "--server.api-key=hunter2"]),
        (CompareSettings, ["--run-api-token", "hunter2"]),
    ],
)
def test_a_resolved_configuration_shows_no_secret(
    settings_type: type[CommandSettings], words: list[str]
) -> None:
    settings = load_settings(settings_type, [*words], {})
    shown = resolved_yaml(settings_type.command, settings.resolved())
    assert "***" in shown
    assert "hunter" not in shown


@pytest.mark.parametrize(
    ("settings_type", "words"),
    [
        (CommandLine, ["--model=m", "--mode=none", "--redis-url=redis://h", "--run-api-url"]),
        (EnvironmentOptions, ["arithmetic", "serve", "--model=m", "--inference-url"]),
        (EnvironmentOptions, ["arithmetic", "serve", "--model=m", "--teacher-url"]),
    ],
)
def test_a_url_is_shown_without_its_password_and_given_on_with_it(
    settings_type: type[CommandSettings], words: list[str]
) -> None:
    settings = load_settings(settings_type, [*words, "http://me:hunter2@h:1"], {})
    values = settings.resolved()
    shown = [
        resolved_yaml(settings_type.command, values),
        *(settings.model_dump_json(), repr(settings), str(settings.model_dump())),
        *(" ".join(given_words(settings_type, values)), " ".join(without_secrets(words)[0])),
    ]
    assert not [text for text in shown if "hunter2" in text]
    again = settings_type.model_validate(settings.model_dump(exclude_unset=True))
    name = words[-1].removeprefix("--").replace("-", "_")
    url = getattr(again, name)
    url = url[0] if isinstance(url, tuple) else url
    assert (url, url.with_userinfo) == ("http://h:1", "http://me:hunter2@h:1")
    assert url_variables(settings_type, {name: url}) == {URL_VARIABLES[name]: url.with_userinfo}
    variable = {URL_VARIABLES[name]: url.with_userinfo}
    from_variable = getattr(load_settings(settings_type, words[:-1], variable), name)
    assert from_variable in (url, (url,))


def test_only_values_of_secret_options_are_left_out() -> None:
    words = ["--hf-token", "x", "--tokenizer", "t", "--api_key=y", "--to=http://me:x/@y@h/a"]
    assert without_secrets(words) == (
        ["--tokenizer", "t", "--to=http://***@h/a"],
        ["--hf-token", "--api_key"],
    )


def test_paths_and_models_below_the_home_directory_are_expanded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    words = ["--model=~/m", "--mode=shared_vllm", "--save-path=~/run", "--metrics-file=~/x"]
    settings = load_settings(CommandLine, words, {})
    assert settings.model == "/home/me/m"
    assert (settings.save_path, settings.metrics_file) == (Path("/home/me/run"), Path("/home/me/x"))


def test_words_in_one_string_of_a_file_are_split_as_in_a_shell(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("""passed-on: "--a 'b c'"\n""")
    assert load("--config", str(file)).passed_on == ("--a", "b c")
    assert load("--config", str(file), "--d").passed_on == ("--a", "b c", "--d")


def inference_url(*words: str, environment: dict[str, str]) -> str:
    words = ("--model=m", "--mode=shared_vllm", *words)
    return load_settings(CommandLine, words, environment).inference_url


def test_the_port_of_the_server_counts_only_without_a_url() -> None:
    port, url = "--vllm-port=7", "http://srv:9001"
    assert inference_url(port, environment={}) == "http://127.0.0.1:7"
    assert inference_url(port, environment={"GRPO_VLLM_URL": url}) == url
    assert inference_url(f"--vllm-url={url}", port, environment={}) == url
    variables = {"GRPO_VLLM_PORT": "7", "GRPO_INFERENCE_URL": url}
    assert inference_url(environment=variables) == url
    # Two names of an option may agree, and an option on the command line settles it.
    inference_url(environment={"GRPO_STEPS": "60", "GRPO_TRAINING_STEPS": "60"})
    inference_url("--steps=7", environment={"GRPO_STEPS": "60", "GRPO_TRAINING_STEPS": "5"})


def test_a_directory_named_smollm2_needs_no_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    Path(SMOLLM2).mkdir()
    Path(SMOLLM2, "config.json").touch()
    assert unusable_model(f"./{SMOLLM2}") is None
    assert unusable_model(SMOLLM2) is not None


def test_a_secret_may_be_in_a_file_that_a_variable_names(tmp_path: Path, refused: Refused) -> None:
    file = tmp_path / "secret"
    file.write_text("t0ken\n")
    found = load_settings(RunApiSettings, [], {"RUN_API_TOKEN_FILE": str(file)})
    assert plain(found.token) == "t0ken"
    both = {"RUN_API_TOKEN": "other", "RUN_API_TOKEN_FILE": str(file)}
    assert plain(load_settings(RunApiSettings, [], both).token) == "other"
    file.write_text("redis://:pa55@db:1")
    found = load_settings(RunApiSettings, [], {"REDIS_URL_FILE": str(file)})
    assert found.redis_url.get_secret_value() == "redis://:pa55@db:1"
    none = {"RUN_API_TOKEN_FILE": "/dev/null"}
    assert load_settings(RunApiSettings, [], none).token is None
    file.write_text("two words")
    wrong = {"RUN_API_TOKEN_FILE": str(file)}
    told = refused(lambda: load_settings(RunApiSettings, [], wrong))
    assert "run-api: RUN_API_TOKEN_FILE: " in told
    assert "two words" not in told
    gone = {"RUN_API_TOKEN_FILE": str(tmp_path / "gone")}
    told = refused(lambda: load_settings(RunApiSettings, [], gone))
    assert f"RUN_API_TOKEN_FILE={tmp_path / 'gone'}: No such file or directory; name a file" in told


def test_an_error_that_no_path_causes_is_no_mistake_of_the_user() -> None:
    with pytest.raises(OSError, match="libcudart"):
        load_settings(Unlucky, ["--redis-url", "redis://~"], {}, at_start=True)
