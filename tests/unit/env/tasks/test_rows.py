"""Data sets: every form that is read, and every mistake in them that is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_env.tasks import TaskOptions
from grpo_env.tasks.gsm8k import Gsm8k
from grpo_env.tasks.items import evaluation_items, training_items
from grpo_env.tasks.math import Math
from grpo_env.tasks.rows import DatasetsMissing, DataUnusable, rows_of

EGGS = {"question": "How many eggs?", "answer": "16 - 3 = <<16-3=13>>13\n#### 13"}
COST = {"question": "How much?", "answer": "A lot.\n#### 1,080,000"}


def write(path: Path, *rows: Any) -> str:
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)


def test_a_file_of_json_lines_is_read_with_its_columns_renamed(tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl", {"q": "3+4=\u2028", "a": "7"}, "", {"q": "1", "a": "1"})
    rows = rows_of(TaskOptions(data=data, columns={"prompt": "q"}), "train")
    assert rows == [
        {"q": "3+4=\u2028", "a": "7", "prompt": "3+4=\u2028"},
        {"q": "1", "a": "1", "prompt": "1"},
    ]
    assert rows_of(TaskOptions(data=data), "test") is None
    other = write(tmp_path / "test.jsonl", {"q": "5"})
    assert rows_of(TaskOptions(data=data, eval_data=other), "test") == [{"q": "5"}]


def test_other_files_are_read_with_datasets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "rows.csv").write_text("prompt,answer\n3+4=,7\n")
    assert rows_of(TaskOptions(data=str(tmp_path / "rows.csv")), "train") == [
        {"prompt": "3+4=", "answer": 7}
    ]


BAD_FILES = {
    "{": "line 1: the row is not JSON",
    "3": "line 1: the row is not an object with a name for each column",
    "": "contains no rows",
    '{"answer": "7"}': "line 1: no column 'q'; the row has answer",
}


@pytest.mark.parametrize(("content", "problem"), BAD_FILES.items())
def test_every_bad_line_is_named(tmp_path: Path, content: str, problem: str) -> None:
    data = write(tmp_path / "rows.jsonl", content)
    with pytest.raises(DataUnusable, match=problem):
        rows_of(TaskOptions(data=data, columns={"prompt": "q"}), "train")


def test_what_does_not_exist_is_named(tmp_path: Path) -> None:
    for data in ("/no/such/directory", str(tmp_path / "no.jsonl"), "no.jsonl"):
        with pytest.raises(DataUnusable, match=f"{data}: no such file or directory"):
            rows_of(TaskOptions(data=data), "train")
    with pytest.raises(DataUnusable, match="set --data to a file of JSON lines"):
        rows_of(TaskOptions(), "train")


def test_gsm8k_reads_both_splits_of_a_directory_and_lists_every_bad_row(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", EGGS)
    write(tmp_path / "test.jsonl", COST, EGGS)
    task = Gsm8k(TaskOptions(data=str(tmp_path)))
    try:
        assert [item.row["gold"] for item in training_items(task)] == ["13"]
        assert [item.row["gold"] for item in evaluation_items(task)] == ["1080000"]
        bad = {
            '{"answer": "#### 1"}': "the field 'question' is empty",
            '{"question": "How?", "answer": "13"}': "the field 'answer' has no '####'",
            '{"question": "How?", "answer": "#### many"}': (
                "field 'answer': expected a number after '####', got 'many'"
            ),
        }
        write(tmp_path / "train.jsonl", EGGS, *bad)
        with pytest.raises(DataUnusable) as failure:
            task.rows("train")
    finally:
        task.close()
    first, *listed = str(failure.value).splitlines()
    assert first.endswith(": 3 of 4 rows are invalid:")
    for number, (line, problem) in enumerate(zip(listed, bad.values(), strict=True), start=2):
        assert line.startswith(f"{tmp_path}/train.jsonl line {number}: {problem}")


def test_a_directory_laid_out_like_a_hub_data_set_is_read_with_datasets(
    hub_layout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def golds(split: Any, config: str | None = None) -> list[str]:
        task = Gsm8k(TaskOptions(data=str(hub_layout), data_config=config))
        try:
            return [row["gold"] for row in task.rows(split) or ()]
        finally:
            task.close()

    assert golds("train") == ["13", "1080000"]
    assert golds("test") == ["13"]
    with pytest.raises(DataUnusable, match=r"cannot read the data set \(socratic train\).*main"):
        golds("train", "socratic")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DatasetsMissing, match=r"pip install -c constraints\.txt datasets"):
        golds("train")


def test_a_row_of_math_needs_a_problem_and_an_answer(tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl", {"problem": "x?", "final_answer": "2"}, {"problem": "y"})
    task = Math(TaskOptions(data=data))
    try:
        with pytest.raises(DataUnusable, match="row 2: expected one of the columns answer, final"):
            training_items(task)
    finally:
        task.close()
