"""A data file that is damaged is named, whatever its form."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_core.errors import GrpoError
from grpo_env.tasks import Answer, Row, Task, TaskOptions
from grpo_env.tasks.items import training_items
from tests.support.damage import damaged, damages

MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": "2+2="}]
ROWS = [
    {"prompt": "1+1=", "answer": "2", "meta": {"a": [1.5]}},
    {"prompt": MESSAGES, "reward_model": {"ground_truth": "4"}},
]
LINES = "".join(f"{json.dumps(row)}\n" for row in ROWS)
WRITTEN: dict[str, Callable[[Path], object]] = {
    "rows.jsonl": lambda path: path.write_text(LINES),
    "rows.jsonl.gz": lambda path: path.write_bytes(gzip.compress(LINES.encode())),
    "rows.json": lambda path: path.write_text(json.dumps(ROWS)),
    "rows.csv": lambda path: path.write_text('prompt,answer\n"1+1=",2\n"2,2",4\n'),
    "rows.parquet": lambda path: pyarrow.parquet.write_table(
        pyarrow.table({"prompt": ["1+1=", "2+2="], "answer": ["2", "4"]}), path
    ),
}


class Sums(Task):
    name = "sums"

    def reward(self, answer: Answer, row: Row) -> float:  # noqa: ARG002
        return 0.0


def problem_of(path: Path) -> str | None:
    """What is told of a file; None if it can be used."""
    try:
        training_items(Sums(TaskOptions(data=str(path))))
    except GrpoError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", WRITTEN)
def test_a_damaged_file_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    path = tmp_path / name
    WRITTEN[name](path)
    assert problem_of(path) is None
    # Hugging Face's library keeps a copy of each Parquet file that it reads
    share = 10 if name.endswith(".parquet") else 2

    @settings(max_examples=settings.default.max_examples // share)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        with damaged(path, data.draw(damages(path))):
            problem = problem_of(path)
        assert problem is None or name in problem

    check()
