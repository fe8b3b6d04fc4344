"""What the services of a local run are told about the device."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_core.settings import load_settings
from grpo_local import services
from grpo_local.health import HealthProbe
from grpo_local.run_directory import RunDirectory
from grpo_local.services import ServiceFactory
from grpo_local.settings import DemoSettings
from grpo_local.sizes import sizes_for


def commands(directory: Path, *argv: str) -> tuple[list[str], list[str]]:
    """Of server and trainer."""
    settings = load_settings(DemoSettings, argv)
    factory = ServiceFactory(settings, sizes_for(settings), RunDirectory(directory), HealthProbe())
    hand_off = factory.hand_off(6379, directory / "s")
    server = factory.vllm_server(9001, "m", hand_off)
    return server.command, factory.trainer("m", 8000, 9001, hand_off).command


def following(command: list[str], option: str) -> str:
    return command[command.index(option) + 1]


def test_without_a_gpu_nothing_is_said_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "GPU_CONTROL", tmp_path / "nothing")
    server, trainer = commands(tmp_path)
    assert "--gpu-memory-utilization" not in server
    assert "--enforce-eager" in server
    assert following(trainer, "--device") == "auto"


def test_on_a_gpu_the_server_leaves_room_for_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(services, "GPU_CONTROL", tmp_path / "nvidiactl")
    assert following(commands(tmp_path)[0], "--gpu-memory-utilization") == "0.4"
    chosen = commands(tmp_path, "--gpu-memory-utilization", "0.3", "--device", "cuda:1")
    assert following(chosen[0], "--gpu-memory-utilization") == "0.3"
    assert following(chosen[1], "--device") == "cuda:1"


def test_lora_kernels_on_a_gpu_take_no_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(services, "GPU_CONTROL", tmp_path / "nvidiactl")
    for mode, dtype in (("lora_only", "bfloat16"), ("shared_vllm", "float32")):
        for command in commands(tmp_path, "--mode", mode):
            assert following(command, "--dtype") == dtype
    chosen = commands(tmp_path, "--mode", "lora_only", "--dtype", "float16")
    assert following(chosen[0], "--dtype") == "float16"


def test_graphs_are_captured_on_request(tmp_path: Path) -> None:
    assert "--enforce-eager" not in commands(tmp_path, "--no-eager")[0]
