"""The trainer of the soak: `python -m tests.whole_run.soak.trainer OPTIONS`.

It trains a batch by recording the digests of its groups. A checkpoint is a line of the journal,
written every few batches and then acknowledged. A killed trainer resumes from the last checkpoint.
On SIGTERM the trainer writes a checkpoint and exits.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from grpo_core.clients.run_api import LeasedBatch, TrainerClient
from grpo_core.deadline import Deadline
from grpo_core.wire.fields import UNSET
from grpo_core.wire.run_api import Registration
from tests.whole_run.soak.hits import Moment
from tests.whole_run.soak.journal import Delivered, Journal, Saved, TrainedBatch
from tests.whole_run.soak.sending import content_digest, digest

DIE_AT = "die-at"
"""A file beside the journal that names the state in which the trainer kills itself."""
_SAVES_AFTER_BATCHES = (1, 8)
_MAX_TRAINING_S = 0.1


class Options(BaseModel):
    """Options. `batch_size`: in sequences. `deadline_s`: of every call."""

    url: str
    batch_size: int
    journal: Path
    deadline_s: float
    seed: int


class _Stopped(Exception):
    """SIGTERM arrived while there was no batch."""


@dataclass
class Trainer:
    """`stopping` is set when the trainer must write a checkpoint and exit."""

    options: Options
    api: TrainerClient
    journal: Journal
    stopping: threading.Event

    def __post_init__(self) -> None:
        self._die_at = self.options.journal.with_name(DIE_AT)
        self._dice = random.Random(f"{self.options.seed}/trainer/{self.journal.life}")
        saved = [entry for entry in self.journal.past if isinstance(entry, Saved)]
        self._last_id = saved[-1].batches[-1].id if saved else 0
        self._unsaved: list[TrainedBatch] = []
        self._save_at = 1

    def run(self) -> None:
        self.api.register(self._registration())
        self.api.resume_after(self._last_id)
        self._acknowledge()
        try:
            while not self.stopping.is_set():
                self._train()
                if len(self._unsaved) >= self._save_at:
                    self._save()
        except _Stopped:
            pass
        self._save()

    def _train(self) -> None:
        deadline = Deadline(self.options.deadline_s)
        while not isinstance(batch := self.api.poll(), LeasedBatch):
            assert not deadline.has_passed, f"no batch within {deadline.seconds:g} s"
            self._between_polls()
        content = content_digest(batch.groups)
        self.journal.write(Delivered(after=self._last_id, id=batch.id, content=content))
        time.sleep(self._dice.random() * _MAX_TRAINING_S)
        digests = [digest(group) for group in batch.groups]
        self._unsaved.append(TrainedBatch(id=batch.id, digests=digests))
        self._last_id = batch.id
        self._die_if_asked(Moment.TRAINING)

    def _between_polls(self) -> None:
        """Write a checkpoint even while there is no batch."""
        if self.stopping.is_set():
            raise _Stopped
        self._save()

    def _save(self) -> None:
        if not self._unsaved:
            return
        self.journal.write(Saved(batches=self._unsaved))
        self._unsaved = []
        self._save_at = self._dice.randint(*_SAVES_AFTER_BATCHES)
        self._die_if_asked(Moment.SAVED)
        self._acknowledge()

    def _acknowledge(self) -> None:
        if self._last_id:
            self.api.acknowledge(self._last_id)

    def _die_if_asked(self, moment: Moment) -> None:
        if self._die_at.exists() and self._die_at.read_text() == moment:
            self._die_at.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    def _registration(self) -> Registration:
        return Registration(
            wandb_group="",
            wandb_project="",
            batch_size=self.options.batch_size,
            max_token_len=UNSET,
            checkpoint_dir="",
            save_checkpoint_interval=UNSET,
            starting_step=self._last_id,
            num_steps=UNSET,
        )


def main() -> None:
    options = Options.model_validate_json(sys.argv[1])
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    with Journal(options.journal) as journal, TrainerClient(options.url, options.deadline_s) as api:
        Trainer(options, api, journal, stopping).run()


if __name__ == "__main__":
    main()
