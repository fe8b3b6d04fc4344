"""What the services of a local run are told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from grpo_core.settings import load_settings
from grpo_local import services
from grpo_local.health import HealthProbe
from grpo_local.run_directory import RunDirectory
from grpo_local.services import ServiceFactory
from grpo_local.settings import DemoSettings
from grpo_local.sizes import sizes_for
from grpo_local.stack import Service


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

    def server_and_trainer(self, *argv: str) -> tuple[Service, Service]:
        factory = self.factory(*argv)
        hand_off = factory.hand_off(6379, self.directory / "s")
        server = factory.vllm_server(9001, "m", hand_off)
        return server, factory.trainer("m", 8000, 9001, hand_off)


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    """Without a GPU."""
    monkeypatch.setattr(services, "GPU_CONTROL", tmp_path / "nvidiactl")
    monkeypatch.chdir(tmp_path)
    with HealthProbe() as probe:
        yield Told(probe, tmp_path)


def following(service: Service, option: str) -> str:
    return service.command[service.command.index(option) + 1]


def test_without_a_gpu_no_service_is_told_of_one(told: Told) -> None:
    server, trainer = told.server_and_trainer()
    assert "--gpu-memory-utilization" not in server.command
    assert following(trainer, "--device") == "auto"
    assert "--enforce-eager" in server.command
    assert "--enforce-eager" not in told.server_and_trainer("--no-eager")[0].command


def test_on_a_gpu_the_server_leaves_room_for_the_trainer(told: Told) -> None:
    (told.directory / "nvidiactl").touch()
    server, _ = told.server_and_trainer()
    assert following(server, "--gpu-memory-utilization") == "0.4"
    given = ("--gpu-memory-utilization", "0.3", "--device", "cuda:1")
    server, trainer = told.server_and_trainer(*given)
    assert following(server, "--gpu-memory-utilization") == "0.3"
    assert following(trainer, "--device") == "cuda:1"


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        (("--mode", "lora_only"), "bfloat16"),  # whose kernels take no float32 there
        (("--mode", "shared_vllm"), "float32"),
        (("--mode", "lora_only", "--dtype", "float16"), "float16"),
    ],
)
def test_server_and_trainer_compute_in_one_type(
    told: Told, flags: tuple[str, ...], dtype: str
) -> None:
    (told.directory / "nvidiactl").touch()
    for service in told.server_and_trainer(*flags):
        assert following(service, "--dtype") == dtype


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
