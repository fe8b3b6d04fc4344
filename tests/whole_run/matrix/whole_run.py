"""A whole run in a network of its own, with an address for each link between two processes."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from grpo_core.process import ManagedProcess
from grpo_tiny_model.model import ensure_tiny_model
from tests.whole_run.commands import (
    ENVIRONMENT,
    REDIS,
    RUN_API,
    SERVER,
    SHARED,
    TRAINER,
    Commands,
    Shape,
)
from tests.whole_run.matrix.host import loop_disk, small_disk
from tests.whole_run.matrix.network import Link, run
from tests.whole_run.rig import Rig

LINKS = (
    (TRAINER, RUN_API),
    (ENVIRONMENT, RUN_API),
    (ENVIRONMENT, SERVER),
    (TRAINER, SERVER),
    (RUN_API, REDIS),
    (SERVER, REDIS),
    (TRAINER, REDIS),
)
ADDRESSES = {link: f"127.0.0.{number}" for number, link in enumerate(LINKS, 2)}
NAMES = {link: f"link{number}" for number, link in enumerate(LINKS, 2)}
"""In `/etc/hosts`, which the run has for itself."""
STATES = "checkpoints/trainer_state"
CLOCKS = "clocks"
"""A run in mode `shared_vllm` whose processes have clocks that a test sets."""
CLOCK_SOURCE = Path(__file__).with_name("clock.c")
PROOF_STEPS = 4
"""More batches than the environment may keep in the queue: all links have worked again."""
WAITED_S = 300.0
"""For recovery or a named error, on a machine that has other work."""
POLL_S = 0.1
GOES_ON = "the run goes on"
ERROR = re.compile(r"(?:\[error *\]|^[a-z-]+:) ([A-Z]\w+|--[a-z-]+)", re.MULTILINE)
"""As it is logged, or as the last word of a command that has ended: the error or the option."""
EVENT = re.compile(r"\[(?:warning|error) *\] (\S+)")
PROCESSES = (REDIS, RUN_API, SERVER, TRAINER, ENVIRONMENT)


@dataclass(frozen=True)
class Outcome:
    """Args:
    happened: the consequence, for the table
    error: the name of the error or the events in the log, with the process that logged them
    seconds: until recovery or the end
    """

    happened: str
    error: str
    seconds: float


class WholeRun(Rig):
    """Args: mode: of weight sync, or CLOCKS"""

    def __init__(self, directory: Path, mode: str) -> None:
        self.kind, self.place = mode, directory / mode
        self.has_full_log = False
        self._hosts = directory / "hosts"
        self._seen: dict[str, int] = {}
        with ExitStack() as site:
            site.enter_context(small_disk(self.place, "128m"))
            for name in (REDIS, STATES):
                image = directory / f"{Path(name).name}.img"
                site.enter_context(loop_disk(self.place / name, "96m", image))
            lines = [f"{ADDRESSES[link]} {name}" for link, name in NAMES.items()]
            self._hosts.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
            run("mount", "--bind", str(self._hosts), "/etc/hosts")
            site.callback(run, "umount", "/etc/hosts")
            shape = Shape(SHARED if mode == CLOCKS else mode, as_shipped=True, hosts=NAMES)
            super().__init__(Commands(self.place, ensure_tiny_model(), shape))
            self.links = {link: Link(at, self.port(link[1])) for link, at in ADDRESSES.items()}
            for link in self.links.values():
                site.enter_context(link.translated())
            if mode == CLOCKS:
                library = str(self.place / "clock.so")
                run("cc", "-shared", "-fPIC", "-O2", "-o", library, str(CLOCK_SOURCE))
            self._site = site.pop_all()

    def close(self) -> None:
        super().close()
        self._site.close()

    def start_all(self) -> None:
        self.start(*PROCESSES)
        self.wait_for_steps(PROOF_STEPS)

    def launch(self, name: str, *flags: str) -> ManagedProcess:
        """With CLOCKS, each process has a clock of its own. That of the server is its
        supervisor's."""
        if self.kind != CLOCKS:
            return super().launch(name, *flags)
        self.set_clock(name, 0)
        with pytest.MonkeyPatch.context() as variables:
            variables.setenv("LD_PRELOAD", str(self.place / "clock.so"))
            variables.setenv("FAULTS_CLOCK", str(self._clock(name)))
            return super().launch(name, *flags)

    def set_clock(self, name: str, seconds: int) -> None:
        """The process reads the time of the host, later by this much. It maps the file, which keeps
        its inode."""
        clock = self._clock(name)
        with clock.open("r+b" if clock.exists() else "wb") as file:
            file.write(seconds.to_bytes(8, "little", signed=True))

    def _clock(self, name: str) -> Path:
        return self.place / f"clock-{name}"

    def note_logs(self) -> None:
        """`events` reports what is logged from now on."""
        self._seen = {name: len(self.log(name)) for name in PROCESSES}

    def events(self) -> str:
        """Warnings and errors, such as `trainer: service.unreachable`."""
        found = []
        for name in PROCESSES:
            new = EVENT.findall(self.log(name)[self._seen.get(name, 0) :])
            found += [f"{name}: {event}" for event in dict.fromkeys(new)]
        return ", ".join(found)

    def goes_on(self) -> Outcome:
        """Wait until the run has trained further steps, which need every link. Processes that have
        ended with a named error are started again.

        The outcome's seconds are without starts of processes.
        """
        began, starts_s = time.monotonic(), 0.0
        ended: list[str] = []
        logged: list[str] = []
        seen = len(self.records())
        while len(self.records()) < seen + PROOF_STEPS:
            assert time.monotonic() - began - starts_s < WAITED_S, self._tails()
            if dead := [name for name in PROCESSES if self.process(name).exit_code is not None]:
                starting = time.monotonic()
                ended += [f"{name} ends with `{self.error_of(name)}`" for name in dead]
                logged.append(self.events())
                self.start_what_is_dead()
                self.note_logs()
                starts_s += time.monotonic() - starting
                seen = len(self.records())
            time.sleep(POLL_S)
        events = ", ".join(dict.fromkeys(filter(None, [*logged, self.events()])))
        happened = f"{', '.join(ended)}; started again, the run goes on" if ended else GOES_ON
        return Outcome(happened, events, time.monotonic() - began - starts_s)

    def error_of(self, name: str) -> str:
        """Raises AssertionError if the process did not name its error as its last word."""
        log, code = self.log(name), self.process(name).exit_code
        if code is not None and code < 0:
            return signal.Signals(-code).name
        if name == REDIS:
            return log.rstrip().splitlines()[-2].partition(" # ")[2]
        found = ERROR.findall(log.rpartition("Traceback")[2])
        if self.has_full_log:
            return found[-1] if found else "an error for which its log has no room"
        assert found, f"{name} ended without a named error:\n{log[-4000:]}"
        return str(found[-1])

    def _tails(self) -> str:
        return "\n".join(f"== {p}\n{self.process(p).log_tail(12)}" for p in PROCESSES)

    @contextmanager
    def without_trainer(self) -> Iterator[None]:
        """The server has no trainer, so that another one can attach."""
        self.kill(TRAINER)
        try:
            yield
        finally:
            self.start(TRAINER)

    @contextmanager
    def without_name(self, link: tuple[str, str]) -> Iterator[None]:
        """The client cannot resolve the server's name."""
        lines = self._hosts.read_text()
        self._hosts.write_text(lines.replace(NAMES[link], f"no-{NAMES[link]}"))
        try:
            yield
        finally:
            self._hosts.write_text(lines)
