"""A whole run in a network of its own, with an address for each link between two processes."""

from __future__ import annotations

import re
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from grpo_core.process import ManagedProcess
from grpo_tiny_model.model import ensure_tiny_model
from tests.whole_run.commands import ENVIRONMENT, REDIS, RUN_API, SERVER, SHARED, TRAINER, Shape
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


@dataclass
class WholeRun:
    mode: str
    place: Path
    hosts: Path
    rig: Rig
    links: dict[tuple[str, str], Link]
    has_full_log: bool = False
    _seen: dict[str, int] = field(default_factory=dict)
    _logged: list[str] = field(default_factory=list)

    def note_logs(self) -> None:
        """`events` reports what is logged from now on."""
        self._seen = {name: len(self.rig.log(name)) for name in PROCESSES}

    def events(self) -> str:
        """Warnings and errors, such as `trainer: service.unreachable`."""
        found = []
        for name in PROCESSES:
            new = EVENT.findall(self.rig.log(name)[self._seen.get(name, 0) :])
            found += [f"{name}: {event}" for event in dict.fromkeys(new)]
        return ", ".join(found)

    def goes_on(self) -> tuple[str, str, float]:
        """Wait until the run has trained further steps, which need every link. Processes that have
        ended with a named error are started again.

        Returns what happened, what was logged, and the seconds without starts of processes.
        """
        began, starts_s = time.monotonic(), 0.0
        ended: list[str] = []
        seen = len(self.rig.records())
        while len(self.rig.records()) < seen + PROOF_STEPS:
            assert time.monotonic() - began - starts_s < WAITED_S, self._tails()
            if dead := self._dead():
                starting = time.monotonic()
                ended += [f"{name} ends with `{self.error_of(name)}`" for name in dead]
                events = self.events()
                self.rig.start_what_is_dead()
                self.note_logs()
                starts_s += time.monotonic() - starting
                seen = len(self.rig.records())
                self._logged += [events]
            time.sleep(POLL_S)
        events = ", ".join(dict.fromkeys(filter(None, [*self._logged, self.events()])))
        self._logged = []
        happened = f"{', '.join(ended)}; started again, the run goes on" if ended else GOES_ON
        return happened, events, time.monotonic() - began - starts_s

    def _dead(self) -> list[str]:
        return [name for name in PROCESSES if self.rig.process(name).exit_code is not None]

    def error_of(self, name: str) -> str:
        """Raises AssertionError if the process did not name its error as its last word."""
        log, code = self.rig.log(name), self.rig.process(name).exit_code
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
        return "\n".join(f"== {p}\n{self.rig.process(p).log_tail(12)}" for p in PROCESSES)

    @contextmanager
    def without_trainer(self) -> Iterator[None]:
        """The server has no trainer, so that another one can attach."""
        self.rig.kill(TRAINER)
        try:
            yield
        finally:
            self.rig.start(TRAINER)

    @contextmanager
    def without_name(self, link: tuple[str, str]) -> Iterator[None]:
        """The client cannot resolve the server's name."""
        lines = self.hosts.read_text()
        self.hosts.write_text(lines.replace(NAMES[link], f"no-{NAMES[link]}"))
        try:
            yield
        finally:
            self.hosts.write_text(lines)

    def set_clock(self, name: str, seconds: int) -> None:
        """The process reads the time of the host, later by this much."""
        set_clock(_clock(self.place, name), seconds)


def set_clock(clock: Path, seconds: int) -> None:
    """The file is mapped by the process: it keeps its inode."""
    with clock.open("r+b" if clock.exists() else "wb") as file:
        file.write(seconds.to_bytes(8, "little", signed=True))


def _clock(place: Path, name: str) -> Path:
    return place / f"clock-{name}"


class ClockRig(Rig):
    """Each process has a clock of its own. That of the server is its supervisor's."""

    def launch(self, name: str, *flags: str) -> ManagedProcess:
        library, clock = self._directory / "clock.so", _clock(self._directory, name)
        if not library.exists():
            run("cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(CLOCK_SOURCE))
        set_clock(clock, 0)
        with pytest.MonkeyPatch.context() as variables:
            variables.setenv("LD_PRELOAD", str(library))
            variables.setenv("FAULTS_CLOCK", str(clock))
            return super().launch(name, *flags)


@contextmanager
def whole_run(directory: Path, mode: str) -> Iterator[WholeRun]:
    """Args: mode: of weight sync, or CLOCKS"""
    place = directory / mode
    with ExitStack() as stack:
        stack.enter_context(small_disk(place, "128m"))
        for name in (REDIS, STATES):
            image = directory / f"{Path(name).name}.img"
            stack.enter_context(loop_disk(place / name, "96m", image))
        hosts = directory / "hosts"
        lines = [f"{ADDRESSES[link]} {name}" for link, name in NAMES.items()]
        hosts.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        run("mount", "--bind", str(hosts), "/etc/hosts")
        stack.callback(run, "umount", "/etc/hosts")
        sockets = stack.enter_context(tempfile.TemporaryDirectory(prefix="grpo-"))
        kind, of = (ClockRig, SHARED) if mode == CLOCKS else (Rig, mode)
        shape = Shape(of, as_shipped=True, hosts=NAMES)
        rig = kind(place, Path(sockets), ensure_tiny_model(), shape)
        stack.callback(rig.close)
        links = {link: Link(where, rig.port(link[1])) for link, where in ADDRESSES.items()}
        for link in links.values():
            stack.enter_context(link.translated())
        rig.start(REDIS, RUN_API, SERVER, TRAINER, ENVIRONMENT)
        rig.wait_for_steps(PROOF_STEPS)
        yield WholeRun(mode, place, hosts, rig, links)
