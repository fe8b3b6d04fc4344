"""`grpo-run` as a user runs it, with a real Redis and stand-ins for server, trainer and run-api."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from grpo_local.health import HealthProbe
from grpo_local.ports import free_port
from grpo_local.processes import ManagedProcess
from grpo_local.redis_server import start_redis
from grpo_local.services import redis_url, url
from tests.support.process_table import eventually, is_alive
from tests.unit.local.stand_ins import write_stand_ins

STEPS = ("--training-steps", "4", "--metrics-file", "metrics.jsonl")


@dataclass
class Together:
    """`grpo-run` in an empty directory, beside a Redis and a run-api with an environment."""

    folder: Path
    redis_port: int
    api_port: int
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[str] | None = None

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "grpo_local.run_command", "--model", "m"),
                *("--redis-url", redis_url(self.redis_port), "--atropos-url", url(self.api_port)),
                *("--port", str(free_port()), *arguments),
            ],
            cwd=self.folder,
            env={**os.environ, **self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return self.process

    def finish(self) -> tuple[int, str, str]:
        """Exit status, stdout, stderr."""
        assert self.process is not None
        out, err = self.process.communicate(timeout=120)
        return self.process.returncode, out, err

    def said(self, name: str) -> str:
        return (self.folder / "logs" / f"{name}.log").read_text()

    def pids(self) -> list[int]:
        names = ("vllm-server", "engine", "trainer")
        files = [self.folder / "pids" / name for name in names]
        return [int(file.read_text()) for file in files if file.exists()]

    def is_training(self) -> bool:
        metrics = self.folder / "metrics.jsonl"
        return metrics.exists() and len(self.pids()) == 3


@pytest.fixture
def together(tmp_path: Path) -> Iterator[Together]:
    write_stand_ins(tmp_path / "stand-ins")
    (tmp_path / "pids").mkdir()
    environment = {
        "PYTHONPATH": str(tmp_path / "stand-ins"),
        "STAND_IN_PIDS": str(tmp_path / "pids"),
    }
    redis_port, api_port = free_port(), free_port()
    redis = start_redis(redis_port, tmp_path / "redis")
    command = [sys.executable, "-m", "grpo_api", "--host", "127.0.0.1", "--port", str(api_port)]
    api = ManagedProcess("run-api", command, tmp_path / "run-api.log", environment)
    with closing(HealthProbe()) as probe:
        api.wait_until(lambda: probe.answers(url(api_port)), deadline_s=60.0)
    httpx.post(f"{url(api_port)}/environment/sums", trust_env=False)
    together = Together(tmp_path, redis_port, api_port, environment)
    yield together
    if together.process is not None and together.process.poll() is None:
        together.process.kill()
        together.process.communicate()
    api.kill()
    redis.kill()


def test_server_and_trainer_start_with_what_the_mode_needs_and_both_end(together: Together) -> None:
    together.start(
        *("--mode", "lora_restart", "--vllm-restart-interval", "5", "--server-flags=--seed 3"),
        *("--save-path", "saved", "--", *STEPS),
    )
    status, out, err = together.finish()
    assert (status, err) == (0, "")
    assert "vllm-server ready after" in out
    served, trained = together.said("vllm-server"), together.said("trainer")
    assert f"--weights-dir {together.folder}/saved/served_weights --enable-lora" in served
    assert "--seed 3" in served
    assert "--vllm-restart-interval 5" in trained
    assert "--save-path saved" in trained
    assert trained.splitlines()[0] in out  # what the trainer says is shown
    assert len(together.pids()) == 3
    assert not any(is_alive(pid) for pid in together.pids())


def test_the_exit_status_is_the_trainers(together: Together) -> None:
    together.start("--", *STEPS, STAND_IN_FAILING_MODE="shared_vllm")
    status, out, _ = together.finish()
    assert status == 1
    assert "no such module: lm_tail" in out
    assert not any(is_alive(pid) for pid in together.pids())


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_reaches_the_trainer_which_may_finish(
    together: Together, number: signal.Signals, status: int
) -> None:
    process = together.start("--", *STEPS, STAND_IN_TRAINER_LINGERS_S="100")
    assert eventually(together.is_training)
    process.send_signal(number)
    ended_with, out, _ = together.finish()
    assert ended_with == status
    assert f"ending after {number.name}" in out
    assert not any(is_alive(pid) for pid in together.pids())


def test_a_server_that_dies_ends_the_trainer(together: Together) -> None:
    together.start("--", *STEPS, STAND_IN_TRAINER_LINGERS_S="100")
    assert eventually(together.is_training)
    os.kill(together.pids()[0], signal.SIGKILL)
    status, _, err = together.finish()
    assert status == 1
    assert err.startswith("failed (ProcessFailed): vllm-server ended with SIGKILL")
    assert not any(is_alive(pid) for pid in together.pids())


def test_what_belongs_to_both_is_not_taken_for_the_trainer_alone(together: Together) -> None:
    together.start("--", "--lora_r=8", "--save-path", "elsewhere")
    status, out, err = together.finish()
    assert (status, out) == (2, "")
    assert err == "grpo-run: --lora-r, --save-path: grpo-run's own; say it before the --\n"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--server-flags", "--name 'half"), "--server-flags: Value error, No closing quotation"),
        (("--mode", "some"), "--mode: Input should be 'shared_vllm', 'lora_only'"),
    ],
)
def test_mistakes_are_named_at_once(
    together: Together, arguments: tuple[str, str], problem: str
) -> None:
    together.start(*arguments)
    status, out, err = together.finish()
    assert (status, out) == (2, "")
    assert problem in err
