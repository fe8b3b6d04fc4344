"""The command that `online.sh` runs on the first node."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "online.sh"
MEETING = "--model m --ranks 1"


@pytest.mark.parametrize("file", [["run.yaml"], []])
@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_run_file_comes_first_and_a_resumed_run_has_its_own(
    is_resumed: bool, file: list[str], tmp_path: Path
) -> None:
    (echo := tmp_path / "echo").write_text('#!/bin/sh\necho "$@"\n')
    echo.chmod(0o700)
    if is_resumed:
        (tmp_path / "runs" / "slurm-7" / "checkpoints" / "trainer_state").mkdir(parents=True)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_NODEID": "0"}
    job |= {"SLURM_SUBMIT_DIR": str(tmp_path), "ONLINE_STEP": "1", "PYTHON": str(echo)}
    done = subprocess.run(
        ["bash", str(SCRIPT), "m", *file, "--mode", "none"],
        env=os.environ | job,
        capture_output=True,
        text=True,
        check=True,
    )
    words = [*([] if is_resumed else file), "--mode", "none", *MEETING.split()]
    option = "--resume" if is_resumed else "--run-dir"
    expected = ["-m", "grpo_runs", "run", *words, option, "runs/slurm-7"]
    assert done.stdout.split() == expected
