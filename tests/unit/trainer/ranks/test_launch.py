"""`grpo --ranks 2`: what happens if a process is lost, fails or is stopped.

Processes are forked from one that has imported torch; in the full tier, they are commands too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from grpo_runs.process.ports import free_port
from grpo_trainer.errors import EXIT_FAILED
from tests.support.forked import forked
from tests.support.process_table import is_alive
from tests.support.wait import wait_for
from tests.unit.trainer.ranks.launched_rank import (
    ACT,
    BEGIN,
    BEGINS_LATE,
    DIRECTORY,
    WAITING,
    forked_command,
)

MODULE = "tests.unit.trainer.ranks.launched_rank"
STEPS = 4


class Launch:
    """The command on one host, in a directory of its own."""

    def __init__(self, directory: Path, act: str, *words: str, is_forked: bool) -> None:
        self.directory = directory
        directory.mkdir()
        fixed = {"--mode": "none", "--redis-url": "redis://127.0.0.1:1/0", "--steps": str(STEPS)}
        sizes = {"--seq-len": "64", "--tokens-per-micro-batch": "16", "--state-interval": "1"}
        places = {"--save-path": str(directory / "save"), "--dtype": "float32", "--device": "cpu"}
        given = [word for pair in (fixed | sizes | places).items() for word in pair]
        given += ["--checkpoint-interval", "0", *words]
        self.log = directory / "log"
        environment = os.environ | {DIRECTORY: str(directory), ACT: act, "HF_HUB_OFFLINE": "1"}
        self.status: Callable[[], int | None]
        if is_forked:
            process = forked().Process(target=forked_command, args=(given, environment, self.log))
            process.start()
            self.pid, self.status = process.pid or 0, lambda: process.exitcode
            return
        with self.log.open("wb") as log:
            command = subprocess.Popen(
                [sys.executable, "-m", MODULE, *given],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.pid, self.status = command.pid, command.poll

    def pids(self) -> dict[str, int]:
        """Of each rank and start: "1-0" is rank 1 of the first start."""
        return {path.name: int(path.read_text()) for path in self.directory.glob("?-?")}

    def read(self, name: str) -> str:
        return (self.directory / name).read_text()

    def wait_for_log(self, event: str) -> None:
        wait_for(lambda: self._runs() and event in self.read("log"))

    def wait_for_rank(self, name: str) -> None:
        wait_for(lambda: self._runs() and name in self.pids())

    def wait_until_held(self) -> None:
        wait_for(lambda: self._runs() and (self.directory / WAITING).exists())

    def ended(self) -> int:
        """Its exit status. No rank is left."""
        status = wait_for(self.status, lambda status: status is not None)
        wait_for(lambda: [*map(is_alive, self.pids().values())], lambda alive: not any(alive))
        assert status is not None
        return status

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def close(self) -> None:
        if self.status() is None:
            self.signal(signal.SIGKILL)
        for pid in filter(is_alive, self.pids().values()):
            os.kill(pid, signal.SIGKILL)
        wait_for(self.status, lambda status: status is not None)

    def _runs(self) -> bool:
        assert self.status() is None, self.log.read_text()
        return True


@pytest.fixture(params=["forked", pytest.param("commands", marks=pytest.mark.full)])
def launch(
    model: str, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Launch]]:
    with ExitStack() as stack:

        def start(act: str, *words: str) -> Launch:
            name = str(len([*tmp_path.iterdir()]))
            is_forked = request.param == "forked"
            launched = Launch(tmp_path / name, act, "--model", model, *words, is_forked=is_forked)
            stack.callback(launched.close)
            return launched

        yield start


RANKS = ("--ranks", "2")


def test_all_ranks_start_again_after_one_was_killed(launch: Callable[..., Launch]) -> None:
    run = launch("trains", *RANKS)
    run.wait_until_held()
    os.kill(run.pids()["1-0"], signal.SIGKILL)
    assert run.ended() == 0, run.log.read_text()
    assert run.pids().keys() == {"0-0", "1-0", "0-1", "1-1"}
    assert run.read("batches-0") == "1 2 3 "
    assert run.read("batches-1") == "4 5 ", "it did not resume"
    assert (run.directory / "save" / "final_model").is_dir()


def test_an_error_ends_all_ranks_and_is_not_repeated(launch: Callable[..., Launch]) -> None:
    run = launch("fails", *RANKS)
    assert run.ended() == EXIT_FAILED
    assert run.pids().keys() == {"0-0", "1-0"}
    assert "the options of this rank are wrong" in run.read("log")


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)]
)
def test_a_signal_ends_all_ranks(
    number: signal.Signals, status: int, launch: Callable[..., Launch]
) -> None:
    run = launch("waits", *RANKS)
    run.wait_until_held()
    run.wait_for_rank("1-0")
    run.signal(number)
    assert run.ended() == status
    assert run.pids().keys() == {"0-0", "1-0"}


def test_a_stop_between_two_steps_saves_every_part_of_a_checkpoint(
    launch: Callable[..., Launch],
) -> None:
    run = launch("trains", *RANKS, "--fsdp", "--state-interval", "100")
    run.wait_until_held()
    run.signal(signal.SIGTERM)
    assert run.ended() == 143
    (saved,) = (run.directory / "save" / "trainer_state").glob("*_step_2")
    assert len([*saved.glob("*.safetensors")]) == 2


def test_a_rank_does_not_begin_if_its_starter_has_ended(launch: Callable[..., Launch]) -> None:
    """Otherwise all ranks of a command that was killed while they started would train for ever."""
    run = launch(BEGINS_LATE, *RANKS)
    started = wait_for(psutil.Process(run.pid).children, lambda ranks: len(ranks) == 2)
    run.signal(signal.SIGKILL)
    run.ended()
    (run.directory / BEGIN).touch()
    wait_for(lambda: [*map(is_alive, (rank.pid for rank in started))], lambda left: not any(left))
    assert not run.pids()


@pytest.mark.full
def test_a_lost_node_joins_again(launch: Callable[..., Launch]) -> None:
    """First one without the store, then the one with it. On one host, the next one takes over the
    store, which two hosts would leave to its host."""
    nodes = ("--nodes", "2", "--rendezvous", f"127.0.0.1:{free_port()}")
    head = launch("waits", *nodes)
    head.wait_for_log("holds_store=True")
    lost = launch("waits", *nodes)
    head.wait_until_held()
    assert [*head.pids(), *lost.pids()] == ["0-0", "1-0"]
    lost.close()
    other = launch("waits", *nodes)
    head.wait_for_rank("0-1")
    other.wait_for_rank("1-0")
    head.close()
    other.wait_for_log("holds_store=True")
    again = launch("waits", *nodes)
    other.wait_for_rank("0-0")
    again.wait_for_rank("1-0")
    for one in (other, again):
        one.signal(signal.SIGTERM)
    assert [one.ended() for one in (other, again)] == [143, 143]
