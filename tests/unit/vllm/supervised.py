"""A supervisor over engine processes that are stand-ins: a restart takes a second."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from redis import Redis

from grpo_core.handoff import Action, OutcomeState
from grpo_core.redis_names import served_weights_key
from grpo_core.weight_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, MODEL_CONFIG
from grpo_core.wire import PolicyVersion
from grpo_local.ports import free_port
from grpo_local.processes import ManagedProcess
from tests.fixtures.handoff import Sender
from tests.unit.vllm.stub_engine import BROKEN, DIRECTORY

START_S = 120.0


@dataclass(frozen=True)
class Supervised:
    process: ManagedProcess
    url: str
    health_url: str
    directory: Path
    sender: Sender

    @property
    def weights(self) -> Path:
        return self.directory / "weights"

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = httpx.get(f"{self.health_url}/status").json()
        return answer

    def wait_for(self, **facts: Any) -> dict[str, Any]:
        """Returns the status that has them."""
        found: dict[str, Any] = {}

        def has_them() -> bool:
            found.update(self._status_or_none())
            return facts.items() <= found.items()

        self.process.wait_until(has_them, START_S)
        return found

    def generate(self, seconds: float = 0.0) -> dict[str, Any]:
        answer = httpx.post(f"{self.url}/generate", json={"seconds": seconds}, timeout=60)
        found: dict[str, Any] = answer.raise_for_status().json()
        return found

    def serve(self, action: Action, version: PolicyVersion, path: Path) -> None:
        """Returns once Redis holds it for a supervisor that follows this one."""
        outcome = self.sender.ask(action, version, path)
        assert outcome.state is OutcomeState.DONE, outcome
        key = served_weights_key(self.sender.run_id)
        with Redis.from_url(self.sender.redis_url, decode_responses=True) as redis:
            expected = [str(version.epoch), str(version.step)]
            self.process.wait_until(lambda: redis.hmget(key, "epoch", "step") == expected, START_S)

    def wait_for_requests(self, number: int) -> None:
        """Until so many are under way."""
        url = f"{self.url}/bridge/in-flight"
        self.process.wait_until(lambda: httpx.get(url).json() == number, START_S)

    def break_engines(self, broken: bool) -> None:
        """Whether engine processes that start from now on end at once."""
        if broken:
            (self.directory / BROKEN).touch()
        else:
            (self.directory / BROKEN).unlink()

    def checkpoint(self, name: str, broken: bool = False) -> Path:
        path = self.weights / name
        path.mkdir(parents=True)
        (path / MODEL_CONFIG).write_text("{}")
        (path / "model.safetensors").write_text(name)
        if broken:
            (path / BROKEN).touch()
        return path

    def adapter(self, name: str, rank: int = 8, marker: str | None = None) -> Path:
        path = self.weights / name
        path.mkdir(parents=True)
        (path / ADAPTER_CONFIG).write_text(f'{{"r": {rank}}}')
        (path / ADAPTER_WEIGHTS).write_text(name)
        if marker is not None:
            (path / marker).touch()
        return path

    def _status_or_none(self) -> dict[str, Any]:
        try:
            return self.status()
        except httpx.TransportError:
            return {}


@contextmanager
def supervised(
    directory: Path,
    redis_url: str | None,
    *flags: str,
    run_id: str | None = None,
    port: int | None = None,
    waits: bool = True,
    before: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[Supervised]:
    """Args: before: a command that starts the server's."""
    run_id, port, health_port = run_id or uuid.uuid4().hex, port or free_port(), free_port()
    (directory / "weights").mkdir(exist_ok=True)
    redis = ("--redis-url", redis_url) if redis_url else ()
    process = ManagedProcess(
        "vllm-server",
        [
            *before,
            *(sys.executable, "-m", "tests.unit.vllm.stub_supervisor"),
            *("--model", "some-model"),
            *("--port", str(port)),
            *("--health-port", str(health_port)),
            *("--run-id", run_id),
            *("--weights-dir", str(directory / "weights")),
            *redis,
            *flags,
        ],
        directory / "server.log",
        {DIRECTORY: str(directory), **(environment or {})},
    )
    server = Supervised(
        process,
        f"http://127.0.0.1:{port}",
        f"http://127.0.0.1:{health_port}",
        directory,
        Sender(redis_url or "", run_id),
    )
    try:
        if waits:
            server.wait_for(state="serving")
        yield server
    finally:
        process.stop()
