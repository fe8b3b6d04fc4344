"""`teacher: {model: ...}` of docs/how-to/distillation.md, with the model as its own teacher."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from grpo_core.rollouts.files import ROLLOUTS, read_step
from tests.e2e.demo_run import DEADLINE_S, NOISE, run_demo

STEPS = 3
FLAGS = f"--objective distill --teacher-model tiny --steps {STEPS} --eval-every 0".split()

pytestmark = [pytest.mark.timeout(DEADLINE_S + 60), pytest.mark.full]


def test_the_teacher_of_a_run_scores_every_token_and_its_scores_are_replayed(
    tmp_path: Path,
) -> None:
    run = run_demo(tmp_path / "run", *FLAGS)
    first, last = run.records[0], run.records[-1]
    assert first["distill/reverse_kl"] == pytest.approx(0, abs=NOISE)  # the weights are equal
    assert first["train/grad_norm"] < NOISE < last["train/grad_norm"]
    assert {record["distill/scored_fraction"] for record in run.records} == {1.0}
    for record in read_step(run.directory / ROLLOUTS, 1):
        assert record.teacher_logprobs == pytest.approx(record.behaviour_logprobs, abs=NOISE)
    command = [sys.executable, "-m", "grpo_runs.replay", str(run.directory)]
    replayed = subprocess.run(
        [*command, "--step", str(STEPS)], capture_output=True, text=True, check=False
    )
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert f"step {STEPS}: loss, gradient norm and weights are equal bit by bit" in replayed.stdout
