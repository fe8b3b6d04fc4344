"""The trainer starts the inference server with the right options, and stops only that one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from grpo_core.gpu import NoSuchDevice
from grpo_core.tree.trainer import TrainerSettings
from grpo_core.tree.trainer_command import CommandLine
from grpo_runs.process.ports import free_port
from grpo_trainer.errors import GrpoError, MissingPackage, NoInferenceServer
from grpo_trainer.weight_sync import build as server_process
from grpo_trainer.weight_sync.build import (
    LOG,
    build_weight_sync,
    command_to_start,
    inference_server,
    server_flags,
    sizing_flags,
)
from grpo_trainer.weight_sync.files import FileSync
from tests.support.http_stub import stub_server
from tests.support.wait import wait_for

REDIS = "redis://:secret@127.0.0.1:6379/0"
SERVER = """
import http.server, os, signal, sys
print("argv", *sys.argv[1:], flush=True)
print("redis", os.environ["REDIS_URL"], os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
if "--fails" in sys.argv:
    sys.exit("no such model")
if "--deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
TRAINER = """
import sys
from grpo_trainer.weight_sync import build as server_process
from grpo_core.settings import load_settings
from grpo_core.tree.trainer_command import CommandLine
server_process.PACKAGE = "stand_in_vllm"
server_process._has_gpu = lambda: False  # to find out, it imports torch
settings = load_settings(CommandLine, sys.argv[1:], at_start=True).settings()
with server_process.inference_server(settings):
    print("up", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that replaces the server's, for `python -m`."""
    place = tmp_path / "packages" / "stand_in_vllm"
    place.mkdir(parents=True)
    (place / "__init__.py").touch()
    (place / "__main__.py").write_text(SERVER)
    monkeypatch.setenv("PYTHONPATH", str(place.parent), prepend=os.pathsep)
    monkeypatch.syspath_prepend(str(place.parent))
    monkeypatch.setattr(server_process, "PACKAGE", "stand_in_vllm")


def local(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def settings(directory: Path, mode: str = "lora_restart", **changes: Any) -> TrainerSettings:
    model = directory / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "qwen2", "max_position_embeddings": 256}')
    (directory / "saved").mkdir()
    fixed: dict[str, Any] = {
        **{"model": str(model), "mode": mode, "save_path": directory / "saved"},
        **{"inference_url": local(free_port()), "run_id": "r1", "service_deadline_s": 0.1},
    }
    if mode != "shared_vllm":
        fixed["redis_url"] = REDIS
    return CommandLine(**(fixed | changes)).settings()


def after(word: str, words: list[str]) -> str:
    return words[words.index(word) + 1]


def listens(port: int) -> bool:
    return server_process._listens("127.0.0.1", port)


@pytest.mark.parametrize(
    ("inherited", "seen"), [(None, "1"), ("4,GPU-a7", "GPU-a7"), ("MIG-2, 5", "5")]
)
def test_the_gpu_of_a_server_is_counted_among_those_that_the_trainer_sees(
    inherited: str | None, seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if inherited is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", inherited)
    chosen = settings(tmp_path, vllm_gpu=1)
    assert server_process._environment(chosen)["CUDA_VISIBLE_DEVICES"] == seen
    if inherited is not None:
        beyond = chosen.model_copy(update={"vllm_gpu": 2})
        with pytest.raises(NoSuchDevice, match=f"--vllm-gpu 2: .*{inherited} lists 2 GPUs"):
            server_process._environment(beyond)


def test_options_of_a_server_that_is_started(tmp_path: Path) -> None:
    chosen, more = settings(tmp_path, lora_r=17), "--enforce-eager --max-num-seqs 4"
    flags = server_flags(chosen, 9001) + sizing_flags(chosen, more, has_gpu=False)
    assert after("--max-lora-rank", flags) == "32"
    assert after("--run-id", flags) == "r1"
    assert after("--weights-dir", flags) == str(tmp_path / "saved" / "served_weights")
    assert after("--max-model-len", flags) == "256"  # the model's maximum
    assert flags[-3:] == ["--enforce-eager", "--max-num-seqs", "4"]
    assert "--gpu-memory-utilization" not in flags
    assert after("--gpu-memory-utilization", sizing_flags(chosen, more, has_gpu=True)) == "0.45"
    assert "secret" not in " ".join(flags) + command_to_start(chosen, 9001)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("mode", "flags"), [("lora_restart", ""), ("none", "--deaf")], ids=["ends", "ignores SIGTERM"]
)
def test_a_server_is_started_and_ended_with_the_run(
    mode: str, flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_process, "END_GRACE_S", 0.1 if flags else 60.0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    chosen = settings(tmp_path, mode, vllm_gpu=3, vllm_flags=flags)
    with inference_server(chosen):
        written = (tmp_path / "saved" / LOG).read_text()
        assert f"redis {REDIS} 3" in written
        port = urlsplit(chosen.inference_url).port
        assert port is not None
        assert f"--port {port}" in written
        assert listens(port)
    assert not listens(port)


@pytest.mark.usefixtures("package")
def test_with_several_servers_none_is_started_or_looked_for_at_the_url(tmp_path: Path) -> None:
    chosen = settings(tmp_path, "none", num_inference_nodes=2)
    with inference_server(chosen):
        assert not listens(urlsplit(chosen.inference_url).port or 0)
    unnamed = chosen.model_copy(update={"run_id": None})
    with pytest.raises(NoInferenceServer), inference_server(unnamed):
        pass  # only that server could name the run


@pytest.mark.parametrize(
    ("nodes", "processes", "place"),
    [(0, 1, (None, 0)), (2, 1, ("trainer", 26756)), (2, 2, ("trainer", 26757))],
)
def test_where_servers_fetch_weights(
    nodes: int,
    processes: int,
    place: tuple[str | None, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With several trainer processes, torch.distributed listens on --master-port."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: processes > 1)
    chosen = settings(tmp_path, "none", num_inference_nodes=nodes, master_addr="trainer")
    sync = build_weight_sync(chosen)
    assert isinstance(sync, FileSync)
    with contextlib.closing(sync):
        assert (sync.source._address, sync.source._port) == place


@pytest.mark.usefixtures("package")
def test_a_server_ends_with_a_trainer_that_is_killed(tmp_path: Path) -> None:
    port = free_port()
    given = ["--model", "m", "--mode", "none", "--max-model-len", "99"]
    given += ["--vllm-port", str(port), "--save-path", str(tmp_path), "--redis-url", REDIS]
    with subprocess.Popen(
        [sys.executable, "-c", TRAINER, *given],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as trainer:
        assert trainer.stdout is not None
        while "up" not in trainer.stdout.readline():
            assert trainer.poll() is None
        trainer.send_signal(signal.SIGKILL)
    wait_for(lambda: not listens(port))


def test_a_server_that_listens_already_is_used(tmp_path: Path) -> None:
    with stub_server({}) as stub, inference_server(settings(tmp_path, inference_url=stub.url)):
        assert not (tmp_path / "saved" / LOG).exists()


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("changes", "error", "told"),
    [
        ({"vllm_flags": "--fails"}, NoInferenceServer, r"ended with status 1(.|\n)*no such model"),
        ({}, MissingPackage, "no_such_package"),
    ],
)
def test_a_server_that_cannot_be_started_is_named(
    changes: dict[str, str],
    error: type[GrpoError],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if error is MissingPackage:
        monkeypatch.setattr(server_process, "PACKAGE", "no_such_package")
    with (
        pytest.raises(error, match=told),
        inference_server(settings(tmp_path, "none", **changes)),
    ):
        pass
