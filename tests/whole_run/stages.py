"""The stages of a trainer's step, and the files that tests and trainer exchange."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.wait import wait_for

VARIABLE = "GRPO_TEST_STAGES"
WANTED, HELD = "wanted", "held"
HOLD_DEADLINE_S = 600.0

WAITING = "waiting"
"""The next batch is not requested yet; the previous one is trained."""
TRAINING = "training"
"""A batch was taken and its gradients are computed; the master weights are unchanged."""
PAUSED = "paused"
"""The master weights have changed; the server is paused and no served weight is written."""
HALF_WRITTEN = "half-written"
"""The server is paused and half of its weights are written."""
VERIFYING = "verifying"
"""The server continues with the new weights; their check has not begun."""
HALF_SAVED = "half-saved"
"""A checkpoint is being saved: its tensors are on disk, its record is not."""
PART_WRITTEN = "part-written"
"""A checkpoint is being saved: rank 0 has written its part, another rank has not. The next steps
are taken meanwhile."""
SENDING = "sending"
"""A version travels through a process group: some of its files are sent."""
SAVED = "saved"
"""A checkpoint is saved; its batches are not acknowledged."""

STAGES = [WAITING, TRAINING, PAUSED, HALF_WRITTEN, VERIFYING]
"""Stages of every step."""
SAVING_STAGES = [HALF_SAVED, SAVED]
"""Stages of every step that saves a checkpoint."""
WHEN = {
    WAITING: "between two steps",
    TRAINING: "while the trainer trains",
    PAUSED: "before the weights are written",
    HALF_WRITTEN: "half of the weights written",
    VERIFYING: "before a publication is checked",
    HALF_SAVED: "half of a checkpoint written",
    PART_WRITTEN: "one of two parts of a checkpoint written",
    SENDING: "half of a version sent",
    SAVED: "before an acknowledgement",
}


def read(path: Path) -> str:
    """The file's content, or "" if there is no such file."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


class Stages:
    """Of a trainer's process, which is held at a stage that a test has asked for, while the process
    lives that started it."""

    def __init__(self, directory: Path) -> None:
        self._wanted, self._held = directory / WANTED, directory / HELD

    def reach(self, stage: str) -> None:
        asked = read(self._wanted)
        if asked.partition(" ")[0] != stage:
            return
        self._held.write_text(asked)
        parent = os.getppid()
        wait_for(
            lambda: read(self._wanted) != asked or os.getppid() != parent,
            deadline_s=HOLD_DEADLINE_S,
        )
