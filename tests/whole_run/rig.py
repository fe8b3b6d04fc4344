"""A run whose processes a test can kill, stop and restart one by one."""

from __future__ import annotations

import contextlib
import random
import re
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from uuid import uuid4

import httpx
import psutil

from grpo_core.closing import ClosesOnExit
from grpo_core.process import ManagedProcess
from grpo_core.redis.server import answers_ping
from tests.support.process_table import is_alive, processes_with, stop_for
from tests.support.wait import wait_for
from tests.whole_run.commands import (
    ENGINE,
    ENVIRONMENT,
    RANK,
    REDIS,
    RESTART_EVERY_STEPS,
    REWARD_WORKER,
    RUN_API,
    SERVER,
    SHARED,
    SUPERVISOR,
    TRAINER,
    Commands,
    health_of,
)
from tests.whole_run.journal import JOURNAL, Entry, Journals, lines_of
from tests.whole_run.journal import VARIABLE as JOURNALS
from tests.whole_run.stages import HELD, VARIABLE, WANTED, read
from tests.whole_run.verdict import NOISE, Evidence

T = TypeVar("T")

DEADLINE_S = 300.0
"""Long, because engines start and other runs may share the machine."""
MOVED = 100 * NOISE
"""Minimum change of the logprobs by a publication, so that old and new weights can be told
apart."""
CALLS = {TRAINER: "/batch", ENVIRONMENT: "/(scored_data|status-env|info)"}
"""Paths of run-api that processes request repeatedly until they get an answer."""


class Rig(ClosesOnExit):
    """Args: deadline_s: of waits for processes that start, and for steps"""

    def __init__(self, commands: Commands, deadline_s: float = DEADLINE_S) -> None:
        self._commands, self._deadline_s = commands, deadline_s
        self.directory, self.mode = commands.directory, commands.mode
        self.steps_until_proof = 3 if self.mode == SHARED else RESTART_EVERY_STEPS + 1
        self._stages = self.directory / "stages"
        self._stages.mkdir(parents=True)
        self.journals = Journals(self.directory / JOURNAL)
        self._processes: dict[str, ManagedProcess] = {}
        self._ended: set[str] = set()
        self._starts = 0
        self.checkpoints = commands.checkpoints
        self._metrics = self.directory / "metrics.jsonl"
        self.run_api_url = commands.url(RUN_API)

    def start(self, *names: str) -> None:
        """Start processes and wait until they are ready. Supervisors start their engines."""
        processes = {server_of(name) for name in names if not name.startswith(ENGINE)}
        for row in self._commands.start_order:
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
        self._ended.discard(name)
        log = self.directory / f"{self._starts:03}-{name}.log"
        variables = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        variables |= {VARIABLE: str(self._stages), JOURNALS: str(self.directory / JOURNAL)}
        variables |= self._commands.variables()
        command = [*self._commands.of(name), *flags]
        self._processes[name] = ManagedProcess(name, command, log, variables)
        return self._processes[name]

    def wait_until_ready(self, name: str) -> None:
        self._processes[name].wait_until(lambda: self._ready(name), self._deadline_s)

    def start_what_is_dead(self) -> None:
        living = [p.name for p in self._processes.values() if p.exit_code is None]
        rows = self._commands.start_order
        self.start(*(name for row in rows for name in row if name not in living))

    def kill(self, *names: str) -> None:
        """Kill a process with SIGKILL; those below it must end by themselves. Of an engine, the
        process that answers HTTP and those that compute."""
        for name in names:
            try:
                root, *below = self.tree(name)
            except psutil.NoSuchProcess:  # it was killed before
                continue
            for each in (*below, root) if name.startswith(ENGINE) else (root,):
                with contextlib.suppress(psutil.NoSuchProcess):  # it ended with another one
                    each.kill()
            if name == RANK:  # torchrun ends the others
                wait_for(lambda: self._processes[TRAINER].exit_code is not None)
                self._ended.add(TRAINER)
            elif server_of(name) in self._processes and not name.startswith(ENGINE):
                _wait_for_end(below)
                self._processes[server_of(name)].kill()  # collects its exit status
                self._ended.add(server_of(name))

    def end(self, *names: str) -> None:
        """With SIGTERM, in order: an environment sends what it has begun, for example."""
        for name in names:
            self._processes[name].signal(signal.SIGTERM)
        for name in names:
            ended = self._processes[name]
            assert ended.wait(self._deadline_s) == 0, ended.log_tail(40)
            self._ended.add(name)

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
            root = psutil.Process(self._processes[server_of(name)].pid)
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
        self._commands.close()

    def wait_for(self, read: Callable[[], T], accept: Callable[[T], bool] = bool) -> T:
        """`wait_for`, which also fails if a process has ended by itself."""

        def read_of_the_living() -> T:
            for name, process in self._processes.items():
                is_well = name in self._ended or process.exit_code is None
                assert is_well, f"{name} ended:\n{process.log_tail(40)}"
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

    def wait_for_proof(self, seen: int) -> None:
        """Wait for a conclusive check of the served weights, which the previous ones would fail.

        Args: seen: steps recorded before
        """

        def is_enough(records: list[Entry]) -> bool:
            moved = [record.get("alignment/probe_moved", 0.0) for record in records]
            return len(records) >= self.steps_until_proof and max(moved) > MOVED

        self.wait_for(lambda: self.records()[seen:], is_enough)

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

    def log(self, name: str) -> str:
        return self._processes[name].log_path.read_text()

    def records(self) -> list[Entry]:
        """One metrics record for each step that no restart has undone."""
        return lines_of(self._metrics)

    def taken(self) -> list[Entry]:
        """One entry for each batch that any trainer of the run has taken."""
        return Journals(self.checkpoints / JOURNAL).entries()

    def evidence(self, queued: int | None = None) -> Evidence:
        taken = self.taken()  # first: its groups are then certainly in the other journals
        return Evidence(taken, self.journals.submissions(), queued, records=self.records())

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
        if name.startswith(RUN_API):
            return httpx.get(f"{self._commands.url(name)}/health").status_code == 200
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


def _answer(url: str) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.get(url, timeout=DEADLINE_S).json()
    return answer
