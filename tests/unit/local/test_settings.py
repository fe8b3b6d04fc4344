from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from grpo_core.settings import load_settings
from grpo_local.health import HealthProbe
from grpo_local.run_directory import RunDirectory
from grpo_local.services import ServiceFactory
from grpo_local.settings import DemoSettings
from grpo_local.sizes import BY_TASK, sizes_for

LONGEST_GSM8K_PROMPT = 1072
"""Tokens of the longest training problem with one token per byte, instruction and template."""


def settings(*argv: str) -> DemoSettings:
    return load_settings(DemoSettings, argv)


def test_the_defaults_of_the_arithmetic_demo() -> None:
    assert sizes_for(settings()) == BY_TASK["arithmetic"]


def test_every_problem_of_gsm8k_fits_with_its_completion(tmp_path: Path) -> None:
    sizes = sizes_for(settings("--task", "gsm8k", "--data", str(tmp_path)))

    assert sizes == BY_TASK["gsm8k"]
    assert LONGEST_GSM8K_PROMPT + sizes.max_completion_tokens < sizes.seq_len
    assert sizes.seq_len <= sizes.max_model_len
    assert sizes.max_model_len >= 1536


def test_several_tasks_get_the_sizes_of_the_largest(tmp_path: Path) -> None:
    chosen = settings("--task", "arithmetic,gsm8k", "--task", "gsm8k", "--data", str(tmp_path))

    assert chosen.task == ["arithmetic", "gsm8k"]
    assert sizes_for(chosen) == BY_TASK["gsm8k"]


def test_a_variable_is_written_like_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPO_DEMO_TASK", "gsm8k,arithmetic")

    assert settings("--data", str(tmp_path)).task == ["gsm8k", "arithmetic"]


def test_what_the_user_sets_wins_and_the_server_makes_room_for_it(tmp_path: Path) -> None:
    gsm8k = ["--task", "gsm8k", "--data", str(tmp_path)]
    given = settings(*gsm8k, "--steps", "7", "--lr", "1e-6", "--seq-len", "4000")

    expected = replace(BY_TASK["gsm8k"], steps=7, lr=1e-6, seq_len=4000, max_model_len=4000)
    assert sizes_for(given) == expected
    roomy = settings(*gsm8k, "--seq-len", "4000", "--max-model-len", "5000")
    assert sizes_for(roomy).max_model_len == 5000


def test_a_model_of_the_user_reasons_slowly_and_is_changed_gently(tmp_path: Path) -> None:
    own = sizes_for(settings("--task", "gsm8k", "--data", str(tmp_path), "--model", "some/model"))
    tiny = BY_TASK["gsm8k"]

    assert own.lr < tiny.lr / 5
    assert own.max_completion_tokens > tiny.max_completion_tokens
    assert own.step_deadline_s > tiny.step_deadline_s
    assert own.server_deadline_s > tiny.server_deadline_s


@pytest.mark.parametrize(("data", "offline"), [("here", True), ("openai/gsm8k", False)])
def test_the_hub_is_left_alone_unless_the_data_lies_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: str, offline: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    chosen = settings("--task", "arithmetic,gsm8k", "--data", data, "--model", "here")
    with HealthProbe() as probe:
        factory = ServiceFactory(chosen, sizes_for(chosen), RunDirectory(tmp_path), probe)
        gsm8k = factory.environment("gsm8k", "here", 1, 2)
        arithmetic = factory.environment("arithmetic", "here", 1, 2)

    assert ("HF_HUB_OFFLINE" in gsm8k.environment) is offline
    assert "HF_HUB_OFFLINE" in arithmetic.environment


def test_the_token_of_run_api_reaches_its_clients_and_no_command_line(tmp_path: Path) -> None:
    chosen = settings("--run-api-token", "a-secret")
    with HealthProbe() as probe:
        factory = ServiceFactory(chosen, sizes_for(chosen), RunDirectory(tmp_path), probe)
        services = [
            factory.run_api(1, 2),
            factory.trainer("m", 1, 3, factory.hand_off(2, tmp_path / "weights.sock")),
            factory.environment("arithmetic", "m", 1, 3),
        ]
    assert [service.environment["RUN_API_TOKEN"] for service in services] == ["a-secret"] * 3
    assert not [word for service in services for word in service.command if "secret" in word]
    assert "a-secret" not in repr(chosen)
