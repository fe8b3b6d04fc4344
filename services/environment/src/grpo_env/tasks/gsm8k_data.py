"""Reads GSM8K's questions and answers from a directory, or through the library `datasets`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from grpo_core.errors import GrpoError
from grpo_env.grading.final_answer import MARK

Split = Literal["train", "test"]

DEFAULT_DATA = "openai/gsm8k"
DEFAULT_CONFIG = "main"

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_GOLD = re.compile(r"-?[0-9]+(\.[0-9]+)?")
_MAX_PROBLEMS_LISTED = 10


class DataUnusable(GrpoError):
    """The data set is missing, unreadable or invalid. The message names the invalid file or row."""


class DatasetsMissing(GrpoError):
    """The package `datasets`, which reads the data set, is not installed."""


@dataclass(frozen=True)
class Problem:
    """`gold`: the right result, a plain number without thousands separators."""

    question: str
    gold: str


@dataclass(frozen=True)
class _Row:
    """A record or a line of JSON. `place`: names it in error messages."""

    place: str
    content: Any


def read_problems(data: str, config: str, split: Split) -> list[Problem]:
    """All problems of a split, in the order of the source.

    Args:
        data: a directory with `<split>.jsonl`, a directory with a Hugging Face data set, or the id
            of one.
        config: the configuration of a Hugging Face data set; JSON lines have none.

    Raises:
        DataUnusable: no data, or invalid rows; the message lists the first of them.
        DatasetsMissing: the library `datasets` is needed but not installed.
    """
    directory = Path(data).expanduser()
    lines = directory / f"{split}.jsonl"
    if lines.is_file():
        return _problems(_json_rows(lines), str(lines))
    if not directory.is_dir() and not _HUB_ID.fullmatch(data):
        raise DataUnusable(
            f"{data}: no such directory; set --data to a directory with {lines.name} "
            f"(fields 'question' and 'answer'), or to a Hugging Face id such as {DEFAULT_DATA}"
        )
    source = str(directory) if directory.is_dir() else data
    return _problems(_dataset_rows(source, config, split), f"{source} ({config}, {split})")


def _json_rows(path: Path) -> Iterator[_Row]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataUnusable(f"cannot read {path}: {error}") from error
    # Not splitlines(), because a JSON string may contain Unicode line separators.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield _Row(f"{path} line {number}", line)


def _dataset_rows(source: str, config: str, split: Split) -> Iterator[_Row]:
    try:
        from datasets import disable_progress_bars, load_dataset
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise DatasetsMissing(
            f"{source} needs the Python package datasets: pip install -c constraints.txt datasets; "
            f"or set --data to a directory with {split}.jsonl"
        ) from error
    disable_progress_bars()
    try:
        rows = load_dataset(source, config, split=split)
    except (DatasetsError, OSError, ValueError) as error:
        raise DataUnusable(
            f"{source}: cannot read configuration {config!r}, split {split!r}: {error}; check "
            f"--data and --data-config, or use a directory with {split}.jsonl"
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
        raise DataUnusable(
            f"{source}: {len(wrong)} of {len(wrong) + len(found)} rows are invalid:\n{listed}"
        )
    if not found:
        raise DataUnusable(f"{source} contains no rows")
    return found


def _problem(row: Any) -> Problem:
    """Raises `ValueError` with the mistake in the row."""
    if isinstance(row, str):
        try:
            row = json.loads(row)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the row is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError("the row is not an object with the fields 'question' and 'answer'")
    fields = [row.get("question"), row.get("answer")]
    question, answer = (field if isinstance(field, str) else "" for field in fields)
    if not question.strip():
        raise ValueError("the field 'question' is empty")
    if MARK not in answer:
        raise ValueError(f"the field 'answer' has no {MARK!r} before the result")
    gold = answer.rpartition(MARK)[2].strip().replace(",", "")
    if not _GOLD.fullmatch(gold):
        raise ValueError(f"field 'answer': expected a number after {MARK!r}, got {gold[:40]!r}")
    return Problem(question, gold)
