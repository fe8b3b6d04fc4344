"""Batches on which no step could be taken: kept, named, counted and passed over."""

from __future__ import annotations

import json
from pathlib import Path

import structlog

from grpo_trainer.errors import NonFiniteStep, PolicyDiverged
from grpo_trainer.save_path import write_whole
from grpo_trainer.taking import TakenBatch

log = structlog.get_logger()

QUARANTINE = "quarantine"
MOST_IN_A_ROW = 3
"""So many batches in a row are not to blame: the policy is."""


class Quarantine:
    """Args: save_path: of the run; the batches lie in a folder of it.

    `since_step`: batches that were passed over since the step before.
    """

    def __init__(self, save_path: Path) -> None:
        self._directory = save_path / QUARANTINE
        self.since_step = 0

    def take_in(self, taken: TakenBatch, step: int, error: NonFiniteStep) -> None:
        """Keep the batch, whose step failed twice with `error` and changed no weight.

        Raises:
            PolicyDiverged: it is the third in a row.
            CheckpointNotSaved: it could not be written.
        """
        path = self._directory / f"batch_{taken.batch_id}.json"
        groups = [group.model_dump(mode="json") for group in taken.groups]
        content = {"batch_id": taken.batch_id, "step": step, "error": str(error), "groups": groups}
        write_whole(path, json.dumps(content))
        log.warning(
            "batch.quarantined",
            batch_id=taken.batch_id,
            step=step,
            file=str(path),
            reason=f"{type(error).__name__}: {error}",
        )
        self.since_step += 1
        if self.since_step == MOST_IN_A_ROW:
            raise PolicyDiverged(
                f"step {step}: no step could be taken on {MOST_IN_A_ROW} batches in a row, so it "
                f"is the policy and not its data ({error}). Lower the learning rate, go on from an "
                f"older state (--resume DIRECTORY), or look at the batches in {self._directory}"
            ) from error

    def step_taken(self) -> None:
        self.since_step = 0
