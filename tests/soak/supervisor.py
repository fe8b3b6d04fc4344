"""Starts processes, hits them when their time has come, and starts again what ended by that."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from grpo_core.closing import ClosesOnExit
from grpo_local.processes import ManagedProcess, describe_exit
from tests.soak.faults import Fault

GRACE_S = 400.0
"""From SIGTERM to the end of a process: a trainer's last two calls may each wait for run-api."""
_TICK_S = 0.02
_LOG_LINES = 15

log = structlog.get_logger()

Command = Callable[[], Sequence[str]]


@dataclass
class _Member:
    name: str
    command: Command
    process: ManagedProcess
    asked_with: signal.Signals | None = None
    asked_at: float = 0.0
    down_s: float = 0.0
    starts_again_at: float | None = None
    for_good: bool = False

    def is_down(self) -> bool:
        """Or on its way there."""
        return self.asked_with is not None or self.starts_again_at is not None

    def ask_to_end(self, number: signal.Signals) -> None:
        self.asked_with, self.asked_at = number, time.monotonic()
        if number == signal.SIGKILL:
            self.process.kill()
        else:
            self.process.signal(number)

    def outlasts_its_grace(self, now: float) -> bool:
        if self.asked_with is None or self.for_good:
            return False
        return now - self.asked_at > GRACE_S

    def ended_as_asked(self) -> bool:
        """By SIGKILL, or in order after SIGTERM."""
        code = self.process.exit_code
        if self.asked_with == signal.SIGKILL:
            return code == -signal.SIGKILL
        return self.asked_with is not None and code == 0


class Supervisor(ClosesOnExit):
    """Args:
    directory: for the logs, one per name.
    takes_signals: whether the process of this name is as far as to end in order by SIGTERM.
    before_hit: called with the name of what is about to be hit.
    """

    def __init__(
        self,
        directory: Path,
        takes_signals: Callable[[str], bool],
        before_hit: Callable[[str], None],
    ) -> None:
        self._directory = directory
        self._takes_signals = takes_signals
        self._before_hit = before_hit
        self._members: dict[str, _Member] = {}
        self.hits: Counter[str] = Counter()
        self.incidents: list[str] = []

    def start(self, name: str, command: Command) -> None:
        """Without waiting until it is ready."""
        self._members[name] = _Member(name, command, self._launch(name, command))

    def pid(self, name: str) -> int:
        return self._members[name].process.pid

    def is_down(self, name: str) -> bool:
        """Or on its way there, by a hit."""
        return self._members[name].is_down()

    def is_running(self, name: str) -> bool:
        return self._members[name].process.exit_code is None

    def log(self, name: str) -> str:
        return self._members[name].process.log_path.read_text()

    def run_until(
        self, done: Callable[[], bool], deadline_s: float, faults: Sequence[Fault] = ()
    ) -> bool:
        """Tend the processes until `done` says so or an incident ends it.

        False where neither happened within `deadline_s` seconds.
        """
        began = time.monotonic()
        ahead = list(faults)
        while not self.incidents and not done():
            passed_s = time.monotonic() - began
            if passed_s > deadline_s:
                return False
            if ahead and ahead[0].at_s <= passed_s and self._hit(ahead[0]):
                del ahead[0]
            self._tend()
            time.sleep(_TICK_S)
        return True

    def end(self, names: Sequence[str], deadline_s: float) -> None:
        """SIGTERM for good, to processes that are up; those that are not gone in time, or end with
        another status than 0, are incidents."""
        for name in names:
            member = self._members[name]
            member.for_good = True
            member.ask_to_end(signal.SIGTERM)
        gone = self.run_until(lambda: not any(map(self.is_running, names)), deadline_s)
        if not gone:
            left = ", ".join(filter(self.is_running, names))
            self.incidents.append(f"still running {deadline_s:g} s after SIGTERM: {left}")

    def close(self) -> None:
        """SIGKILL for whatever is left, by handle."""
        for member in self._members.values():
            member.process.kill()

    def _hit(self, fault: Fault) -> bool:
        """False where it has to wait until all of its victims are up again."""
        victims = [self._members[name] for name in fault.victims]
        if any(member.is_down() for member in victims):
            return False
        if fault.signal == signal.SIGTERM and not all(map(self._takes_signals, fault.victims)):
            return False
        for name in fault.victims:
            self._before_hit(name)
        for member in victims:
            member.down_s = fault.down_s
            member.ask_to_end(fault.signal)
        self.hits[fault.kind] += 1
        log.info("hit", kind=fault.kind, victims=fault.victims, down_s=round(fault.down_s, 2))
        return True

    def _tend(self) -> None:
        now = time.monotonic()
        for member in self._members.values():
            if member.starts_again_at is not None:
                if member.starts_again_at <= now:
                    self._start_again(member)
            elif member.process.exit_code is not None:
                self._on_end(member, now)
            elif member.outlasts_its_grace(now):
                self._incident(member, f"still ran {GRACE_S:g} s after SIGTERM")
                member.process.kill()

    def _on_end(self, member: _Member, now: float) -> None:
        if not member.ended_as_asked():
            self._incident(member, f"ended with {describe_exit(member.process.exit_code)}")
        if not member.for_good:
            member.starts_again_at = now + member.down_s

    def _start_again(self, member: _Member) -> None:
        member.process.kill()  # collects its exit status
        member.process = self._launch(member.name, member.command)
        member.asked_with = member.starts_again_at = None

    def _launch(self, name: str, command: Command) -> ManagedProcess:
        log_path = self._directory / f"{name}.log"
        return ManagedProcess(name, command(), log_path, _ENVIRONMENT)

    def _incident(self, member: _Member, what: str) -> None:
        tail = member.process.log_tail(_LOG_LINES)
        self.incidents.append(f"{member.name} {what}; the end of its log:\n{tail}")


_ENVIRONMENT: Mapping[str, str] = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
