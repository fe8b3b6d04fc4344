"""A run whose processes a test can kill and restart one by one, and what must hold afterwards."""

from __future__ import annotations

import contextlib
import json
import random
import re
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import httpx
import psutil

from grpo_core.process import ManagedProcess
from grpo_core.redis.server import answers_ping
from tests.support.process_table import is_alive, processes_with, stop_for
from tests.support.wait import wait_for
from tests.whole_run.commands import (
    ENVIRONMENT,
    REDIS,
    RESTART_EVERY_STEPS,
    RUN_API,
    SERVER,
    SHARED,
    TRAINER,
    Commands,
    Shape,
    health_of,
)
from tests.whole_run.stages import HELD, JOURNAL, VARIABLE, WANTED, read

T = TypeVar("T")

DEADLINE_S = 300.0
"""Long, because engines start and other runs may share the machine."""
NOISE = 1e-4
"""Bound on |served - trained logprob| in float32: sixty times the measured value."""
MOVED = 100 * NOISE
"""Minimum change of the logprobs by a publication, so that old and new weights can be told
apart."""
ENGINE, SUPERVISOR = "engine", "supervisor"
"""Processes of the server that can be killed alone."""
RANK, REWARD_WORKER = "rank", "reward-worker"
"""Any one of the trainer's, and any one of the environment's."""
CALLS = {TRAINER: "/batch", ENVIRONMENT: "/(scored_data|status-env|info)"}
"""Paths of run-api that processes request repeatedly until they get an answer."""


