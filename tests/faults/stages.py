"""The stages of a trainer's step, and the files in which tests and trainer talk about them."""

from __future__ import annotations

from pathlib import Path

VARIABLE = "GRPO_TEST_STAGES"
WANTED, HELD = "wanted", "held"
JOURNAL = "journal.jsonl"
"""Of all batches that were taken; below the save path."""

WAITING = "waiting"
"""No batch is asked for yet; the one before is trained on."""
TRAINING = "training"
"""A batch was taken and its gradients are there; no master has changed."""
PAUSED = "paused"
"""The masters have changed; the server is paused and none of its weights is written."""
HALF_WRITTEN = "half-written"
"""The server is paused and half of its weights are written."""
VERIFYING = "verifying"
"""The server goes on with the new weights; they are about to be compared."""
HALF_SAVED = "half-saved"
"""A state is being saved: its tensors are on the disk, its record is not."""
SAVED = "saved"
"""A state is saved; its batches are not acknowledged."""

STAGES = [WAITING, TRAINING, PAUSED, HALF_WRITTEN, VERIFYING]
"""Of every step."""
SAVING_STAGES = [HALF_SAVED, SAVED]
"""Of every step that saves the state."""


def read(path: Path) -> str:
    """Empty where there is no such file."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""
