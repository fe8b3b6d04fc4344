"""GSM8K's questions and answers, from JSON lines in a directory or through `datasets`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from grpo_core.errors import GrpoError
from grpo_env.tasks.final_answer import MARK

Split = Literal["train", "test"]

DEFAULT_DATA = "openai/gsm8k"
DEFAULT_CONFIG = "main"

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_GOLD = re.compile(r"-?[0-9]+(\.[0-9]+)?")
_MAX_PROBLEMS_LISTED = 10


class DataUnusable(GrpoError):
    """The data cannot be found or read, or is not what it should be. Says where."""


class DatasetsMissing(GrpoError):
    """The data is not a directory of JSON lines, and the library for anything else is missing."""


@dataclass(frozen=True)
class Problem:
    """`gold` is a plain number: no thousands separators."""

    question: str
    gold: str


@dataclass(frozen=True)
class _Row:
    """A record, or a line of JSON; `place` for messages."""

    place: str
    content: Any


def read_problems(data: str, config: str, split: Split) -> list[Problem]:
    """All problems of a split, in the order of the source.

    Args:
        data: a directory with `<split>.jsonl`, or one laid out like a data set on the hub, or
            the id of one. `config` is the data set's configuration; JSON lines have none.

    Raises:
        DataUnusable: nothing there, or rows that are no problems; lists the first of them.
        DatasetsMissing: the library `datasets` is needed and not installed.
    """
    directory = Path(data).expanduser()
    lines = directory / f"{split}.jsonl"
    if lines.is_file():
        return _problems(_json_rows(lines), str(lines))
    if not directory.is_dir() and not _HUB_ID.fullmatch(data):
        raise DataUnusable(
            f"{data}: no such directory; --data takes a directory that holds {lines.name} "
            f"(fields question and answer), or a hub id such as {DEFAULT_DATA}"
        )
    source = str(directory) if directory.is_dir() else data
    return _problems(_dataset_rows(source, config, split), f"{source} ({config}, {split})")


def _json_rows(path: Path) -> Iterator[_Row]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataUnusable(f"{path}: {error}") from error
    # Not splitlines: a JSON string may hold a line separator of Unicode as it stands.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield _Row(f"{path} line {number}", line)


def _dataset_rows(source: str, config: str, split: Split) -> Iterator[_Row]:
    try:
        from datasets import disable_progress_bars, load_dataset
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise DatasetsMissing(
            f"{source} is read with the library datasets: pip install -c constraints.txt datasets; "
            f"or pass --data a directory that holds {split}.jsonl"
        ) from error
    disable_progress_bars()
    try:
        rows = load_dataset(source, config, split=split)
    except (DatasetsError, OSError, ValueError) as error:
        raise DataUnusable(
            f"{source}: cannot read its configuration {config!r}, split {split!r}: {error}; "
            f"or pass --data a directory that holds {split}.jsonl"
        ) from error
    for number, row in enumerate(rows, start=1):
        yield _Row(f"{source} ({config}, {split}) row {number}", row)


def _problems(rows: Iterable[_Row], source: str) -> list[Problem]:
    found: list[Problem] = []
    wrong: list[str] = []
    for row in rows:
        try:
            found.append(_problem(row.content))
        except ValueError as error:
            wrong.append(f"{row.place}: {error}")
    if wrong:
        listed = "\n".join(wrong[:_MAX_PROBLEMS_LISTED])
        raise DataUnusable(f"{len(wrong)} of {len(wrong) + len(found)} rows unusable:\n{listed}")
    if not found:
        raise DataUnusable(f"{source}: empty")
    return found


def _problem(row: Any) -> Problem:
    """Raises `ValueError` that says what is wrong with the row."""
    if isinstance(row, str):
        try:
            row = json.loads(row)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError("not an object with question and answer")
    fields = [row.get("question"), row.get("answer")]
    question, answer = (field if isinstance(field, str) else "" for field in fields)
    if not question.strip():
        raise ValueError("no text in question")
    if MARK not in answer:
        raise ValueError(f"no {MARK!r} before a number in answer")
    gold = answer.rpartition(MARK)[2].strip().replace(",", "")
    if not _GOLD.fullmatch(gold):
        raise ValueError(f"no number behind {MARK!r}, but {gold[:40]!r}")
    return Problem(question, gold)
