"""The command lines and variables of the services of a local run."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_core.settings import load_settings
from grpo_local.process.health import HealthProbe
from grpo_local.run_directory import RunDirectory
from grpo_local.services import ServiceFactory
from grpo_local.settings import DemoSettings


def test_one_token_reaches_every_service_and_no_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = load_settings(DemoSettings, ["--run-api-token", "a-secret"])
    with HealthProbe() as probe:
        run = RunDirectory(tmp_path)
        factory = ServiceFactory(settings, run, probe)
        hand_off = settings.hand_off("redis://127.0.0.1:2/0", run, Path("weights.sock"))
        clients = [
            factory.run_api(1, 2),
            factory.vllm_server(3, "m", hand_off),
            factory.trainer("m", 1, 3, hand_off),
            factory.environment("arithmetic", "m", 1, 3),
        ]
    for variable in ("RUN_API_TOKEN", "VLLM_API_KEY"):
        assert [service.environment[variable] for service in clients] == ["a-secret"] * 4
    assert not [word for service in clients for word in service.command if "secret" in word]
    assert "a-secret" not in repr(settings)
