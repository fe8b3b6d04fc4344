"""The command lines and variables of the services of a local run."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from grpo_core.settings import load_settings
from grpo_local.process.health import HealthProbe
from grpo_local.process.ports import free_port
from grpo_local.run_directory import RunDirectory
from grpo_local.services import ServiceFactory
from grpo_local.settings import DemoSettings


def test_trainer_and_environment_start_once_they_can_connect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings, run = load_settings(DemoSettings, ["--mode", "none"]), RunDirectory(tmp_path)
    hand_off = settings.hand_off("redis://127.0.0.1:2/0", run, Path("weights.sock"))
    with HealthProbe() as probe, socket.create_server(("127.0.0.1", 0)) as run_api:
        factory, api_port = ServiceFactory(settings, run, probe), run_api.getsockname()[1]
        server_port = free_port()
        trainer = factory.trainer("m", api_port, server_port, hand_off)
        assert not trainer.may_start()
        assert factory.environment("arithmetic", "m", api_port, server_port).may_start()
        with socket.create_server(("127.0.0.1", server_port)):
            assert trainer.may_start()
        assert not factory.environment("arithmetic", "m", server_port, api_port).may_start()


@pytest.mark.parametrize(("words", "given"), [([], False), (["--resume", "run"], True)])
def test_an_environment_of_a_resumed_run_waits_for_the_trainer(
    tmp_path: Path, words: list[str], given: bool
) -> None:
    settings = load_settings(DemoSettings, words)
    with HealthProbe() as probe:
        factory = ServiceFactory(settings, RunDirectory(tmp_path), probe)
        environment = factory.environment("arithmetic", "m", 1, 2)
    assert ("--next-run-deadline-s" in environment.command) is given


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
