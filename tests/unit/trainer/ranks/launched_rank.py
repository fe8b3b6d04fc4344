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
from typing import NoReturn

from grpo_core.clients.run_api import LeasedBatch
from grpo_core.errors import GrpoError
from grpo_core.tree.trainer import TrainerSettings
from grpo_trainer import __main__ as command
from grpo_trainer import train
from grpo_trainer.ranks import ALONE, Ranks
from grpo_trainer.stop import Stop

DIRECTORY, ACT = "LAUNCHED_DIRECTORY", "LAUNCHED_ACT"
WAITING, BATCHES_BEFORE_IT = "waiting", 3
_train = train.train


def _act(settings: TrainerSettings, ranks: Ranks = ALONE, stop: Stop | None = None) -> None:
    directory, act = Path(os.environ[DIRECTORY]), os.environ[ACT]
    start = os.environ["TORCHELASTIC_RESTART_COUNT"]
    (directory / f"{ranks.index}-{start}").write_text(str(os.getpid()))
    if act == "fails" and not ranks.leads:
        raise GrpoError("the options of this rank are wrong")
    if act == "trains":
        _train_on(directory, start, settings, ranks, stop)
    elif ranks.leads:
        _wait(directory)
    ranks.broadcast(None)


def _wait(directory: Path) -> NoReturn:
    (directory / WAITING).touch()
    while True:
        time.sleep(0.1)


def _train_on(
    directory: Path, start: str, settings: TrainerSettings, ranks: Ranks, stop: Stop | None
) -> None:
    """Notes each batch in `DIRECTORY/batches-START`. After some of them, rank 0 once waits for its
    end."""
    from grpo_runs.offline.local import WeightsInProcess
    from tests.unit.trainer.ranks.test_loop import Queue

    class Noted(Queue):
        def poll(self, *_: object) -> LeasedBatch:
            if self.given == BATCHES_BEFORE_IT and not (directory / WAITING).exists():
                _wait(directory)
            with (directory / f"batches-{start}").open("a") as file:
                file.write(f"{self.given + 1} ")
            return super().poll()

    @contextlib.contextmanager
    def weights(settings: TrainerSettings) -> Iterator[WeightsInProcess]:
        yield WeightsInProcess(settings, samples=True)

    queue = contextlib.nullcontext(Noted(full_before=()))
    vars(train).update(TrainerClient=lambda *_: queue, open_weight_sync=weights)
    _train(settings, ranks, stop)


if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" in os.environ:  # a rank
        train.train = _act
    command.main()
