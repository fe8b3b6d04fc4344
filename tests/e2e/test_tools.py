"""The commands of docs/how-to/tools.md: a model that calls a calculator learns to call it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from grpo_core.evaluation.comparison import compare
from tests.e2e.demo_run import DEADLINE_S, NOISE, demo_flags, run_demo
from tests.support.pages import command

PAGE = "docs/how-to/tools.md"
MIN_LIFT = 0.2
"""Of the accuracy on held-out sums. Seen: 0.45, from 0.31 to 0.77."""

pytestmark = [pytest.mark.timeout(DEADLINE_S + 60), pytest.mark.full]


def test_the_commands_of_the_page_lift_the_accuracy(tmp_path: Path) -> None:
    model = {"tiny-tools": str(tmp_path / "model")}
    _, *words = command(PAGE, "grpo_tiny_model", model)
    subprocess.run([sys.executable, *words], check=True)
    run = run_demo(tmp_path / "run", *demo_flags(command(PAGE, "make demo", model)))
    assert run.records[0]["alignment/diff_max"] < NOISE  # of both turns, and so of their context
    (lift,) = (lift for lift in compare(*run.evaluations).lifts if lift.metric == "pass@1")
    assert lift.is_clear, lift
    assert lift.change >= MIN_LIFT, lift
