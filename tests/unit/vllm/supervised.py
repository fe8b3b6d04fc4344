"""Runs a real supervisor with stand-in engines, whose restarts take a second."""

from __future__ import annotations

import contextlib
import itertools
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from redis import Redis

from grpo_core.process import ManagedProcess
from grpo_core.redis.keys import served_weights_key
from grpo_core.weights.directory_checks import ADAPTER_CONFIG, ADAPTER_WEIGHTS, MODEL_CONFIG
from grpo_core.weights.versions import version_id
from grpo_core.wire.policy_version import PolicyVersion
from grpo_runs.process.ports import free_port
from tests.fixtures.announcer import Announcer
from tests.unit.vllm.stub_engine import DIRECTORY

START_S = 120.0
SUPERVISOR = """
import sys
from grpo_core.logs import configure_logging
from grpo_core.settings import load_settings
from grpo_core.tree.server import ServerSettings
from grpo_vllm.supervisor.main import supervise
configure_logging("vllm-server", "INFO")
settings = load_settings(ServerSettings, sys.argv[1:])
sys.exit(supervise(settings, sys.argv[1:], "tests.unit.vllm.stub_engine"))
"""
"""`vllm-api-server` with the stand-in for its engine and no other difference."""


@dataclass(frozen=True)
class Supervised:
    process: ManagedProcess
    port: int
    health_url: str
    directory: Path
    announcer: Announcer
    _steps: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def weights(self) -> Path:
        return self.directory / "weights"

    @property
    def host(self) -> psutil.Process:
        """The process id of the fork server."""
        host = psutil.Process(self.status()["engine_pid"]).parent()
        assert host is not None
        assert host.ppid() == self.process.pid
        return host

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = httpx.get(f"{self.health_url}/status").json()
        return answer

    def count(self, what: str) -> int:
        number: int = self.status()[what]
        return number

    def wait_for(self, **facts: Any) -> dict[str, Any]:
        """Returns the first status with these values."""
        found: dict[str, Any] = {}

        def has_them() -> bool:
            with contextlib.suppress(httpx.TransportError):
                found.update(self.status())
            return facts.items() <= found.items()

        self.process.wait_until(has_them, START_S)
        return found

    def wait_for_requests(self, number: int) -> None:
        """Returns when so many requests are in flight."""
        url = f"{self.url}/bridge/in-flight"
        self.process.wait_until(lambda: httpx.get(url).json() == number, START_S)

    def generate(self, **body: Any) -> dict[str, Any]:
        found: dict[str, Any] = self.post(**body).raise_for_status().json()
        return found

    def post(self, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/generate", json=body)

    def serves(self, version: PolicyVersion) -> bool:
        """The version in the engine's own answer."""
        return bool(self.generate()["policy_version"] == [[list(version), list(version)]])

    def next_version(self) -> PolicyVersion:
        return PolicyVersion(1, next(self._steps))

    def publish(self, restarts: bool = True, adapter: bool = False) -> PolicyVersion:
        """Serve new weights. Returns their version when the engine and Redis have it."""
        version = self.next_version()
        make = self.adapter if adapter else self.checkpoint
        announced = self.announcer.announce(version, make(version), restarts=restarts)
        status = self.announcer.settled(announced, START_S)
        assert status.version == version, status
        key = served_weights_key(self.announcer.run_id)
        with Redis.from_url(self.announcer.redis_url, decode_responses=True) as redis:
            expected = [str(version.epoch), str(version.step)]
            self.process.wait_until(lambda: redis.hmget(key, "epoch", "step") == expected, START_S)
        return version

    @contextmanager
    def engines(self, mark: str) -> Iterator[None]:
        """Engines that start inside the context are BROKEN, or HELD until the context ends."""
        (self.directory / mark).touch()
        try:
            yield
        finally:
            (self.directory / mark).unlink()

    def checkpoint(self, version: PolicyVersion) -> Path:
        files = {MODEL_CONFIG: "{}", "model.safetensors": f"weights of {version}"}
        return self._weights(version, files)

    def adapter(self, version: PolicyVersion, rank: int = 8, **others: str) -> Path:
        files = {ADAPTER_CONFIG: f'{{"r": {rank}}}', ADAPTER_WEIGHTS: f"weights of {version}"}
        return self._weights(version, files | others)

    def _weights(self, version: PolicyVersion, files: Mapping[str, str]) -> Path:
        path = self.weights / version_id(version)
        path.mkdir(parents=True)
        for file, content in files.items():
            (path / file).write_text(content)
        return path


@contextmanager
def supervised(
    directory: Path,
    redis_url: str | None,
    *flags: str,
    run_id: str | None = None,
    port: int | None = None,
    waits: bool = True,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Supervised]:
    run_id, port, health_port = run_id or uuid.uuid4().hex, port or free_port(), free_port()
    (directory / "weights").mkdir(exist_ok=True)
    options = f"--model some-model --port {port} --health-port {health_port} --run-id {run_id}"
    process = ManagedProcess(
        "vllm-server",
        [
            *(sys.executable, "-c", SUPERVISOR),
            *options.split(),
            *("--weights-dir", str(directory / "weights"), "--redis-url", redis_url or "none"),
            *("--staging-dir", str(directory / "staging")),
            *flags,
        ],
        directory / "server.log",
        {DIRECTORY: str(directory), **(environment or {})},
    )
    server = Supervised(
        process,
        port,
        f"http://127.0.0.1:{health_port}",
        directory,
        Announcer(redis_url or "", run_id),
    )
    try:
        if waits:
            server.wait_for(state="serving")
        yield server
    finally:
        process.stop()
