"""Batches on which no step can be taken: kept on disk, and passed over by every later start."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import structlog

from grpo_core.errors import GrpoError
from grpo_core.wire.scored_group import ScoredGroup
from grpo_trainer.checkpoint.atomic_dir import write_whole
from grpo_trainer.errors import NonFiniteStep, PolicyDiverged

log = structlog.get_logger()

QUARANTINE = "quarantine"
MAX_IN_A_ROW = 3
"""So many batches in a row on which no step could be taken: the policy may be to blame."""


class Quarantine:
    """A batch that is kept here is not tried again by the trainers that follow.

    Args:
        save_path: of the run; the batches lie in a folder of it
        run_uuid: of the run at run-api, which counts the batches

    `since_step`: batches that were put here since the step before.
    """

    def __init__(self, save_path: Path, run_uuid: str) -> None:
        self._directory = save_path / QUARANTINE / run_uuid
        self.since_step = 0

    def holds(self, batch_id: int) -> bool:
        return self._file(batch_id).exists()

    def add(
        self, batch_id: int, groups: Sequence[ScoredGroup], step: int, error: GrpoError
    ) -> None:
        """Args: groups: as received; error: why.

        Raises:
            PolicyDiverged: no step could be taken on it, nor on the two before.
            CheckpointNotSaved: it could not be written.
        """
        path = self._file(batch_id)
        sent = [group.model_dump(mode="json") for group in groups]
        content = {"batch_id": batch_id, "step": step, "error": str(error), "groups": sent}
        write_whole(path, json.dumps(content))
        log.warning(
            "batch.quarantined",
            batch_id=batch_id,
            step=step,
            file=str(path),
            reason=f"{type(error).__name__}: {error}",
        )
        self.since_step += 1
        if isinstance(error, NonFiniteStep) and self.since_step == MAX_IN_A_ROW:
            raise PolicyDiverged(
                f"step {step}: no step could be taken on {MAX_IN_A_ROW} batches in a row "
                f"({error}). Look at those in {self._directory}, which the next start passes over; "
                "where they are sound the policy is not: lower the learning rate, or go on from an "
                "older state (--resume DIRECTORY)"
            ) from error

    def step_taken(self) -> None:
        self.since_step = 0

    def _file(self, batch_id: int) -> Path:
        return self._directory / f"batch_{batch_id}.json"
