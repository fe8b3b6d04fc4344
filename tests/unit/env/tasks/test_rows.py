"""Data sets: every form that is read, and every mistake in them that is named."""

from __future__ import annotations

import gzip
import json
import sys
from contextlib import closing
from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import numpy
import pytest

from grpo_env.maths.math_grader import MathProcess
from grpo_env.tasks import Answer, Task, TaskOptions
from grpo_env.tasks.data_files import DatasetsMissing, DataUnusable, NoSuchSplit, read_records
from grpo_env.tasks.gsm8k import Gsm8k
from grpo_env.tasks.items import all_items, evaluation_items, training_items
from grpo_env.tasks.math import Math
from grpo_env.tasks.rows import answer_text, rows_of
from tests.unit.env.conftest import HUB_ROWS

EGGS, COST = HUB_ROWS
NO_GRADER = pytest.mark.usefixtures("_no_grader")
USER = {"role": "user", "content": "3+4="}


@pytest.fixture
def _no_grader(monkeypatch: pytest.MonkeyPatch) -> None:
    """The grading process, which has its own tests, is not started."""
    monkeypatch.setattr("grpo_env.maths.math_grader.MathProcess", create_autospec(MathProcess))


def write(path: Path, *rows: Any) -> str:
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)


def test_a_file_of_json_lines_is_read_with_its_columns_renamed(tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl", {"q": "3+4=\u2028"}, "", {"q": "1"})
    rows = rows_of(TaskOptions(data=data, columns={"prompt": "q"}), "train")
    assert rows == [{"q": "3+4=\u2028", "prompt": "3+4=\u2028"}, {"q": "1", "prompt": "1"}]
    assert rows_of(TaskOptions(data=data), "test") is None
    other = write(tmp_path / "test.jsonl", {"q": "5"})
    assert rows_of(TaskOptions(data=data, eval_data=other), "test") == [{"q": "5"}]


ROWS = [{"prompt": "3+4=", "answer": "007"}, {"prompt": "a,\n\u2028b", "answer": "None"}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
SEPARATED = 'prompt{0}answer\n3+4={0}007\n"a,\n\u2028b"{0}None\n'
CSV = SEPARATED.format(",")


@pytest.mark.parametrize(
    ("name", "content"),
    {
        "bom.jsonl": b"\xef\xbb\xbf" + LINES.encode(),
        "rows.jsonl.gz": gzip.compress(LINES.encode()),
        "array.json": json.dumps(ROWS, indent=1).encode(),
        "lines.json": LINES.encode(),
        "rows.csv": CSV.encode("utf-8-sig"),
        "semicolons.csv": SEPARATED.format(";").encode(),
        "tabs.csv": SEPARATED.format("\t").encode(),
        "rows.tsv": SEPARATED.format("\t").replace("prompt", '"prompt"').encode(),
        "rows.csv.gz": gzip.compress(CSV.replace("\n", "\r\n").encode()),
    }.items(),
)
def test_every_file_is_read_as_it_is_written(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    rows = rows_of(TaskOptions(data=str(tmp_path / name)), "train")
    assert rows is not None
    assert [{k: v.replace("\r", "") for k, v in row.items()} for row in rows] == ROWS


def test_a_parquet_file_is_read_with_datasets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyarrow import Table, parquet

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    parquet.write_table(Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    assert rows_of(TaskOptions(data=str(tmp_path / "rows.parquet")), "train") == ROWS


def calling(tool: str, **arguments: Any) -> dict[str, Any]:
    """A row in which one tool was called, with the tool's schema."""
    properties = {name: {"type": "string"} for name in arguments}
    schema = {"name": tool, "parameters": {"type": "object", "properties": properties}}
    calls = [{"function": {"name": tool, "arguments": arguments}}]
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    return {"messages": [USER, said], "tools": [{"type": "function", "function": schema}]}


CALLS = [calling("find", day="2024-05-01"), calling("send", code="007", to="me")]


def as_text(row: dict[str, Any]) -> dict[str, str]:
    return {column: json.dumps(value) for column, value in row.items()}


@pytest.mark.parametrize(
    "form", ["lines", "parquet", "arrow", "saved", "shard", "hub", "text", "csv"]
)
def test_the_same_rows_are_equal_in_every_format(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns of one type have a null in each row for the keys of the others; and where there is
    no type for a conversation, it is a text of JSON."""
    import csv

    import datasets
    from pyarrow import Table, parquet

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    source = directory = tmp_path / form
    directory.mkdir()
    if form == "parquet":
        source = directory / "rows.parquet"
        parquet.write_table(Table.from_pylist(CALLS), source)
    elif form == "arrow":
        datasets.Dataset.from_list(CALLS).save_to_disk(tmp_path / "saved")
        (tmp_path / "saved" / "data-00000-of-00001.arrow").rename(directory / "train.arrow")
    elif form in ("saved", "shard"):
        datasets.Dataset.from_list(CALLS).save_to_disk(directory)
        source = directory if form == "saved" else directory / "data-00000-of-00001.arrow"
    elif form == "csv":
        with (source := directory / "rows.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, CALLS[0])
            writer.writeheader()
            writer.writerows(map(as_text, CALLS))
    else:
        source = directory if form == "hub" else directory / "rows.jsonl"
        rows = [as_text(row) for row in CALLS] if form == "text" else CALLS
        write(directory / ("train-1.json" if form == "hub" else "rows.jsonl"), *rows)
    assert rows_of(TaskOptions(data=str(source)), "train") == CALLS
    assert rows_of(TaskOptions(data=str(source)), "test") is None


@pytest.mark.parametrize("text", ["[1]: the sum?", "[1, 2]", '[{"role": "a"}]', "[{role", "[]"])
def test_a_prompt_that_only_begins_like_json_stays_a_text(tmp_path: Path, text: str) -> None:
    assert prompts(tmp_path, {"prompt": text}) == [[{"role": "user", "content": text}]]


@pytest.mark.parametrize(
    ("split", "numbers"),
    [
        *(("train", range(10)), ("train[:3]", range(3)), ("train[3:5]", range(3, 5))),
        *(("train[50%:]", range(5, 10)), ("train[:100]", range(10)), ("train[-3:]", range(7, 10))),
    ],
)
def test_a_slice_of_a_file_is_read(tmp_path: Path, split: str, numbers: range) -> None:
    file = write(tmp_path / "rows.jsonl", *({"n": n} for n in range(10)))
    records, _ = read_records(file, None, split)
    assert [json.loads(record.content)["n"] for record in records] == [*numbers]
    with pytest.raises(NoSuchSplit, match="has the split train only; got valid"):
        read_records(file, None, "valid")


def test_a_file_that_hides_the_library_and_a_data_set_with_a_script_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "script").mkdir()
    (tmp_path / "script" / "script.py").write_text("import datasets\n")
    with pytest.raises(DataUnusable, match=r"cannot read the data set .* scripts are no longer"):
        rows_of(TaskOptions(data=str(tmp_path / "script")), "train")

    (tmp_path / "datasets.py").write_text("mine = 1\n")
    (tmp_path / "rows.parquet").touch()
    for name in [name for name in sys.modules if name.partition(".")[0] == "datasets"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DatasetsMissing, match=r"datasets\.py hides the Python package datasets"):
        rows_of(TaskOptions(data=str(tmp_path / "rows.parquet")), "train")


BAD_FILES = [
    ("rows.jsonl", "{", "line 1: the row is not JSON"),
    ("rows.jsonl", "3", "line 1: the row is not an object with a name for each column"),
    ("rows.jsonl", "", "contains no rows"),
    ("rows.jsonl", '{"answer": "7"}', "line 1: no column 'q'; the row has answer"),
    ("rows.jsonl", '{"q": "half of \\ud83d"}', "line 1: .*ud83d.*, which is half of a character"),
    ("rows.jsonl", '{"qq": 1}', "no column 'q'; the row has qq; did you mean qq"),
    ("rows.csv", "a,b\n1\n", "line 2 has 1 cell, and the first line names 2 columns"),
    ("rows.csv", "a,a\n1,2\n", "several columns with the name a"),
    ("rows.csv", "a,b\n1,2\n1,2,3\n", "line 3 has 3 cells, and the first line names 2 columns"),
    ("rows.csv", "a;b\n1;2;3\n", "2 columns, separated by semicolons"),
    ("rows.csv", 'a,b\n1,"2\n', "line 2 is not CSV: unexpected end of data"),
]


@pytest.mark.parametrize(("name", "content", "problem"), BAD_FILES)
def test_every_bad_line_is_named(tmp_path: Path, name: str, content: str, problem: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataUnusable, match=problem):
        rows_of(TaskOptions(data=str(tmp_path / name), columns={"prompt": "q"}), "train")


def test_what_does_not_exist_is_named(tmp_path: Path) -> None:
    for data in ("/no/such/directory", str(tmp_path / "no.jsonl"), "no.jsonl"):
        with pytest.raises(DataUnusable, match=f"{data}: no such file or directory"):
            rows_of(TaskOptions(data=data), "train")
    with pytest.raises(DataUnusable, match="set --data to a file of JSON lines"):
        rows_of(TaskOptions(), "train")


@NO_GRADER
def test_gsm8k_reads_both_splits_of_a_directory_and_lists_every_bad_row(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", EGGS)
    write(tmp_path / "test.jsonl", COST, EGGS)
    with closing(Gsm8k(TaskOptions(data=str(tmp_path)))) as task:
        assert [item.row["gold"] for item in training_items(task)] == ["13"]
        assert [item.row["gold"] for item in evaluation_items(task)] == ["1080000"]
        bad = {
            '{"Frage": "How?", "answer": "#### 1"}': (
                "no column for the problem; expected one of question, problem, prompt, "
                "found Frage, answer; name it with --columns problem=COLUMN"
            ),
            '{"question": "How?", "answer": "13"}': "the right answer has no '####'",
            '{"question": "How?", "answer": "#### many"}': (
                "the right answer: expected a number after '####', got 'many'"
            ),
        }
        write(tmp_path / "train.jsonl", EGGS, *bad)
        with pytest.raises(DataUnusable) as failure:
            task.rows("train")
    first, *listed = str(failure.value).splitlines()
    assert first.endswith(": 3 of 4 rows are invalid:")
    for number, (line, problem) in enumerate(zip(listed, bad.values(), strict=True), start=2):
        assert line.startswith(f"{tmp_path}/train.jsonl line {number}: {problem}")
    named = {"prompt": "Frage"}
    write(tmp_path / "train.jsonl", '{"Frage": "How?", "solution": "#### 1"}')
    with closing(Gsm8k(TaskOptions(data=str(tmp_path), columns=named))) as task:
        assert [item.messages[-1]["content"] for item in all_items(task)] == ["How?"]
    write(tmp_path / "train.jsonl", '{"problem": "7", "question": "How?", "answer": "#### 1"}')
    with closing(Gsm8k(TaskOptions(data=str(tmp_path)))) as task:
        assert training_items(task)[0].messages[-1]["content"] == "How?"


@NO_GRADER
def test_a_directory_laid_out_like_a_hub_data_set_is_read_with_datasets(
    hub_layout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def golds(split: Any, config: str | None = None) -> list[str]:
        with closing(Gsm8k(TaskOptions(data=str(hub_layout), data_config=config))) as task:
            return [row["gold"] for row in task.rows(split) or ()]

    assert golds("train") == ["13", "1080000"]
    assert golds("test") == ["13"]
    with pytest.raises(DataUnusable, match=r"cannot read the data set \(socratic train\).*main"):
        golds("train", "socratic")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        DatasetsMissing, match=r"pip install -c requirements/constraints\.txt datasets"
    ):
        golds("train")


class Rewardless(Task):
    """Its prompts are the rows of `--data`."""


def prompts(path: Path, *rows: Any) -> list[Any]:
    task = Rewardless(TaskOptions(data=write(path / "rows.jsonl", *rows), system_prompt=""))
    return [item.prompt for item in all_items(task)]


def test_a_mistake_of_many_rows_is_told_once_with_the_column_of_the_file(tmp_path: Path) -> None:
    rows = [{"instruction": ""}, {"instruction": "3+4="}, {"instruction": ""}, {"instruction": 3}]
    path = write(tmp_path / "rows.jsonl", *rows)
    task = Rewardless(TaskOptions(data=path, columns={"prompt": "instruction"}))
    with pytest.raises(DataUnusable) as failure:
        all_items(task)
    assert str(failure.value).splitlines()[1:] == [
        "row 1 and 1 more: the column 'instruction' is empty",
        "row 4: the column 'instruction' holds neither a text nor a list of messages",
    ]


def test_a_column_whose_name_is_nearly_that_of_the_prompt_is_suggested(tmp_path: Path) -> None:
    with pytest.raises(DataUnusable, match=r"found id, promt; name it with --columns prompt=promt"):
        prompts(tmp_path, {"id": 1, "promt": "3+4="})


BEGUN = {"role": "assistant", "content": "<think>\n"}
GOLD = {"role": "assistant", "content": "So \\boxed{7}"}
REFUSED_PROMPTS = [
    ({"prompt": ""}, "'prompt' is empty"),
    ({"prompt": None}, "'prompt' is empty"),
    ({"prompt": []}, "holds neither a text nor a list of messages"),
    ({"prompt": [{"content": "x"}]}, "message 0 has no role"),
    ({"prompt": [{"role": "user"}]}, "message 0 has no text as its content"),
    (
        {"prompt": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "message 0 holds parts such as images; give one text",
    ),
    ({"prompt": "<|im_start|>user\n3+4=<|im_end|>\n"}, "already has a chat template's marks"),
    ({"prompt": str([USER])}, "holds messages as Python prints them"),
    ({"prompt": " [INST] 3+4= [/INST]"}, "already has a chat template's marks"),
    ({"prompt": [{"role": "system", "content": "Be brief."}]}, "holds nothing but a system"),
    ({"messages": [USER, GOLD]}, "ends with an answer of the assistant"),
    ({"prompt": [USER, GOLD], "answer": "7"}, "ends with an answer of the assistant"),
    ({"prompt": [USER, GOLD], "answer": 7.0}, "ends with an answer of the assistant"),
]


@pytest.mark.parametrize(("row", "problem"), REFUSED_PROMPTS)
def test_a_prompt_that_is_not_usable_or_shows_the_answer_is_refused(
    tmp_path: Path, row: Any, problem: str
) -> None:
    with pytest.raises(DataUnusable, match=f"row 2: the column .*{problem}"):
        prompts(tmp_path, {"prompt": "a good one"}, row)


def test_a_prompt_may_begin_the_answer(tmp_path: Path) -> None:
    assert prompts(tmp_path, {"prompt": [USER, BEGUN], "answer": "7"}) == [[USER, BEGUN]]


def test_rows_of_verl_have_their_answer(tmp_path: Path) -> None:
    verl = {"prompt": [USER], "reward_model": {"ground_truth": "7", "style": "rule"}}
    data = write(tmp_path / "rows.jsonl", verl, {"prompt": "1+1=", "ground_truth": "2"})
    rows = rows_of(TaskOptions(data=data), "train")
    assert [row["answer"] for row in rows or ()] == ["7", "2"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *(("7", "7"), (7, "7"), (7.0, "7"), (0.5, "0.5"), (["7"], "7"), (True, "True")),
        ({"ground_truth": ["7"], "style": "rule"}, "7"),
        *((Decimal("7.00"), "7"), (Decimal("0.5"), "0.5"), (1e-7, "0.0000001"), (10, "10")),
        *((1e22, "1" + "0" * 22), (1048576.125, "1048576.125"), (1e300, "1" + "0" * 300)),
        *((numpy.float32(0.1), "0.1"), (float(numpy.float32(0.1)), "0.1"), (1 / 3, str(1 / 3))),
        *((numpy.int64(7), "7"), (numpy.bool_(True), "True"), (numpy.array(["7"]), "7")),
        *((date(2024, 5, 1), "2024-05-01"), (datetime(2024, 5, 1), "2024-05-01")),
        *(
            (datetime(2024, 5, 1, 9, tzinfo=UTC), "2024-05-01T09:00:00+00:00"),
            (time(9), "09:00:00"),
        ),
    ],
)
def test_the_right_answer_is_one_text(value: Any, text: str) -> None:
    assert answer_text(value) == text


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        *((None, "is missing"), (" ", "is missing"), ([], "is a list of 0")),
        *((["1", "2"], "is a list of 2"), ({"value": "7"}, "is a dict")),
    ],
)
def test_what_is_no_right_answer_is_refused(value: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        answer_text(value)


@NO_GRADER
def test_math_takes_the_problem_from_messages_and_the_answer_from_a_solution(
    tmp_path: Path,
) -> None:
    row = {"prompt": [USER], "solution": "We add: $3+4=7$, so it is $\\boxed{7}$."}
    bad = [
        {"prompt": [USER, BEGUN], "answer": "7"},
        {"problem": "3+4=", "answer": ["1", "2"]},
        {"problem": "3+4=", "solution": "It is seven. " * 20},
        {"problem": "y"},
    ]
    good = [
        {"problem": "3+4=", "answer": "", "final_answer": "7"},
        {"problem": "3+4=", "answer": float("nan"), "final_answer": 7},
    ]
    with closing(Math(TaskOptions(data=write(tmp_path / "rows.jsonl", row)))) as task:
        (item,) = all_items(task)
        assert isinstance(item.prompt, str)
        assert "3+4=\n" in item.prompt
        graded = task.reward(Answer("x</think> <answer>\\boxed{7}"), row)
        assert graded.parts["accuracy"] == 1
        write(tmp_path / "rows.jsonl", *good)
        assert len(all_items(task)) == 2
        write(tmp_path / "rows.jsonl", *bad)
        with pytest.raises(DataUnusable) as failure:
            all_items(task)
    assert "4 of 4 training rows" in str(failure.value)
    said = ("one message of the user", "is a list of 2", "a text of 60 words without")
    for problem in (
        *said,
        "row 4: no column for the answer; expected one of answer, final_answer, solution",
    ):
        assert problem in str(failure.value)
