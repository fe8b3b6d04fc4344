"""What the services of a local run are told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from grpo_core.settings import load_settings
from grpo_local.health import HealthProbe
from grpo_local.run_directory import RunDirectory
from grpo_local.services import ServiceFactory
from grpo_local.settings import DemoSettings
from grpo_local.sizes import sizes_for


@dataclass(frozen=True)
class Told:
    """By the options of a demo."""

    probe: HealthProbe
    directory: Path

    def factory(self, *argv: str) -> ServiceFactory:
        settings = load_settings(DemoSettings, argv)
        return ServiceFactory(
            settings, sizes_for(settings), RunDirectory(self.directory), self.probe
        )


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    monkeypatch.chdir(tmp_path)
    with HealthProbe() as probe:
        yield Told(probe, tmp_path)


@pytest.mark.parametrize(("data", "offline"), [("here", True), ("openai/gsm8k", False)])
def test_the_hub_is_left_alone_unless_the_data_lies_there(
    told: Told, data: str, offline: bool
) -> None:
    (told.directory / "here").mkdir()
    factory = told.factory("--task", "arithmetic,gsm8k", "--data", data, "--model", "here")
    gsm8k = factory.environment("gsm8k", "here", 1, 2)
    assert ("HF_HUB_OFFLINE" in gsm8k.environment) is offline
    assert "HF_HUB_OFFLINE" in factory.environment("arithmetic", "here", 1, 2).environment


def test_the_token_of_run_api_reaches_its_clients_and_no_command_line(told: Told) -> None:
    factory = told.factory("--run-api-token", "a-secret")
    clients = [
        factory.run_api(1, 2),
        factory.trainer("m", 1, 3, factory.hand_off(2, Path("weights.sock"))),
        factory.environment("arithmetic", "m", 1, 3),
    ]
    assert [service.environment["RUN_API_TOKEN"] for service in clients] == ["a-secret"] * 3
    assert not [word for service in clients for word in service.command if "secret" in word]
    assert "a-secret" not in repr(factory.settings)
