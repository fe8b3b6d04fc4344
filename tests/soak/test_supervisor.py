"""The supervisor starts again what it hit, and reports what ended by itself."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.soak.faults import TRAINER, Fault
from tests.soak.supervisor import Supervisor

SAYS_WHO_IT_IS = "import os, signal, time; {}; print(os.getpid(), flush=True); time.sleep(600)"


def process(at_first: str) -> list[str]:
    return [sys.executable, "-c", SAYS_WHO_IT_IS.format(at_first)]


ENDS_IN_ORDER = process("signal.signal(signal.SIGTERM, lambda *_: exit())")
ENDS_BY_THE_SIGNAL = process("pass")
DOES_NOT_END = process("signal.signal(signal.SIGTERM, signal.SIG_IGN)")


@dataclass
class Watched:
    """A supervisor, and the names of what it was about to hit, in order."""

    supervisor: Supervisor
    hit: list[str]

    def is_up(self) -> bool:
        if self.supervisor.is_down(TRAINER):
            return False
        return self.supervisor.log(TRAINER).endswith(f"{self.supervisor.pid(TRAINER)}\n")

    def start(self, command: list[str]) -> None:
        self.supervisor.start(TRAINER, lambda: command)

    def suffer(self, *signals: signal.Signals) -> None:
        """Until the process has been started again after the last of them, or an incident."""
        faults = [Fault(0.0, number.name, (TRAINER,), number, 0.0) for number in signals]
        assert self.supervisor.run_until(
            lambda: self.supervisor.hits.total() == len(faults) and self.is_up(), 60.0, faults
        )


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    hit: list[str] = []
    with Supervisor(tmp_path, lambda _: found.is_up(), hit.append) as supervisor:
        found = Watched(supervisor, hit)
        yield found


def test_what_is_hit_is_started_again(watched: Watched) -> None:
    watched.start(ENDS_IN_ORDER)
    before = watched.supervisor.pid(TRAINER)
    watched.suffer(signal.SIGKILL, signal.SIGTERM, signal.SIGTERM)
    assert watched.supervisor.incidents == []
    assert watched.supervisor.pid(TRAINER) != before
    assert watched.supervisor.hits == {"SIGKILL": 1, "SIGTERM": 2}
    assert watched.hit == [TRAINER] * 3


def test_what_does_not_end_in_order_is_an_incident(watched: Watched) -> None:
    watched.start(ENDS_BY_THE_SIGNAL)
    watched.suffer(signal.SIGTERM)
    (incident,) = watched.supervisor.incidents
    assert incident.startswith("trainer ended with SIGTERM; the end of its log:")


@pytest.mark.parametrize("status", [0, 1])
def test_what_ends_by_itself_is_an_incident(watched: Watched, status: int) -> None:
    watched.start(process(f"print('the reason', flush=True); raise SystemExit({status})"))
    assert watched.supervisor.run_until(lambda: False, 60.0)
    (incident,) = watched.supervisor.incidents
    assert incident.startswith(f"trainer ended with status {status}")
    assert "the reason" in incident


def test_what_does_not_end_at_all_is_an_incident(watched: Watched) -> None:
    watched.start(DOES_NOT_END)
    assert watched.supervisor.run_until(watched.is_up, 60.0)
    watched.supervisor.end([TRAINER], 0.5)
    assert watched.supervisor.incidents == ["still running 0.5 s after SIGTERM: trainer"]


def test_a_deadline_that_passes(watched: Watched) -> None:
    watched.start(ENDS_IN_ORDER)
    assert not watched.supervisor.run_until(lambda: False, 0.1)
    assert watched.supervisor.incidents == []
