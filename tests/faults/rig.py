"""A whole run whose processes a test may kill and start again, one by one."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import psutil

from grpo_local.ports import free_port
from grpo_local.processes import ManagedProcess
from grpo_local.redis_server import answers_ping
from tests.faults import staged_trainer
from tests.faults.commands import (
    ENVIRONMENT,
    REDIS,
    RUN_API,
    SERVER,
    SHARED,
    TRAINER,
    Commands,
    Ports,
)
from tests.support.process_table import eventually, is_alive

ORDER = (REDIS, RUN_API, SERVER, TRAINER, ENVIRONMENT)
START_DEADLINE_S = 300.0
STEP_DEADLINE_S = 180.0
CALL_DEADLINE_S = 60.0
EVERYTHING = os.environ.get("FAULTS") == "all"
"""`make test-full`: also what `make test` has no time for. A trainer needs ten seconds to start on
a slow core, an engine without its host twenty."""
_POLL_S = 0.05


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
        self._ports = Ports(free_port(), free_port(), free_port(), free_port())
        self._commands = Commands(
            directory, sockets / "weights.sock", str(model), mode, self._ports
        )
        self._processes: dict[str, ManagedProcess] = {}
        self._starts = 0
        self.metrics, self.checkpoints = self._commands.metrics, self._commands.checkpoints

    @property
    def run_api_url(self) -> str:
        return self._commands.run_api_url

    @property
    def server_url(self) -> str:
        return self._commands.server_url

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
        command = [*self._commands.of(name), *flags]
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
        assert eventually(lambda: not any(is_alive(child.pid) for child in below))

    def server_status(self) -> dict[str, Any]:
        """What the supervisor says of itself."""
        url = f"http://127.0.0.1:{self._ports.health}/status"
        answer: dict[str, Any] = httpx.get(url, timeout=CALL_DEADLINE_S).json()
        return answer

    def close(self) -> None:
        for process in reversed(self._processes.values()):
            process.kill()

    def records(self) -> list[dict[str, Any]]:
        """One per step, of every trainer so far."""
        return read_records(self.metrics)

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
        asked = self.ask_for(stage)
        try:
            self.wait_for_stop(asked, deadline_s)
            yield
        finally:
            self.let_go()

    def ask_for(self, stage: str) -> str:
        """The trainer, this one or the next, is to stand still where it next comes to this stage;
        one that stands goes on until then. Returns what it says once it stands."""
        asked = f"{stage} {uuid4().hex}"
        written = self._stages / "asked"
        written.write_text(asked)
        written.replace(self._stages / staged_trainer.WANTED)
        return asked

    def wait_for_stop(self, asked: str, deadline_s: float = STEP_DEADLINE_S) -> None:
        held = self._stages / staged_trainer.HELD
        self.wait_until(lambda: _content(held) == asked, deadline_s)

    def let_go(self) -> None:
        (self._stages / staged_trainer.WANTED).unlink()

    def bridge_info(self) -> dict[str, Any]:
        """Waits while there is no engine."""
        url = f"{self.server_url}/bridge/info"
        answer: dict[str, Any] = httpx.get(url, timeout=START_DEADLINE_S).json()
        return answer

    def wait_for_end_of_pause(self, deadline_s: float) -> None:
        self.wait_until(lambda: not self.bridge_info()["paused"], deadline_s)

    def status(self) -> dict[str, Any]:
        url = f"{self.run_api_url}/status"
        answer: dict[str, Any] = httpx.get(url, timeout=CALL_DEADLINE_S).json()
        return answer

    def environments(self) -> list[dict[str, Any]]:
        answer: list[dict[str, Any]] = httpx.get(
            f"{self.run_api_url}/environments", timeout=CALL_DEADLINE_S
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


def read_records(path: Path) -> list[dict[str, Any]]:
    """Of the whole lines of a metrics file: its last one may be half written."""
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    return [json.loads(line) for line in whole.splitlines()]


def _content(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""
