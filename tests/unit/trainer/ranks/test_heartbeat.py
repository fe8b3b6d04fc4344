"""Two real processes; the main thread of the one that is left waits for ever, as it does in an
exchange over NCCL."""

from __future__ import annotations

import os
import signal
import sys
import threading
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch.distributed as dist

from grpo_trainer.errors import EXIT_FAILED, EXIT_LOST
from grpo_trainer.ranks import Heartbeat
from tests.support.forked import forked
from tests.support.wait import wait_for
from tests.unit.trainer.ranks.rank_rig import met

DEADLINE_S = 60.0
ENDS = {
    # what the second process does, what the first one says, and its exit status
    "stops": (lambda: os.kill(os.getpid(), signal.SIGSTOP), "did not answer for 1 s", EXIT_LOST),
    "killed": (
        lambda: os.kill(os.getpid(), signal.SIGKILL),
        "another trainer process ended",
        EXIT_LOST,
    ),
    "is stopped": (lambda: sys.exit(143), "rank 1 ended early, by a signal", EXIT_LOST),
    "raises": (lambda: 1 / 0, "rank 1 ended early, by an error", EXIT_FAILED),
}


@pytest.mark.parametrize("how", ENDS)
def test_a_rank_ends_if_another_one_is_lost(how: str, tmp_path: Path) -> None:
    """It says why, although its main thread notices nothing."""
    silent_s = 1.0 if how == "stops" else DEADLINE_S
    first, second = _start(how, tmp_path, silent_s)
    try:
        wait_for(lambda: first.exitcode is not None, deadline_s=DEADLINE_S)
        assert first.exitcode == ENDS[how][2]
        assert ENDS[how][1] in (tmp_path / "0").read_text()
    finally:
        second.kill()


def test_ranks_that_are_done_wait_for_each_other(tmp_path: Path) -> None:
    processes = _start("done", tmp_path, DEADLINE_S)
    for process in processes:
        process.join(DEADLINE_S)
    assert [process.exitcode for process in processes] == [0, 0]


def _start(how: str, directory: Path, silent_s: float) -> list[BaseProcess]:
    found = [forked().Process(target=_work, args=(r, how, directory, silent_s)) for r in (0, 1)]
    for process in found:
        process.start()
    return list(found)


def _work(rank: int, how: str, directory: Path, silent_s: float) -> None:
    with (directory / str(rank)).open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    ranks = met(rank, (directory / "meeting").as_uri())
    with Heartbeat(ranks, beat_s=0.05, silent_s=silent_s, grace_s=0.1).beating():
        if how != "done" and rank == 0:
            (directory / "waits").touch()
            threading.Event().wait()
        elif how != "done":
            wait_for((directory / "waits").exists)
            ENDS[how][0]()
    dist.destroy_process_group()
