"""Keeps batches that cannot be trained on in files, so that later starts skip them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog

from grpo_core.errors import GrpoError
from grpo_core.wire.scored_group import ScoredGroup
from grpo_trainer.atomic_files import write_whole
from grpo_trainer.errors import DamagedState, NonFiniteStep, PolicyDiverged

log = structlog.get_logger()

QUARANTINE = "quarantine"
MAX_IN_A_ROW = 3
"""The run ends after this many failed batches in a row, because the policy may be the cause."""


class Quarantine:
    """The quarantined batches of a run. Later trainers of the run skip them.

    Args:
        save_path: of the run; the batches are saved in a subdirectory
        run_uuid: identifies the run at run-api whose batch ids are used

    `since_step`: number of batches added since the previous step.
    """

    def __init__(self, save_path: Path, run_uuid: str) -> None:
        self._directory = save_path / QUARANTINE / run_uuid
        self.since_step = 0

    def holds(self, batch_id: int, groups: Sequence[ScoredGroup]) -> bool:
        """Whether this batch is in quarantine. The offline trainer gives the id to another batch if
        it samples an iteration again. Raises `DamagedState`."""
        path = self._file(batch_id)
        if not path.exists():
            return False
        try:
            held = json.loads(path.read_text())["groups"]
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise DamagedState(f"{path} cannot be read: {error}; remove this file") from error
        return json.dumps(held) == json.dumps(_sent(groups))

    def add(
        self, batch_id: int, groups: Sequence[ScoredGroup], step: int, error: GrpoError
    ) -> None:
        """Write a batch into quarantine.

        Args:
            groups: as received
            error: why no step could be taken

        Raises:
            PolicyDiverged: no step could be taken on this batch and on the two before it.
            CheckpointNotSaved: the batch could not be written.
        """
        path = self._file(batch_id)
        content = {"batch_id": batch_id, "step": step, "error": str(error)}
        write_whole(path, json.dumps({**content, "groups": _sent(groups)}))
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
                f"step {step}: the loss or the gradient norm was not finite for {MAX_IN_A_ROW} "
                f"batches in a row ({error}). Inspect these batches in {self._directory}; a "
                "restarted trainer skips these batches. If the batches are correct, the policy "
                "has diverged: lower the learning rate, or --resume from an older checkpoint"
            ) from error

    def step_taken(self) -> None:
        self.since_step = 0

    def _file(self, batch_id: int) -> Path:
        return self._directory / f"batch_{batch_id}.json"


def _sent(groups: Sequence[ScoredGroup]) -> list[dict[str, Any]]:
    return [group.model_dump(mode="json") for group in groups]
