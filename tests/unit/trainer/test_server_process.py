"""Who starts the inference server, what it is told, and that exactly it is ended."""

from __future__ import annotations

import http.server
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from grpo_local.ports import free_port
from grpo_trainer import server_process
from grpo_trainer.errors import MissingPackage, NoInferenceServer
from grpo_trainer.server_command import command_to_start, server_flags, sizing_flags
from grpo_trainer.server_process import LOG, inference_server
from grpo_trainer.settings import TrainerSettings
from tests.unit.trainer.tiny_policy import model_directory

REDIS = "redis://:secret@127.0.0.1:6379/0"
SERVER = """
import http.server, os, signal, sys, time
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


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that stands in for the server's, for `python -m`."""
    place = tmp_path / "packages" / "stand_in_vllm"
    place.mkdir(parents=True)
    (place / "__init__.py").touch()
    (place / "__main__.py").write_text(SERVER)
    monkeypatch.setenv("PYTHONPATH", str(place.parent))
    monkeypatch.syspath_prepend(str(place.parent))
    monkeypatch.setattr(server_process, "PACKAGE", "stand_in_vllm")


def settings(directory: Path, mode: str = "lora_restart", **changes: Any) -> TrainerSettings:
    model = directory / "model"
    if not model.exists():
        model_directory(model)
    (directory / "saved").mkdir(exist_ok=True)
    fixed: dict[str, Any] = {
        **{"model_name": str(model), "weight_bridge_mode": mode, "save_path": directory / "saved"},
        **{"vllm_port": free_port(), "run_id": "r1", "service_deadline_s": 0.5},
    }
    if mode != "shared_vllm":
        fixed["redis_url"] = REDIS
    return TrainerSettings(**(fixed | changes))


def after(word: str, words: list[str]) -> str:
    return words[words.index(word) + 1]


def test_what_the_server_is_told(tmp_path: Path) -> None:
    chosen = settings(tmp_path, lora_r=17, vllm_flags="--enforce-eager --max-num-seqs 4")
    flags = server_flags(chosen, 9001) + sizing_flags(chosen, has_gpu=False)
    assert after("--max-lora-rank", flags) == "32"
    assert after("--run-id", flags) == "r1"
    assert after("--weights-dir", flags) == str(tmp_path / "saved" / "served_weights")
    assert after("--max-model-len", flags) == "256"  # what the model allows
    assert flags[-3:] == ["--enforce-eager", "--max-num-seqs", "4"]
    assert "--gpu-memory-utilization" not in flags
    assert after("--gpu-memory-utilization", sizing_flags(chosen, has_gpu=True)) == "0.45"
    assert "secret" not in " ".join(flags) + command_to_start(chosen, 9001)
    whole = server_flags(settings(tmp_path, "none"), 9001)
    assert "--enable-lora" not in whole


@pytest.mark.usefixtures("package")
def test_it_is_started_where_nothing_listens_and_ended_with_the_run(tmp_path: Path) -> None:
    chosen = settings(tmp_path, vllm_gpu=3)
    with inference_server(chosen):
        written = (tmp_path / "saved" / LOG).read_text()
        assert f"redis {REDIS} 3" in written
        assert f"--port {chosen.vllm_port}" in written
        assert server_process._listens("127.0.0.1", chosen.vllm_port)
    assert not server_process._listens("127.0.0.1", chosen.vllm_port)


@pytest.mark.usefixtures("package")
def test_one_that_ignores_its_end_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_process, "END_GRACE_S", 0.3)
    chosen = settings(tmp_path, "none", vllm_flags="--deaf")
    with inference_server(chosen):
        pass
    assert not server_process._listens("127.0.0.1", chosen.vllm_port)


@pytest.mark.usefixtures("package")
def test_one_that_does_not_come_up_is_told_with_its_log(tmp_path: Path) -> None:
    with (
        pytest.raises(NoInferenceServer, match=r"ended with status 1(.|\n)*no such model"),
        inference_server(settings(tmp_path, "none", vllm_flags="--fails")),
    ):
        pass


def test_a_package_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_process, "PACKAGE", "no_such_package")
    with (
        pytest.raises(MissingPackage, match="no_such_package"),
        inference_server(settings(tmp_path, "none")),
    ):
        pass


@contextmanager
def listening(port: int) -> Iterator[None]:
    server = http.server.HTTPServer(("127.0.0.1", port), http.server.BaseHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("mode", ["none", "lora_restart", "lora_only", "shared_vllm"])
def test_a_server_that_is_there_is_used(mode: str, tmp_path: Path) -> None:
    chosen = settings(tmp_path, mode)
    with listening(chosen.vllm_port), inference_server(chosen):
        assert not (tmp_path / "saved" / LOG).exists()


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("shared_vllm", ["--share-weights"]),
        ("lora_only", ["--enable-lora", "--max-lora-rank", "16"]),
    ],
)
def test_elsewhere_the_user_is_told_what_to_start(
    mode: str, expected: list[str], tmp_path: Path
) -> None:
    chosen = settings(tmp_path, mode)
    with pytest.raises(NoInferenceServer) as told, inference_server(chosen):
        pass
    command = shlex.split(str(told.value).splitlines()[-1])
    assert "vllm-api-server" in command
    assert command[-len(expected) :] == expected
    assert after("--port", command) == str(chosen.vllm_port)


def test_no_server_is_started_for_another_host(tmp_path: Path) -> None:
    away = settings(tmp_path, "none", vllm_url="http://no-such-host.invalid:9001")
    with pytest.raises(NoInferenceServer, match="no-such-host"), inference_server(away):
        pass


@pytest.mark.usefixtures("package")
def test_it_dies_with_a_trainer_that_is_killed(tmp_path: Path) -> None:
    chosen = settings(tmp_path, "none")
    script = (
        "import sys, time\n"
        "from grpo_trainer import server_process\n"
        "from grpo_trainer.settings import TrainerSettings\n"
        "server_process.PACKAGE = 'stand_in_vllm'\n"
        f"chosen = TrainerSettings(model_name={chosen.model_name!r}, weight_bridge_mode='none',\n"
        f"    save_path={str(chosen.save_path)!r}, vllm_port={chosen.vllm_port},\n"
        f"    redis_url={REDIS!r})\n"
        "with server_process.inference_server(chosen):\n"
        "    print('up', flush=True)\n"
        "    time.sleep(60)\n"
    )
    trainer = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with trainer:
        assert trainer.stdout is not None
        while "up" not in trainer.stdout.readline():
            assert trainer.poll() is None
        trainer.send_signal(signal.SIGKILL)
    give_up_at = time.monotonic() + 50
    while server_process._listens("127.0.0.1", chosen.vllm_port):
        assert time.monotonic() < give_up_at, "it outlives its trainer"
        time.sleep(0.05)
