"""Records, files and tables of evaluations with numbers worked by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from grpo_core.evaluation.results import (
    EvalItem,
    EvalResult,
    NothingEvaluated,
    ResultsUnusable,
    read_result,
    read_summaries,
    save,
)
from grpo_core.evaluation.tables import (
    COLUMNS,
    NotComparable,
    compare,
    comparison_lines,
    table_lines,
)
from grpo_core.wire.policy_version import PolicyVersion


def item(name: str, *rewards: float, task: str = "gsm8k", **parts: Sequence[float]) -> EvalItem:
    """Answers of 10, 20, ... tokens; the last one is cut off."""
    n = len(rewards)
    return EvalItem(
        task=task,
        item=name,
        rewards=rewards,
        parts=tuple({key: values[i] for key, values in parts.items()} for i in range(n)),
        lengths=tuple(10 * (i + 1) for i in range(n)),
        truncated=tuple(i == n - 1 for i in range(n)),
    )


def result(items: Sequence[EvalItem], **given: Any) -> EvalResult:
    facts = {"task": "gsm8k", "temperature": 0.7, "duration_s": 12.5}
    return EvalResult.of(items, **{**facts, **given})


ITEMS = [item("a", 0.0, 0.3, 1.0, 0.0), item("b", 0.0, 0.0, 0.0, 0.0), item("c", 1.0, 1.0, 1.0, 1)]


def test_right_means_the_accuracy_part_or_else_the_reward() -> None:
    assert item("a", 0.9, 1.0, 1.3).right == (False, True, True)
    # A weight on the format may lift a wrong answer's reward above 1, and a penalty lower a right's
    assert item("a", 1.2, 0.8, accuracy=(0.0, 1.0)).right == (False, True)


def test_metrics_are_means_over_items() -> None:
    found = result(ITEMS, ks=(1, 2))
    assert found.metrics == pytest.approx(
        {
            "pass@1": (0.25 + 0 + 1) / 3,
            "pass@2": (0.5 + 0 + 1) / 3,
            "mean@1": (0.325 + 0 + 1) / 3,
            "mean@2": (0.6 + 0 + 1) / 3,
            "length": 25.0,
            "truncated": 0.25,
        }
    )
    assert (found.samples, found.item_count) == (4, 3)
    assert set(found.intervals) == {"pass@1", "pass@2", "mean@1", "mean@2"}
    assert set(result(ITEMS).metrics) >= {"pass@1", "pass@4"}  # one answer, and all of them


def test_parts_are_averaged_where_they_are_given_and_sinks_get_flat_names() -> None:
    found = result([item("a", 1.0, 0.0, accuracy=(1, 0), format=(0.5, 0.3)), item("b", 0.0, 0.0)])
    assert found.metrics["part/accuracy"] == 0.5
    assert found.metrics["part/format"] == pytest.approx(0.4)
    flat = found.flat()
    assert flat["eval/gsm8k/pass@1"] == 0.25
    assert flat["eval/gsm8k/pass@1/low"] < 0.25 < flat["eval/gsm8k/pass@1/high"]
    assert flat["eval/gsm8k/length"] == 15.0


def test_what_no_evaluation_has_is_named() -> None:
    with pytest.raises(ValueError, match="k from 1 to 1"):
        result([item("a", 1.0)], ks=(8,))
    with pytest.raises(ValueError, match=r"one entry per answer.*'lengths': 2"):
        EvalItem(**item("a", 1.0).model_dump() | {"lengths": (1, 2)})
    with pytest.raises(ValueError, match="finite"):
        item("a", float("nan"))


def test_no_item_is_an_error_that_gives_the_reasons() -> None:
    with pytest.raises(NothingEvaluated, match=r"gsm8k: no item.*3 in the training data"):
        result([], left_out={"in the training data": 3, "repeated": 0})
    with pytest.raises(NothingEvaluated, match="the data set is empty"):
        result([])


def test_a_result_is_saved_with_its_line_and_read_again(tmp_path: Path) -> None:
    output = tmp_path / "eval.jsonl"
    versions = (PolicyVersion(1, 118), PolicyVersion(1, 120))
    at_step = result(ITEMS, step=12, versions=versions, left_out={"not graded": 2, "repeated": 0})
    other = result([item("a", 1.0, task="my.py:f")], task="my.py:f", model="m")
    paths = [save(at_step, output), save(other, output, "baseline")]

    assert [str(path.relative_to(tmp_path)) for path in paths] == [
        "eval/gsm8k-step-000012.json",
        "eval/my.py-f-baseline.json",
    ]
    assert [read_result(path) for path in paths] == [at_step, other]
    first = json.loads(output.read_text().splitlines()[0])
    assert (first["step"], first["task"]) == (12, "gsm8k")
    assert first["versions"] == [[1, 118], [1, 120]]
    assert first["left_out"] == {"not graded": 2}
    assert first["intervals"]["pass@1"] == list(at_step.intervals["pass@1"])
    assert "items" not in first
    assert [summary.step for summary in read_summaries(output)] == [12, None]


def test_files_that_hold_no_evaluation_are_named_with_their_line(tmp_path: Path) -> None:
    output = tmp_path / "eval.jsonl"
    save(result(ITEMS), output)
    with output.open("a") as file:
        file.write('{"task": "gsm8k"}\n{"half a li')
    with pytest.raises(ResultsUnusable, match=r"eval.jsonl line 2 is no evaluation: temperature"):
        read_summaries(output)
    with pytest.raises(ResultsUnusable, match=r"cannot read .*none.json"):
        read_result(tmp_path / "none.json")
    with pytest.raises(ResultsUnusable, match=r"cannot write .*eval.jsonl.*: "):
        save(result(ITEMS), output / "eval.jsonl")


def test_the_lift_is_paired_by_item_whatever_their_order() -> None:
    before = result([item("gone", 1.0, 1.0), item("a", 0.0, 1.0), item("b", 0.0, 0.0)])
    after = result([item("b", 1.0, 0.0), item("a", 1.0, 1.0)])
    comparison = compare(before, after)
    assert (comparison.items, comparison.unpaired) == (2, 1)
    lift = comparison.lifts[0]
    assert (lift.metric, lift.before, lift.after, lift.change) == ("pass@1", 0.25, 0.75, 0.5)
    assert [lift.metric for lift in comparison.lifts] == ["pass@1", "pass@2", "mean@1", "mean@2"]


def test_a_lift_is_clear_if_its_interval_excludes_zero() -> None:
    before = result([item(str(n), 0.0) for n in range(40)])
    same = result([item(str(n), float(n < 1)) for n in range(40)])
    better = result([item(str(n), float(n < 20)) for n in range(40)])
    assert not compare(before, same).lifts[0].is_clear
    assert compare(before, better).lifts[0].is_clear
    assert "may be chance" in comparison_lines(compare(before, same))[2]
    assert "may be chance" not in comparison_lines(compare(before, better))[2]


def test_evaluations_with_other_options_are_not_compared() -> None:
    greedy = result([item("a", 1.0)], temperature=0.0)
    with pytest.raises(NotComparable, match=r"temperature 0.7 and 0.0; samples 4 and 1"):
        compare(result(ITEMS), greedy)
    with pytest.raises(NotComparable, match="no item in common"):
        compare(result([item("z", 1.0)], temperature=0.0), greedy)


def test_the_table_fits_a_terminal_and_explains_its_names() -> None:
    found = result(
        [item("a", 1.0, 0.0, accuracy=(1, 0)), item("b", 0.0, 0.0, accuracy=(0, 0))],
        model="runs/20250131T235959Z-0/checkpoints/final_model",
        step=120,
        versions=(PolicyVersion(1, 118), PolicyVersion(1, 120)),
        left_out={"in the training data": 12, "longer than the context": 1},
    )
    lines = table_lines(found)
    assert all(len(line) <= COLUMNS for line in lines), lines
    text = "\n".join(lines)
    assert (
        "gsm8k: runs/20250131T235959Z-0/checkpoints/final_model\n"
        "  2 items, 2 answers each, temperature 0.7, step 120, weights 1.118 to 1.120,\n  12.5 s\n"
    ) in text
    assert "pass@1              0.250  " in text
    assert "items with a right answer in 2" in text
    assert "mean reward of the best of 2" in text
    assert "items left out: 12 in the training data, 1 longer than the context" in text
    assert all(len(line) <= COLUMNS for line in comparison_lines(compare(found, found)))
