"""The trainer of the soak: `python -m tests.soak.trainer --help`.

What it trains is its record: the digests of each batch. It saves them every few steps and
acknowledges then; killed, it goes on from what it saved. SIGTERM makes it save and end.
"""

from __future__ import annotations

import argparse
import random
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import structlog

from grpo_core.logs import configure_logging
from grpo_core.run_api_client import LeasedBatch, TrainerClient
from grpo_core.wire import UNSET, Registration
from tests.soak.groups import content_digest, digest
from tests.soak.journal import Delivered, Journal
from tests.soak.trained_line import TrainedBatch, TrainedLine

_SAVES_AFTER_STEPS = (1, 8)
_SAVES_AFTER_S = 1.0
"""Where no batch comes, what was trained is saved all the same."""
_MAX_TRAINING_S = 0.02

log = structlog.get_logger()


@dataclass(frozen=True)
class Options:
    url: str
    journal: Path
    line: Path
    batch_size: int
    deadline_s: float
    seed: int


class _Stopped(Exception):
    """SIGTERM came while no batch was there."""


class Trainer:
    """Args: stopping: set where the trainer is to save and to end."""

    def __init__(
        self, options: Options, api: TrainerClient, journal: Journal, stopping: threading.Event
    ) -> None:
        self._options = options
        self._api = api
        self._journal = journal
        self._line = TrainedLine(options.line)
        self._last_id = self._line.checkpoint.batch_id
        self._unsaved: list[TrainedBatch] = []
        self._unsaved_since = 0.0
        self._dice = random.Random(f"{options.seed}/trainer/{journal.life}")
        self._save_at = self._dice.randint(*_SAVES_AFTER_STEPS)
        self._stopping = stopping

    def run(self) -> None:
        """Train until told to stop; what was trained is saved and acknowledged then."""
        with self._journal.timed("register"):
            self._api.register(self._registration())
        self._api.resume_after(self._last_id)
        try:
            while not self._stopping.is_set():
                self._train(self._next_batch())
                if len(self._unsaved) >= self._save_at:
                    self._save()
        except _Stopped:
            pass
        self._save()

    def _next_batch(self) -> LeasedBatch:
        with self._journal.timed("next batch"):
            return self._api.next_batch(self._options.deadline_s, self._between_polls)

    def _between_polls(self) -> None:
        if self._stopping.is_set():
            raise _Stopped
        if self._unsaved and time.monotonic() - self._unsaved_since > _SAVES_AFTER_S:
            self._save()

    def _train(self, batch: LeasedBatch) -> None:
        self._journal.write(
            Delivered(
                life=self._journal.life,
                after=self._last_id,
                id=batch.id,
                content=content_digest(batch.groups),
            )
        )
        time.sleep(self._dice.random() * _MAX_TRAINING_S)
        if not self._unsaved:
            self._unsaved_since = time.monotonic()
        self._unsaved.append(
            TrainedBatch(id=batch.id, digests=[digest(group) for group in batch.groups])
        )
        self._last_id = batch.id

    def _save(self) -> None:
        if self._unsaved:
            self._line.save(self._unsaved)
            self._unsaved = []
        self._save_at = self._dice.randint(*_SAVES_AFTER_STEPS)
        if self._last_id:
            with self._journal.timed("acknowledge"):
                self._api.acknowledge(self._last_id)

    def _registration(self) -> Registration:
        return Registration(
            wandb_group="",
            wandb_project="",
            batch_size=self._options.batch_size,
            max_token_len=UNSET,
            checkpoint_dir="",
            save_checkpoint_interval=UNSET,
            starting_step=self._line.checkpoint.step,
            num_steps=UNSET,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--line", type=Path, required=True, help="directory of the checkpoints")
    parser.add_argument("--batch-size", type=int, required=True, help="in sequences")
    parser.add_argument("--deadline-s", type=float, required=True, help="of every call")
    parser.add_argument("--seed", type=int, required=True)
    options = Options(**vars(parser.parse_args()))
    configure_logging("trainer")
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    with (
        Journal(options.journal) as journal,
        TrainerClient(options.url, options.deadline_s) as api,
    ):
        Trainer(options, api, journal, stopping).run()
    log.info("stopped by a signal")


if __name__ == "__main__":
    main()