class Rig:
    """Args:
    directory: logs, metrics, checkpoints and Redis' files
    sockets: a short path for the weight socket
    deadline_s: of waits for processes that start, and for steps
    """

    def __init__(
        self,
        directory: Path,
        sockets: Path,
        model: Path,
        shape: Shape,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._deadline_s = deadline_s
        self.mode = mode = shape.mode
        self._start_order = shape.start_order
        self.steps_until_proof = 3 if mode == SHARED else RESTART_EVERY_STEPS + 1
        self._directory = directory
        self._stages = directory / "stages"
        self._stages.mkdir()
        self._commands = Commands(directory, sockets / "weights.sock", str(model), shape)
        self._processes: dict[str, ManagedProcess] = {}
        self._starts = 0
        self.checkpoints = self._commands.checkpoints
        self.run_api_url = self._commands.url(RUN_API)

    def start(self, *names: str) -> None:
        """Start processes and wait until they are ready. Supervisors start their engines."""
        processes = {server_of(name) for name in names if not name.startswith(ENGINE)}
        for row in self._start_order:
            starting = [name for name in row if name in processes]
            for name in starting:
                self.launch(name)
            for name in starting:
                self.wait_until_ready(name)

    def launch(self, name: str, *flags: str) -> ManagedProcess:
        """Start one process without waiting. A later flag overrides an earlier one."""
        if name in self._processes:
            self._processes[name].kill()  # the process ended: collect its exit status
        self._starts += 1
        log = self._directory / f"{self._starts:02}-{name}.log"
        variables = self._commands.variables() | {VARIABLE: str(self._stages)}
        command = [*self._commands.of(name), *flags]
        self._processes[name] = ManagedProcess(name, command, log, variables)
        return self._processes[name]

    def wait_until_ready(self, name: str) -> None:
        self._processes[name].wait_until(lambda: self._ready(name), self._deadline_s)

    def start_what_is_dead(self) -> None:
        living = [p.name for p in self._processes.values() if p.exit_code is None]
        self.start(*(name for row in self._start_order for name in row if name not in living))

    def kill(self, *names: str) -> None:
        """Kill a process with SIGKILL; those below it must end by themselves."""
        for name in names:
            if name.startswith(ENGINE):
                self._kill_engine(server_of(name))
            elif name.startswith(SUPERVISOR):
                self._kill_supervisor_alone(server_of(name))
            elif name in (RANK, REWARD_WORKER):
                self.tree(name)[0].kill()
            else:
                with contextlib.suppress(psutil.NoSuchProcess):  # it was killed before
                    root, *below = self.tree(name)
                    root.kill()
                    _wait_for_end(below)
                self._processes[name].kill()  # collects its exit status
        if RANK in names:  # torchrun ends the others
            wait_for(lambda: self._processes[TRAINER].exit_code is not None)

    def _kill_engine(self, server: str) -> None:
        """Kill the process that answers HTTP and those that compute."""
        engine = psutil.Process(self._engine_pid(server))
        for process in (*engine.children(recursive=True), engine):
            with contextlib.suppress(psutil.NoSuchProcess):  # already ended with the other one
                process.kill()

    def _kill_supervisor_alone(self, server: str) -> None:
        """Kill the supervisor alone; the kernel must end its engine."""
        supervisor = psutil.Process(self._processes[server].pid)
        below = supervisor.children(recursive=True)
        supervisor.kill()
        _wait_for_end(below)

    def stop_for(self, seconds: float, *names: str) -> None:
        """Stop processes with SIGSTOP, with their children, and let them go on."""
        stop_for(seconds, [each for name in names for each in self.tree(name)])

    def tree(self, name: str) -> list[psutil.Process]:
        """A process and all below it."""
        if name.startswith(ENGINE):
            root = psutil.Process(self._engine_pid(server_of(name)))
        elif name == RANK:
            root = random.choice(psutil.Process(self._processes[TRAINER].pid).children())
        elif name == REWARD_WORKER:
            root = random.choice(self.wait_for(self._reward_workers))
        else:
            root = psutil.Process(self._processes[name].pid)
        return [root, *root.children(recursive=True)]

    def _engine_pid(self, server: str) -> int:
        return int(self.wait_for(lambda: self.server_status(server)["engine_pid"]))

    def _reward_workers(self) -> list[psutil.Process]:
        """Forks of a process that the environment has started."""
        children = psutil.Process(self._processes[ENVIRONMENT].pid).children()
        return [worker for child in children for worker in child.children()]

    def close(self) -> None:
        for process in reversed(self._processes.values()):
            process.kill()

    def wait_for(self, read: Callable[[], T], accept: Callable[[T], bool] = bool) -> T:
        """`wait_for`, which also fails if a process ends."""

        def read_of_the_living() -> T:
            for process in self._processes.values():
                assert process.exit_code != 1, f"{process.name} ended:\n{process.log_tail(40)}"
            return read()

        try:
            return wait_for(read_of_the_living, accept, self._deadline_s)
        except AssertionError as late:
            tails = [f"== {p.name}\n{p.log_tail(15)}" for p in self._processes.values()]
            raise AssertionError("\n".join([str(late), *tails])) from None

    def wait_for_steps(self, more: int) -> list[dict[str, Any]]:
        """The records of the next `more` steps."""
        before = len(self.records())
        found = self.wait_for(self.records, lambda records: len(records) >= before + more)
        return found[before : before + more]

    def wait_for_log(self, name: str, words: str, times: int = 1) -> None:
        self.wait_for(lambda: self.log(name).count(words), lambda found: found >= times)

    def wait_for_callers(self) -> None:
        """Wait until trainer and environment have requested a dead run-api without success."""
        missing = set(CALLS)
        with socket.create_server(("127.0.0.1", self._commands.ports[RUN_API])) as listener:
            listener.settimeout(DEADLINE_S)
            while missing:
                caller, _ = listener.accept()
                caller.settimeout(DEADLINE_S)
                with caller, contextlib.suppress(OSError), caller.makefile("rb") as sent:
                    line = sent.readline(4096).decode("latin-1")
                    missing -= {name for name, path in CALLS.items() if re.search(path, line)}

    @contextmanager
    def held_at(self, stage: str) -> Iterator[None]:
        """Hold the trainer at this stage of a step while the block runs."""
        asked = self.ask_for(stage)
        try:
            self.wait_for_stop(asked)
            yield
        finally:
            self.release()

    def ask_for(self, stage: str) -> str:
        """Hold the trainer, or its successor, at the next occurrence of this stage; a held trainer
        continues until then. Returns the trainer's message once it is held."""
        asked = f"{stage} {uuid4().hex}"
        written = self._stages / "asked"
        written.write_text(asked)
        written.replace(self._stages / WANTED)
        return asked

    def wait_for_stop(self, asked: str) -> None:
        self.wait_for(lambda: read(self._stages / HELD), lambda held: held == asked)

    def release(self) -> None:
        (self._stages / WANTED).unlink()

    def port(self, name: str) -> int:
        return self._commands.ports[name]

    def process(self, name: str) -> ManagedProcess:
        return self._processes[name]

    def end_environment(self, within_s: float) -> None:
        """In order: it sends what it has begun."""
        environment = self._processes[ENVIRONMENT]
        environment.signal(signal.SIGTERM)
        assert environment.wait(within_s) == 0, environment.log_tail(40)

    def log(self, name: str) -> str:
        return self._processes[name].log_path.read_text()

    def records(self) -> list[dict[str, Any]]:
        """One metrics record for each step that no restart has undone."""
        return whole_lines(self._directory / "metrics.jsonl")

    def journal(self) -> list[dict[str, Any]]:
        """One entry for each batch that any trainer of the run has taken."""
        return whole_lines(self.checkpoints / JOURNAL)

    def submissions(self) -> str:
        """What the environment has journalled, of a run with `as_shipped`."""
        return self._commands.submissions.read_text()

    def processes(self) -> list[psutil.Process]:
        """Those that inherited the run's variables."""
        return processes_with(VARIABLE, str(self._stages))

    def server_status(self, server: str = SERVER) -> dict[str, Any]:
        return _answer(f"{self._commands.url(health_of(server))}/status")

    def bridge_info(self, server: str = SERVER) -> dict[str, Any]:
        """The bridge's answer; waits until there is an engine."""
        return _answer(f"{self._commands.url(server)}/bridge/info")

    def status(self) -> dict[str, Any]:
        return _answer(f"{self.run_api_url}/status")

    def _ready(self, name: str) -> bool:
        try:
            return self._is_ready(name)
        except httpx.TransportError:
            return False

    def _is_ready(self, name: str) -> bool:
        if name == REDIS:
            return answers_ping(self._commands.ports[REDIS])
        if name == RUN_API:
            return httpx.get(f"{self.run_api_url}/health").status_code == 200
        if name.startswith(SERVER):
            return bool(self.bridge_info(name)["state"])
        if name == ENVIRONMENT:
            return "registered" in self.log(name)
        if self.mode == SHARED:
            attached = "shared_memory.attached" in self.log(name)
            return attached and self.bridge_info()["policy_version"] != [0, 0]
        return bool(re.search(r"weights\.(published|already_served)", self.log(name)))


def _wait_for_end(processes: list[psutil.Process]) -> None:
    """They end by themselves."""
    wait_for(lambda: [each for each in processes if is_alive(each.pid)], lambda left: not left)


def server_of(name: str) -> str:
    """The server of an engine or a supervisor; any other name as it is."""
    return name.replace(ENGINE, SERVER).replace(SUPERVISOR, SERVER)


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """Complete lines of a JSON-lines file whose last line may be unfinished."""
    return [json.loads(line) for line in read(path).rpartition("\n")[0].splitlines()]


def _answer(url: str) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.get(url, timeout=DEADLINE_S).json()
    return answer


def require_progress(rig: Rig, seen: int) -> None:
    """Check that steps are consecutive and every publication was served. Wait for a conclusive
    check: the previous weights would have failed it.

    Args: seen: steps recorded before the fault
    """

    def is_enough(records: list[dict[str, Any]]) -> bool:
        moved = [record.get("alignment/probe_moved", 0.0) for record in records]
        return len(records) >= rig.steps_until_proof and max(moved) > MOVED

    records = rig.wait_for(lambda: rig.records()[seen:], is_enough)
    steps = [record["step"] for record in records]
    assert steps == list(range(steps[0], steps[0] + len(steps)))
    assert max(record.get("alignment/probe_max", 0.0) for record in records) < NOISE


def require_every_batch_trained_once(taken: list[dict[str, Any]]) -> None:
    """Check the surviving steps: for each step number, the last one taken. They contain every batch
    once and in order, and no group twice. A batch that was delivered again has the same groups.
    Args: taken: the journal"""
    line = {entry["step"]: entry for entry in taken}
    steps = range(1, taken[-1]["step"] + 1)
    assert [line[step]["batch"] for step in steps] == list(steps)
    content = {line[step]["batch"]: line[step]["groups"] for step in steps}
    groups = [group for batch in content.values() for group in batch]
    assert len(groups) == len(set(groups))
    for entry in taken:
        assert entry["groups"] == content.get(entry["batch"], entry["groups"])


def require_own_completions(taken: list[dict[str, Any]], epochs: set[int]) -> None:
    """Check that a trainer of this run published the weights that sampled each completion."""
    for entry in taken:
        assert entry["versions"]
        foreign = [v for v in entry["versions"] if v[0] not in epochs or v[1] > entry["step"]]
        assert not foreign, f"step {entry['step']} trains on completions of versions {foreign}"
