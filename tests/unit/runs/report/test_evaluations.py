"""What a terminal shows of a run's evaluations."""

from __future__ import annotations

from pathlib import Path

from grpo_core.evaluation.results import EvalItem, EvalResult, save
from grpo_core.evaluation.statistics import Interval
from grpo_core.evaluation.tables import Lift
from grpo_runs.report.evaluations import (
    EvaluationsFile,
    evaluation_line,
    few_items_warning,
    lift_text,
)


def write(output: Path, step: int, reward: float, items: int, lost: int) -> None:
    answers = {"rewards": (reward,), "parts": ({},), "lengths": (3,), "truncated": (False,)}
    graded = [EvalItem(task="sums", item=f"{item}", **answers) for item in range(items)]
    result = EvalResult.of(
        graded,
        task="sums",
        temperature=1.0,
        duration_s=2.0,
        step=step,
        left_out={"quarantined_reward": lost},
    )
    save(result, output)


def test_items_that_were_lost_are_counted_and_more_rows_are_no_advice(tmp_path: Path) -> None:
    file = EvaluationsFile(tmp_path / "eval.jsonl")
    write(file.path, 0, 0.0, items=10, lost=5)
    write(file.path, 4, 1.0, items=9, lost=6)
    lost = "9 of 15 held-out items (6 lost: see evaluation.item_lost)"
    assert evaluation_line(file.read_new()[-1]).endswith(f", {lost} x 1, 2.0 s")
    [lift] = file.lifts()
    assert lift_text(*lift).startswith(f"sums: pass@1 0.000 to 1.000 on {lost}, +1.000")
    task, _, *items = lift
    assert few_items_warning(task, *items) is None
    assert few_items_warning(task, 9, 0), "of which none was lost"


def test_a_lift_whose_interval_contains_0_may_be_chance() -> None:
    text = lift_text("sums", Lift("pass@1", 0.2, 0.25, Interval(-0.1, 0.2)), 20, 0)
    assert text.endswith("+0.050 (-0.100 to +0.200, may be chance)")
    assert lift_text("sums", Lift("pass@1", 0.2, 0.3, Interval(0.1, 0.2)), 20, 0).endswith(
        "+0.200)"
    )
