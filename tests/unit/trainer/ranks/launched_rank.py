"""The `grpo` command without services: its ranks meet, or train on batches that are at hand.

Each start of a rank writes its process id into `DIRECTORY/RANK-START`, and then, by ACT, trains,
waits for its end, or fails. If ACT is `begins late`, ranks begin when `DIRECTORY/begin` exists.

`python -m tests.unit.trainer.ranks.launched_rank OPTION...` runs the command; `forked_command` runs
it in a fork, and its ranks are forks of that process, so none imports torch again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from grpo_core.clients.run_api import LeasedBatch
from grpo_core.errors import GrpoError
from grpo_core.tree.trainer import TrainerSettings
from grpo_trainer import __main__ as command
from grpo_trainer import train
from grpo_trainer.launch import THREADS
from grpo_trainer.ranks import ALONE, Ranks
from grpo_trainer.stop import STOP_SIGNALS, Stop

DIRECTORY, ACT = "LAUNCHED_DIRECTORY", "LAUNCHED_ACT"
WAITING, BATCHES_BEFORE_IT = "waiting", 3
BEGIN, BEGINS_LATE = "begin", "begins late"
_DESCRIPTORS = 1024
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


def main() -> None:
    if "TORCHELASTIC_RUN_ID" in os.environ:  # a rank
        if os.environ[ACT] == BEGINS_LATE:
            while not (Path(os.environ[DIRECTORY]) / BEGIN).exists():
                time.sleep(0.01)
        train.train = _act
    command.main()


def forked_command(words: Sequence[str], environment: dict[str, str], log: Path) -> None:
    """This process becomes `grpo WORDS`. Args: log: of its output, and that of its ranks"""
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    subprocess_handler.Popen = ForkedRank
    _become([sys.executable, "-m", "grpo_trainer", *words], environment)


class ForkedRank(subprocess.Popen[bytes]):
    """Forks this process, instead of starting the command in a new one."""

    def __init__(self, args: Sequence[str], env: dict[str, str], **options: Any) -> None:
        super().__init__(args, env=env, preexec_fn=partial(_become_rank, args, env), **options)


def _become_rank(arguments: Sequence[str], environment: dict[str, str]) -> None:
    tracker = resource_tracker.getfd()  # one for all forks
    os.closerange(3, tracker)  # as at the start of a command; `Popen` waits for it
    os.closerange(tracker + 1, _DESCRIPTORS)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    torch.set_num_threads(int(environment[THREADS]))  # torch was imported with another number
    _become(arguments, environment)


def _become(arguments: Sequence[str], environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    python, module_option, module, *words = arguments
    assert (python, module_option, module) == (sys.executable, "-m", "grpo_trainer")
    sys.argv = [module, *words]
    status = 1
    try:
        main()
        status = 0
    except SystemExit as ended:
        status = int(ended.code or 0)
    finally:
        if sys.exception():
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
