"""The demo on real text: word problems of GSM8K, from data to a trained step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

STEPS = 3
DEADLINE_S = 1800
GROUPS_PER_STEP = 2
"""Of 8 completions: the fewest that show the loop."""

DATA = Path(
    os.environ.get("GSM8K_DIR")
    or Path(__file__).resolve().parents[2].parent / "shared" / "data" / "gsm8k"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """(run directory, what the user saw)"""
    if not (DATA / "train.jsonl").is_file():
        pytest.skip(f"no data: {DATA} holds no train.jsonl; set GSM8K_DIR to a directory that does")
    directory = tmp_path_factory.mktemp("demo") / "run"
    command = [
        *(sys.executable, "-m", "grpo_local"),
        *("--task", "gsm8k"),
        *("--data", str(DATA)),
        *("--steps", str(STEPS)),
        *("--batch-size", str(8 * GROUPS_PER_STEP)),
        *("--gradient-accumulation-steps", "1"),
        *("--run-dir", str(directory)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return directory, done.stdout


@pytest.mark.timeout(DEADLINE_S + 60)
def test_every_step_trains_on_graded_answers(run: tuple[Path, str]) -> None:
    lines = (run[0] / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]

    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    # Some answers keep to a part of the form, hardly one is right.
    assert all(0.0 < record["reward/mean"] < 0.5 for record in records)
    assert records[0]["alignment/probe_max"] < 1e-4


def test_all_problems_are_asked(run: tuple[Path, str]) -> None:
    log = (run[0] / "logs" / "environment.log").read_text()
    problems = len((DATA / "train.jsonl").read_text(encoding="utf-8").splitlines())

    assert f"kept={problems} " in log
    assert "too_long=0" in log
    assert "quarantined" not in log


def test_the_user_sees_the_task(run: tuple[Path, str]) -> None:
    assert f"{STEPS} steps on gsm8k" in run[1]
    assert f"{STEPS}/{STEPS}" in run[1]
