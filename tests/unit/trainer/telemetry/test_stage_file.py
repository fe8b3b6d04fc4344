"""`stage.json`: the trainer's stage, for those who watch the run."""

from __future__ import annotations

import json
import os
from pathlib import Path

from grpo_trainer.telemetry.metrics import Stage
from grpo_trainer.telemetry.sinks import StageFile


def test_each_stage_replaces_the_one_before(tmp_path: Path) -> None:
    times = iter((1.0, 2.0))
    with StageFile(tmp_path, clock=lambda: next(times)) as file:
        for stage, since in ((Stage.DATA_FETCH, 1.0), (Stage.SYNC, 2.0)):
            file.enter(stage)
            found = json.loads((tmp_path / "stage.json").read_text())
            assert found == {"stage": stage, "since": since, "pid": os.getpid()}


def test_training_goes_on_without_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with StageFile(tmp_path / "file" / "no directory") as file:
        file.enter(Stage.SAVE)
