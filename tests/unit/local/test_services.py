"""What the services of a local run are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_core.settings import load_settings
from grpo_local.health import HealthProbe
from grpo_local.run_directory import RunDirectory
from grpo_local.services import ServiceFactory
from grpo_local.settings import DemoSettings
from grpo_local.sizes import sizes_for


def test_the_token_of_run_api_reaches_its_clients_and_no_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = load_settings(DemoSettings, ["--run-api-token", "a-secret"])
    with HealthProbe() as probe:
        factory = ServiceFactory(settings, sizes_for(settings), RunDirectory(tmp_path), probe)
        clients = [
            factory.run_api(1, 2),
            factory.trainer("m", 1, 3, factory.hand_off(2, Path("weights.sock"))),
            factory.environment("arithmetic", "m", 1, 3),
        ]
    assert [service.environment["RUN_API_TOKEN"] for service in clients] == ["a-secret"] * 3
    assert not [word for service in clients for word in service.command if "secret" in word]
    assert "a-secret" not in repr(settings)
