"""A whole run whose processes a test may kill and start again, one by one."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from grpo_local.ports import free_port
from grpo_local.processes import ManagedProcess
from grpo_local.redis_server import answers_ping, bundled_redis, redis_command
from tests.faults import staged_trainer
from tests.fixtures.inference import SMALL

REDIS, RUN_API, SERVER, ENVIRONMENT, TRAINER = (
    *("redis", "run-api", "vllm-server", "environment", "trainer"),
)
ORDER = (REDIS, RUN_API, SERVER, TRAINER, ENVIRONMENT)
START_DEADLINE_S = 240.0
STEP_DEADLINE_S = 180.0
GROUP_SIZE, BATCH_SIZE = 4, 16
RUN_ID = "faults"
STEPS = 100_000
"""More than any test waits for."""
STATE_INTERVAL = 3
EVERYTHING = os.environ.get("FAULTS") == "all"
"""`make test-full`: also what `make test` has no time for. A trainer needs ten seconds to start on
a slow core, an engine without its host twenty."""
_POLL_S = 0.05


@dataclass(frozen=True)
class Ports:
    redis: int
    run_api: int
    server: int
    health: int


SHARED = "shared_vllm"
RESTART_EVERY_STEPS = 3
LORA_MODES = ("lora_only", "lora_restart")


class Rig:
    """Args:
    directory: logs, metrics, Redis' files
    sockets: a short path for the weight socket
    mode: how weights reach the server
    """

    def __init__(self, directory: Path, sockets: Path, model: Path, mode: str = SHARED) -> None:
        self.mode = mode
        self._directory = directory
        self._stages = directory / "stages"
        self._stages.mkdir()
        (directory / REDIS).mkdir()
        self._socket = sockets / "weights.sock"
        self._model = str(model)
        self._ports = Ports(free_port(), free_port(), free_port(), free_port())
        self._processes: dict[str, ManagedProcess] = {}
        self._starts = 0
        self.metrics = directory / "metrics.jsonl"
        self.checkpoints = directory / "checkpoints"

    @property
    def run_api_url(self) -> str:
        return f"http://127.0.0.1:{self._ports.run_api}"

    @property
    def server_url(self) -> str:
        return f"http://127.0.0.1:{self._ports.server}"

    def start(self, name: str, *flags: str) -> ManagedProcess:
        """Start one process and wait until it is ready. A later flag wins over an earlier."""
        process = self.launch(name, *flags)
        self.wait_until_ready(name)
        return process

    def wait_until_ready(self, name: str, deadline_s: float = START_DEADLINE_S) -> None:
        self._processes[name].wait_until(lambda: self._ready(name), deadline_s)

    def launch(self, name: str, *flags: str) -> ManagedProcess:
        """The same without waiting."""
        if name in self._processes:
            self._processes[name].kill()  # ended by itself: this collects its exit status
        self._starts += 1
        log = self._directory / f"{self._starts:02}-{name}.log"
        command = [*self._command(name), *flags]
        process = ManagedProcess(name, command, log, self._variables())
        self._processes[name] = process
        return process

    def process(self, name: str) -> ManagedProcess:
        return self._processes[name]

    def log(self, name: str) -> str:
        return self._processes[name].log_path.read_text()

    def is_alive(self, name: str) -> bool:
        return name in self._processes and self._processes[name].exit_code is None

    def kill(self, name: str) -> None:
        """SIGKILL, children included."""
        self._processes[name].kill()

    def kill_engine(self) -> None:
        """The process that answers HTTP and those that compute."""
        engine = psutil.Process(self.server_status()["engine_pid"])
        for process in (*engine.children(recursive=True), engine):
            with contextlib.suppress(psutil.NoSuchProcess):  # one took it with it
                process.kill()

    def kill_supervisor_alone(self) -> None:
        """Its engine must go with it, by the kernel's hand."""
        supervisor = psutil.Process(self._processes[SERVER].pid)
        below = supervisor.children(recursive=True)
        supervisor.kill()
        psutil.wait_procs(below, timeout=10.0)
        left = [child for child in below if child.is_running()]
        assert not [child for child in left if child.status() != psutil.STATUS_ZOMBIE]

    def server_status(self) -> dict[str, Any]:
        """What the supervisor says of itself."""
        url = f"http://127.0.0.1:{self._ports.health}/status"
        answer: dict[str, Any] = httpx.get(url, timeout=5).json()
        return answer

    def close(self) -> None:
        for process in reversed(self._processes.values()):
            process.kill()

    def records(self) -> list[dict[str, Any]]:
        """One per step, of every trainer so far."""
        if not self.metrics.exists():
            return []
        return [json.loads(line) for line in self.metrics.read_text().splitlines()]

    def wait_for_steps(self, more: int) -> list[dict[str, Any]]:
        """The records of the next `more` steps."""
        before = len(self.records())
        self.wait_until(lambda: len(self.records()) >= before + more, STEP_DEADLINE_S)
        return self.records()[before : before + more]

    def wait_until(self, condition: Callable[[], bool], deadline_s: float) -> float:
        """Seconds until `condition` held; no process may fail."""
        started = time.monotonic()
        while not condition():
            dead = [p for p in self._processes.values() if p.exit_code == 1]
            assert not dead, f"{dead[0].name} ended:\n{dead[0].log_tail(40)}"
            assert time.monotonic() - started < deadline_s, self._logs()
            time.sleep(_POLL_S)
        return time.monotonic() - started

    @contextmanager
    def held_at(self, stage: str, deadline_s: float = STEP_DEADLINE_S) -> Iterator[None]:
        """The trainer stands still at this stage of a step while the block runs."""
        wanted, held = self._stages / staged_trainer.WANTED, self._stages / staged_trainer.HELD
        wanted.write_text(stage)
        # What an earlier stop left there may not be gone yet, hence the comparison.
        self.wait_until(lambda: _content(held) == stage, deadline_s)
        try:
            yield
        finally:
            wanted.unlink()
            if self._processes[TRAINER].exit_code is not None:
                held.unlink(missing_ok=True)

    def bridge_info(self) -> dict[str, Any]:
        """Waits while there is no engine."""
        url = f"{self.server_url}/bridge/info"
        answer: dict[str, Any] = httpx.get(url, timeout=START_DEADLINE_S).json()
        return answer

    def wait_for_end_of_pause(self, deadline_s: float) -> None:
        self.wait_until(lambda: not self.bridge_info()["paused"], deadline_s)

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = httpx.get(f"{self.run_api_url}/status", timeout=20).json()
        return answer

    def environments(self) -> list[dict[str, Any]]:
        answer: list[dict[str, Any]] = httpx.get(
            f"{self.run_api_url}/environments", timeout=20
        ).json()
        return [environment for environment in answer if environment["connected"]]

    def _logs(self) -> str:
        return "\n".join(f"== {p.name}\n{p.log_tail(15)}" for p in self._processes.values())

    def _ready(self, name: str) -> bool:
        try:
            return self._is_ready(name)
        except httpx.TransportError:
            return False

    def _is_ready(self, name: str) -> bool:
        if name == REDIS:
            return answers_ping(self._ports.redis)
        if name == RUN_API:
            return httpx.get(f"{self.run_api_url}/health", timeout=5).status_code == 200
        if name == SERVER:
            return bool(self.bridge_info()["state"])
        log = self._processes[name].log_path.read_text()
        return any(said in log for said in self._said_when_ready(name))

    def _said_when_ready(self, name: str) -> tuple[str, ...]:
        if name == ENVIRONMENT:
            return ("registered",)
        if self.mode == SHARED:
            return ("attached to the server",)
        return ("published", "the server has these weights already")

    def _variables(self) -> Mapping[str, str]:
        return {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            staged_trainer.VARIABLE: str(self._stages),
        }

    def _command(self, name: str) -> list[str]:
        commands = {
            REDIS: self._redis,
            RUN_API: self._run_api,
            SERVER: self._server,
            ENVIRONMENT: self._environment,
            TRAINER: self._trainer,
        }
        return commands[name]()

    def _redis(self) -> list[str]:
        return redis_command(self._ports.redis, self._directory / REDIS, bundled_redis())

    def _run_api(self) -> list[str]:
        return [
            *(sys.executable, "-m", "grpo_api"),
            *("--port", str(self._ports.run_api)),
            *("--redis-deadline-s", "3"),
            *self._redis_flags(),
        ]

    def _server(self) -> list[str]:
        return [
            *(sys.executable, "-m", "grpo_vllm"),
            *("--model", self._model),
            *("--port", str(self._ports.server)),
            *("--health-port", str(self._ports.health)),
            *self._how_weights_come(),
            *self._redis_flags(),
            *("--dtype", "float32"),
            *SMALL,
        ]

    def _how_weights_come(self) -> list[str]:
        if self.mode == SHARED:
            config = self._directory / "vllm_bridge_config.json"
            return [
                "--share-weights",
                *("--weights-socket", str(self._socket)),
                *("--bridge-config-path", str(config)),
            ]
        lora = ["--enable-lora"] if self.mode in LORA_MODES else []
        return [*lora, "--weights-dir", str(self.checkpoints / "served_weights")]

    def _environment(self) -> list[str]:
        return [
            *(sys.executable, "-m", "grpo_env", "arithmetic", "serve"),
            *("--env.rollout-server-url", self.run_api_url),
            *("--env.group-size", str(GROUP_SIZE)),
            *("--env.max-completion-tokens", "8"),
            *("--env.max-batches-offpolicy", "2"),
            *("--env.drop-equal-scores", "false"),
            *("--openai.base-url", f"{self.server_url}/v1"),
            *("--openai.model-name", self._model),
        ]

    def _trainer(self) -> list[str]:
        return [
            *(sys.executable, "-m", "tests.faults.staged_trainer"),
            *("--model-name", self._model),
            *("--weight-bridge-mode", self.mode),
            *self._mode_flags(),
            *("--atropos-url", self.run_api_url),
            *("--vllm-port", str(self._ports.server)),
            *("--training-steps", str(STEPS)),
            *("--batch-size", str(BATCH_SIZE // 2)),
            *("--gradient-accumulation-steps", "2"),
            *("--lr", "1e-4"),
            *("--seq-len", "128"),
            *("--metrics-file", str(self.metrics)),
            *("--save-path", str(self.checkpoints)),
            *("--checkpoint-interval", "0"),
            *("--state-interval", str(STATE_INTERVAL)),
        ]

    def _mode_flags(self) -> list[str]:
        if self.mode == SHARED:
            return ["--verify-every-steps", "1"]
        restarts = ["--vllm-restart-interval", str(RESTART_EVERY_STEPS)]
        return [*self._redis_flags(), *([] if self.mode == "lora_only" else restarts)]

    def _redis_flags(self) -> list[str]:
        url = f"redis://127.0.0.1:{self._ports.redis}/0"
        return ["--redis-url", url, "--run-id", RUN_ID]


def _content(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""
