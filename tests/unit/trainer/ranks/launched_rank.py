"""The `grpo` command without services: its ranks meet, or train on batches that are at hand.

Each start of a rank writes its process id into `DIRECTORY/RANK-START`, and then, by ACT, trains,
waits for its end, or fails.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grpo_core.errors import GrpoError
from grpo_core.tree.trainer import TrainerSettings
from grpo_trainer import __main__ as command
from grpo_trainer.ranks import ALONE, Ranks
from grpo_trainer.stop import Stop

DIRECTORY, ACT = "LAUNCHED_DIRECTORY", "LAUNCHED_ACT"
WAITING, STEPS_BEFORE_IT = "waiting", 2


def _act(settings: TrainerSettings, ranks: Ranks = ALONE, stop: Stop | None = None) -> None:
    directory, act = Path(os.environ[DIRECTORY]), os.environ[ACT]
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    (directory / f"{ranks.index}-{start}").write_text(str(os.getpid()))
    if act == "fails" and not ranks.leads:
        raise GrpoError("the options of this rank are wrong")
    if act != "trains":
        if ranks.leads:
            _wait(directory)
        ranks.broadcast(None)
    else:
        _train(settings, ranks, stop or Stop(), start)


def _wait(directory: Path) -> None:
    (directory / WAITING).touch()
    while True:
        time.sleep(0.1)


def _train(settings: TrainerSettings, ranks: Ranks, stop: Stop, start: int) -> None:
    """Rank 0 writes each step into `DIRECTORY/steps-START`, and waits behind two steps of the first
    start."""
    from grpo_runs.offline.local import WeightsInProcess
    from grpo_trainer.train import open_run, training_steps
    from tests.unit.trainer.ranks.test_loop import Queue

    @contextlib.contextmanager
    def weights(settings: TrainerSettings) -> Iterator[WeightsInProcess]:
        yield WeightsInProcess(settings, samples=True)

    directory = Path(os.environ[DIRECTORY])
    queue: Any = Queue(full_before=())
    with open_run(settings, queue, weights, ranks) as opened:
        assert opened is not None
        for position in training_steps(*opened, stop):
            if ranks.leads:
                with (directory / f"steps-{start}").open("a") as steps:
                    steps.write(f"{position.step} ")
                if start == 0 and position.step == STEPS_BEFORE_IT:
                    _wait(directory)


if __name__ == "__main__":
    import grpo_trainer.train

    if "TORCHELASTIC_RUN_ID" in os.environ:  # a rank
        grpo_trainer.train.train = _act
    command.main()
