"""The stages of a trainer's step, and the files that tests and trainer exchange."""

from __future__ import annotations

from pathlib import Path

VARIABLE = "GRPO_TEST_STAGES"
SUBMISSIONS = "GRPO_CHAOS_SUBMISSIONS"
"""Names the environment's journal, see `tests.whole_run.journalled_environment`."""
WANTED, HELD = "wanted", "held"
JOURNAL = "journal.jsonl"
"""File below the save path that lists all batches that were taken."""

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
SAVED = "saved"
"""A checkpoint is saved; its batches are not acknowledged."""

STAGES = [WAITING, TRAINING, PAUSED, HALF_WRITTEN, VERIFYING]
"""Stages of every step."""
SAVING_STAGES = [HALF_SAVED, SAVED]
"""Stages of every step that saves a checkpoint."""


def read(path: Path) -> str:
    """The file's content, or "" if there is no such file."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""
