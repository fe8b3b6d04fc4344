from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_env.tasks.gsm8k_data import DataUnusable, Problem, read_problems
from tests.unit.env.hub_data import ROWS

PROBLEMS = [Problem("How many eggs?", "13"), Problem("How much?", "1080000")]


def write_lines(directory: Path, *lines: str, split: str = "train") -> Path:
    (directory / f"{split}.jsonl").write_text("\n".join([*lines, ""]), encoding="utf-8")
    return directory


def good_lines() -> list[str]:
    return [json.dumps(row) for row in ROWS]


def test_json_lines_are_read_in_order_without_thousands_separators(tmp_path: Path) -> None:
    write_lines(tmp_path, *good_lines())
    write_lines(tmp_path, good_lines()[1], split="test")

    assert read_problems(str(tmp_path), "main", "train") == PROBLEMS
    assert read_problems(str(tmp_path), "main", "test") == PROBLEMS[1:]


def test_a_directory_laid_out_like_a_hub_data_set_is_read_with_datasets(hub_layout: Path) -> None:
    assert read_problems(str(hub_layout), "main", "train") == PROBLEMS
    assert read_problems(str(hub_layout), "main", "test") == PROBLEMS[:1]


def test_an_unknown_configuration_is_named(hub_layout: Path) -> None:
    with pytest.raises(DataUnusable, match=r"configuration 'socratic', split 'train'.*main"):
        read_problems(str(hub_layout), "socratic", "train")


def test_every_bad_line_is_listed_with_file_and_number(tmp_path: Path) -> None:
    bad = [
        "{",
        "[1]",
        json.dumps({"answer": "#### 1"}),
        json.dumps({"question": "How?", "answer": "13"}),
        json.dumps({"question": "How?", "answer": "#### many"}),
        json.dumps({"question": "How?", "answer": 13}),
    ]
    write_lines(tmp_path, *good_lines(), *bad)

    with pytest.raises(DataUnusable) as failure:
        read_problems(str(tmp_path), "main", "train")

    first, *listed = str(failure.value).splitlines()
    assert first == "6 of 8 rows unusable:"
    assert [line.partition(": ")[0] for line in listed] == [
        f"{tmp_path}/train.jsonl line {number}" for number in range(3, 9)
    ]
    assert [line.partition(": ")[2].split(":")[0] for line in listed] == [
        "not JSON",
        "not an object with question and answer",
        "no text in question",
        "no '####' before a number in answer",
        "no number behind '####', but 'many'",
        "no '####' before a number in answer",
    ]


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ("/no/such/directory", "/no/such/directory: no such directory"),
        ("./gsm8k", "./gsm8k: no such directory"),
        ("one/two/three", "one/two/three: no such directory"),
    ],
)
def test_what_is_no_directory_and_no_hub_id_is_refused(data: str, problem: str) -> None:
    with pytest.raises(DataUnusable, match=problem):
        read_problems(data, "main", "train")


def test_an_empty_file_is_no_data(tmp_path: Path) -> None:
    with pytest.raises(DataUnusable, match=r"train\.jsonl: empty"):
        read_problems(str(write_lines(tmp_path)), "main", "train")


def test_a_directory_without_data_says_so(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing here")

    with pytest.raises(DataUnusable, match="cannot read its configuration 'main'"):
        read_problems(str(tmp_path), "main", "train")


def test_a_missing_library_is_named_with_the_line_that_installs_it(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "sys.modules['datasets'] = None\n"
        "from grpo_env.tasks.gsm8k_data import DatasetsMissing, read_problems\n"
        "try: read_problems('openai/gsm8k', 'main', 'train')\n"
        "except DatasetsMissing as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert "pip install -c constraints.txt datasets" in done.stdout, done.stderr
