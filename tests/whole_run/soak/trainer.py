"""The trainer of the soak: `python -m tests.whole_run.soak.trainer OPTIONS`.

It trains a batch by noting the digests of its groups. A checkpoint is a line of the journal,
written every few batches and then acknowledged. A killed trainer resumes from the last checkpoint.
On SIGTERM the trainer writes a checkpoint and exits.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from grpo_core.clients.run_api import LeasedBatch, TrainerClient
from grpo_core.deadline import Deadline
from grpo_core.wire.fields import UNSET
from grpo_core.wire.run_api import Registration
from tests.whole_run.journal import VARIABLE as JOURNALS
from tests.whole_run.journal import Journal
from tests.whole_run.soak.groups import READY, content_digest, digest
from tests.whole_run.stages import SAVED, TRAINING, VARIABLE, Stages

_SAVES_AFTER_BATCHES = (1, 8)
_MAX_TRAINING_S = 0.1


class _Stopped(Exception):
    """SIGTERM arrived while there was no batch."""


@dataclass
class Trainer:
    """`batch_size`: in sequences; `deadline_s`: of every call; `stopping` is set when the trainer
    must write a checkpoint and exit."""

    api: TrainerClient
    journal: Journal
    stages: Stages
    stopping: threading.Event
    batch_size: int
    deadline_s: float
    seed: int

    def __post_init__(self) -> None:
        self._dice = random.Random(f"{self.seed}/trainer/{self.journal.life}")
        saved = [entry["saved"] for entry in self.journal.past if "saved" in entry]
        self._last_id = self._saved_id = saved[-1] if saved else 0
        self._save_at = 1

    def run(self) -> None:
        self.api.register(self._registration())
        self.api.resume_after(self._last_id)
        self._acknowledge()
        try:
            while not self.stopping.is_set():
                self._train()
                if self._last_id - self._saved_id >= self._save_at:
                    self._save()
        except _Stopped:
            pass
        self._save()

    def _train(self) -> None:
        deadline = Deadline(self.deadline_s)
        while not isinstance(batch := self.api.poll(), LeasedBatch):
            assert not deadline.has_passed, f"no batch within {deadline.seconds:g} s"
            self._between_polls()
        self.journal.note(
            step=self._last_id + 1,
            batch=batch.id,
            groups=[digest(group) for group in batch.groups],
            content=content_digest(batch.groups),
        )
        time.sleep(self._dice.random() * _MAX_TRAINING_S)
        self._last_id = batch.id
        self.stages.reach(TRAINING)

    def _between_polls(self) -> None:
        """Write a checkpoint even while there is no batch."""
        if self.stopping.is_set():
            raise _Stopped
        self._save()

    def _save(self) -> None:
        if self._last_id == self._saved_id:
            return
        self.journal.note(saved=self._last_id)
        self._saved_id = self._last_id
        self._save_at = self._dice.randint(*_SAVES_AFTER_BATCHES)
        self.stages.reach(SAVED)
        self._acknowledge()

    def _acknowledge(self) -> None:
        if self._last_id:
            self.api.acknowledge(self._last_id)

    def _registration(self) -> Registration:
        return Registration(
            wandb_group="",
            wandb_project="",
            batch_size=self.batch_size,
            max_token_len=UNSET,
            checkpoint_dir="",
            save_checkpoint_interval=UNSET,
            starting_step=self._last_id,
            num_steps=UNSET,
        )


def main() -> None:
    options = json.loads(sys.argv[1])
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    journal = Journal(Path(os.environ[JOURNALS]), "trainer")
    stages = Stages(Path(os.environ[VARIABLE]))
    sys.stdout.write(f"{READY}\n")
    with TrainerClient(options.pop("url"), options["deadline_s"]) as api:
        Trainer(api, journal, stages, stopping, **options).run()


if __name__ == "__main__":
    main()
