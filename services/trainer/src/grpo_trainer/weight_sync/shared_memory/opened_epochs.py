"""The newest epoch under which trainers of one save path named weights, beside their states.

A state holds the epoch of its moment. One that was opened since, by a trainer that died before its
next state, is known here alone once the server has restarted.
"""

from __future__ import annotations

from pathlib import Path

from grpo_trainer.checkpoint.save_path import write_whole
from grpo_trainer.checkpoint.store import STATES

NAME = "newest_epoch"


class OpenedEpochs:
    """Args: save_path: of the run"""

    def __init__(self, save_path: Path) -> None:
        self._path = save_path / STATES / NAME

    def newest(self) -> int:
        """0 where there is none."""
        return int(self._path.read_text()) if self._path.exists() else 0

    def open(self, epoch: int) -> None:
        """Make it durable, before anybody learns of it.

        Raises:
            CheckpointNotSaved: it could not be written.
        """
        if epoch > self.newest():
            write_whole(self._path, str(epoch))
