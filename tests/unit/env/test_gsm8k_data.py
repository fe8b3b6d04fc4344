from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_env.tasks.gsm8k_data import DataUnusable, Problem, read_problems
from tests.unit.env.hub_data import ROWS

PROBLEMS = [Problem("How many eggs?", "13"), Problem("How much?", "1080000")]
GOOD_LINES = [json.dumps(row) for row in ROWS]


def write_lines(directory: Path, *lines: str, split: str = "train") -> str:
    (directory / f"{split}.jsonl").write_text("\n".join([*lines, ""]), encoding="utf-8")
    return str(directory)


def test_json_lines_are_read_in_order_without_thousands_separators(tmp_path: Path) -> None:
    write_lines(tmp_path, *GOOD_LINES)
    write_lines(tmp_path, GOOD_LINES[1], split="test")

    assert read_problems(str(tmp_path), "main", "train") == PROBLEMS
    assert read_problems(str(tmp_path), "main", "test") == PROBLEMS[1:]


def test_a_directory_laid_out_like_a_hub_data_set_is_read_with_datasets(hub_layout: Path) -> None:
    assert read_problems(str(hub_layout), "main", "train") == PROBLEMS
    assert read_problems(str(hub_layout), "main", "test") == PROBLEMS[:1]
    with pytest.raises(DataUnusable, match=r"configuration 'socratic', split 'train'.*main"):
        read_problems(str(hub_layout), "socratic", "train")


def test_every_bad_line_is_listed_with_file_and_number(tmp_path: Path) -> None:
    bad = {
        "{": "not JSON",
        "[1]": "not an object with question and answer",
        '{"answer": "#### 1"}': "no text in question",
        '{"question": "How?", "answer": "13"}': "no '####' before a number in answer",
        '{"question": "How?", "answer": "#### many"}': "no number behind '####', but 'many'",
        '{"question": "How?", "answer": 13}': "no '####' before a number in answer",
    }
    with pytest.raises(DataUnusable) as failure:
        read_problems(write_lines(tmp_path, *GOOD_LINES, *bad), "main", "train")

    first, *listed = str(failure.value).splitlines()
    assert first == "6 of 8 rows unusable:"
    for number, (line, problem) in enumerate(zip(listed, bad.values(), strict=True), start=3):
        assert line.startswith(f"{tmp_path}/train.jsonl line {number}: {problem}")


@pytest.mark.parametrize("data", ["/no/such/directory", "./gsm8k", "one/two/three"])
def test_what_is_no_directory_and_no_hub_id_is_refused(data: str) -> None:
    with pytest.raises(DataUnusable, match=f"{data}: no such directory"):
        read_problems(data, "main", "train")


def test_an_empty_file_and_a_directory_without_data_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataUnusable, match=r"train\.jsonl: empty"):
        read_problems(write_lines(tmp_path), "main", "train")
    with pytest.raises(DataUnusable, match="cannot read its configuration 'main'"):
        read_problems(str(tmp_path), "main", "test")


def test_a_missing_library_is_named_with_the_line_that_installs_it(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "sys.modules['datasets'] = None\n"
        "from grpo_env.tasks.gsm8k_data import DatasetsMissing, read_problems\n"
        "try: read_problems('openai/gsm8k', 'main', 'train')\n"
        "except DatasetsMissing as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert "pip install -c constraints.txt datasets" in done.stdout, done.stderr
