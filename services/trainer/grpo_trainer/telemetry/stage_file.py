"""Writes the trainer's stage into a small file, for those who watch the run."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path

from grpo_trainer.telemetry.metrics import Stage

STAGE_FILE = "stage.json"


class StageFile:
    """Keeps `stage.json` in a directory: `{"stage": "compute", "since": 1764201600.0}`.

    It is neither synced nor required: a disk that fails never ends the run.

    Args: clock: Unix time in seconds
    """

    def __init__(self, directory: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = directory / STAGE_FILE
        self._part = directory / f".{STAGE_FILE}.part"
        self._clock = clock

    def enter(self, stage: Stage) -> None:
        """A stage of a step begins."""
        with contextlib.suppress(OSError):
            self._part.write_text(json.dumps({"stage": stage, "since": self._clock()}))
            self._part.replace(self._path)
