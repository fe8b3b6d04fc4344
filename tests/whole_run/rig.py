"""A run whose processes a test can kill, stop and restart one by one."""

from __future__ import annotations

import contextlib
import random
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from uuid import uuid4

import httpx
import psutil

from grpo_core.closing import ClosesOnExit
from grpo_core.process import ManagedProcess
from grpo_core.redis.server import answers_ping
from grpo_trainer.errors import EXIT_LOST
from tests.support.process_table import is_alive, processes_with, stop_for
from tests.support.wait import wait_for
from tests.whole_run.commands import (
    ENGINE,
    ENVIRONMENT,
    NODE,
    RANK,
    REDIS,
    RESTART_EVERY_STEPS,
    REWARD_WORKER,
    RUN_API,
    SERVER,
    SHARED,
    SUPERVISOR,
    TRAINER,
    WORKER,
    Commands,
    health_of,
    trainer_names,
)
from tests.whole_run.hosts import Hosts
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
INNER = (ENGINE, WORKER)
"""Parts of a server, which starts them again."""
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
        self._nodes = Hosts(self.directory) if commands.shape.nodes > 1 else None
        self._read_on = 0
        """Where the trainer's log of its present ranks begins."""
        self.checkpoints = commands.checkpoints
        self._metrics = self.directory / "metrics.jsonl"
        self.run_api_url = commands.url(RUN_API)
        self._far_trainer = trainer_names(commands.shape.nodes)[-1]

    def start(self, *names: str) -> None:
        """Start processes and wait until they are ready. Supervisors start their engines."""
        processes = {server_of(name) for name in names if not name.startswith(INNER)}
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
        if name == TRAINER:
            self._read_on = 0
        log = self.directory / f"{self._starts:03}-{name}.log"
        variables = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        variables |= {VARIABLE: str(self._stages), JOURNALS: str(self.directory / JOURNAL)}
        variables |= self._commands.variables()
        far = self._nodes.second if self._nodes and name == self._far_trainer else ()
        command = [*far, *self._commands.of(name), *flags]
        self._processes[name] = ManagedProcess(name, command, log, variables)
        return self._processes[name]

    def wait_until_ready(self, name: str) -> None:
        self._processes[name].wait_until(lambda: self._ready(name), self._deadline_s)

    def start_what_is_dead(self) -> None:
        """The trainer itself starts its ranks again, until it has done that too often."""
        self._start_dead()
        if self._read_on:
            trainer = self._processes[TRAINER]
            self._ended.add(TRAINER)
            self.wait_for(lambda: self._ready(TRAINER) or trainer.exit_code == EXIT_LOST)
            self._ended.discard(TRAINER)
            self._start_dead()

    def _start_dead(self) -> None:
        living = [p.name for p in self._processes.values() if p.exit_code is None]
        rows = self._commands.start_order
        self.start(*(name for row in rows for name in row if name not in living))

    def kill(self, *names: str) -> None:
        """Kill a process with SIGKILL; those below it must end by themselves. Of an engine, the
        process that answers HTTP and those that compute; of a host, all."""
        for name in names:
            if TRAINER in self._processes and name.startswith((RANK, TRAINER, NODE)):
                self._read_on = len(self.log(TRAINER))  # the other ranks end too
            if name.startswith(NODE):
                self._kill_node(name)
                continue
            try:
                root, *below = self.tree(name)
            except psutil.NoSuchProcess:  # it was killed before
                continue
            for each in (*below, root) if name.startswith(ENGINE) else (root,):
                with contextlib.suppress(psutil.NoSuchProcess):  # it ended with another one
                    each.kill()
            if server_of(name) in self._processes and not name.startswith(INNER):
                _wait_for_end(below)
                self._processes[server_of(name)].kill()  # collects its exit status
                self._ended.add(server_of(name))

    def _kill_node(self, node: str) -> None:
        names = self._commands.shape.on(node)
        doomed = [each for name in names for each in self.tree(name)]
        for process in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        _wait_for_end(doomed)
        for name in names:
            self._processes[name].kill()  # collects its exit status
            self._ended.add(name)

    def end(self, *names: str) -> None:
        """With SIGTERM, in order: an environment sends what it has begun, for example."""
        for name in names:
            self._processes[name].signal(signal.SIGTERM)
        for name in names:
            ended = self._processes[name]
            assert ended.wait(self._deadline_s) == 0, ended.log_tail(40)
            self._ended.add(name)

    def stop_for(self, seconds: float, *names: str) -> None:
        """Stop processes with SIGSTOP, with their children, and let them go on. A host is parted
        from the other one instead."""
        if self._nodes and any(name.startswith(NODE) for name in names):
            with self._nodes.parted():
                time.sleep(seconds)
            return
        stop_for(seconds, [each for name in names for each in self.tree(name)])

    def tree(self, name: str) -> list[psutil.Process]:
        """A process and all below it."""
        if name.startswith(ENGINE):
            root = psutil.Process(self._engine_pid(server_of(name)))
        elif name == WORKER:
            root = self.wait_for(lambda: [p for p in self.tree(ENGINE) if "Engine" in p.name()])[-1]
        elif name.startswith(RANK):
            (root,) = self.wait_for(lambda: self._ranks(name.removeprefix(f"{RANK}-")))
        elif name == REWARD_WORKER:
            root = random.choice(self.wait_for(self._reward_workers))
        else:
            root = psutil.Process(self._processes[server_of(name)].pid)
        return [root, *root.children(recursive=True)]

    def _engine_pid(self, server: str) -> int:
        return int(self.wait_for(lambda: self.server_status(server)["engine_pid"]))

    def _ranks(self, number: str) -> list[psutil.Process]:
        """The rank of this number, if it runs."""
        found = []
        for name in trainer_names(self._commands.shape.nodes):
            for process in psutil.Process(self._processes[name].pid).children():
                with contextlib.suppress(psutil.NoSuchProcess):  # it ended
                    found += [process] if process.environ().get("RANK") == number else []
        return found

    def _reward_workers(self) -> list[psutil.Process]:
        """Forks of a process that the environment has started."""
        children = psutil.Process(self._processes[ENVIRONMENT].pid).children()
        return [worker for child in children for worker in child.children()]

    def close(self) -> None:
        for process in reversed(self._processes.values()):
            process.kill()
        if self._nodes:
            self._nodes.close()
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
        log = self.log(TRAINER)[self._read_on :]
        if self.mode == SHARED:
            attached = "shared_memory.attached" in log
            return attached and self.bridge_info()["policy_version"] != [0, 0]
        return bool(re.search(r"weights\.(published|already_served)", log))


def _wait_for_end(processes: list[psutil.Process]) -> None:
    """They end by themselves."""
    wait_for(lambda: [each for each in processes if is_alive(each.pid)], lambda left: not left)


def server_of(name: str) -> str:
    """The server of an engine, a supervisor or a worker; any other name as it is."""
    name = SERVER if name == WORKER else name
    return name.replace(ENGINE, SERVER).replace(SUPERVISOR, SERVER)


def _answer(url: str) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.get(url, timeout=DEADLINE_S).json()
    return answer
