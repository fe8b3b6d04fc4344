"""A stop signal ends the trainer behind its step."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from grpo_trainer.stop import STOP_SIGNALS, Stop


@pytest.fixture
def stop() -> Iterator[Stop]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    stop = Stop(defers=True)
    stop.listen()
    yield stop
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_during_a_step_waits_for_its_end(stop: Stop) -> None:
    done = []

    def step() -> None:
        with stop.deferred():
            os.kill(os.getpid(), signal.SIGINT)
            done.append(True)

    with pytest.raises(SystemExit, match="130"):
        step()
    assert done


def test_a_second_signal_and_one_between_two_steps_end_the_trainer_at_once(stop: Stop) -> None:
    def step() -> None:
        with stop.deferred():
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            raise AssertionError("the second signal was deferred too")

    with pytest.raises(SystemExit, match="143"):
        step()
    assert stop.in_step
    other = Stop(defers=True)
    other.listen()
    with pytest.raises(SystemExit, match="130"):
        os.kill(os.getpid(), signal.SIGINT)
