"""Reads the records of a data set: JSON lines, or anything that the library `datasets` reads."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_core.errors import GrpoError
from grpo_env.tasks import Message, Row, Split, TaskOptions

PROMPT_COLUMNS = ("prompt", "messages", "question", "problem")
"""The first one that a row has is its prompt."""

_LINES = (".jsonl", ".ndjson")
_OTHER_FILES = {".json": "json", ".csv": "csv", ".parquet": "parquet"}
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_MAX_PROBLEMS_LISTED = 10


class DataUnusable(GrpoError):
    """The data set is missing, unreadable or invalid. The message names the invalid file or row."""


class NoSuchSplit(DataUnusable):
    """The data set has no such split."""


class DatasetsMissing(GrpoError):
    """The package `datasets`, which reads the data set, is not installed."""


@dataclass(frozen=True)
class Record:
    """A record, or a line of JSON. `place`: names it in error messages."""

    place: str
    content: Any


def rows_of(options: TaskOptions, split: Split) -> list[Row] | None:
    """The rows of `--data` or `--eval-data`; None if there is no data for this split.

    Raises:
        DataUnusable, DatasetsMissing: see `read_records`.
    """
    if options.data is None:
        raise DataUnusable(
            "this task has no prompts of its own; set --data to a file of JSON lines such as "
            'rows.jsonl with lines like {"prompt": "3+4=", "answer": "7"}'
        )
    found = source_of(options, split)
    if found is None:
        return None
    records, source = read_records(found, options.data_config, split)
    try:
        return checked_rows(records, source, options.columns)
    except NoSuchSplit:
        if split == "test" and options.eval_data is None:
            return None
        raise


def source_of(options: TaskOptions, split: Split) -> str | None:
    """Where the rows of a split are; None if a file or a directory has no rows for evaluation."""
    if split == "test" and options.eval_data is not None:
        return options.eval_data
    assert options.data is not None
    path = Path(options.data).expanduser()
    is_file = path.is_file() or path.suffix in (*_LINES, *_OTHER_FILES)
    if split == "test" and is_file:
        return None
    if split == "test" and (path / "train.jsonl").is_file() and not (path / "test.jsonl").is_file():
        return None
    return options.data


def read_records(data: str, config: str | None, split: Split) -> tuple[Iterator[Record], str]:
    """The records of a split, in the order of the source, and the source's name for messages.

    Args:
        data: a file; a directory with `<split>.jsonl`; a directory with a Hugging Face data set,
            or the id of one.
        config: the configuration of a Hugging Face data set.

    Raises:
        DataUnusable: there is no such data, or it cannot be read.
        DatasetsMissing: the library `datasets` is needed but not installed.
    """
    path = Path(data).expanduser()
    if path.is_file():
        if path.suffix in _OTHER_FILES:
            return _file_records(path, _OTHER_FILES[path.suffix]), str(path)
        return _json_records(path), str(path)
    lines = path / f"{split}.jsonl"
    if lines.is_file():
        return _json_records(lines), str(lines)
    if not path.is_dir() and (
        path.suffix in (*_LINES, *_OTHER_FILES) or not _HUB_ID.fullmatch(data)
    ):
        raise DataUnusable(
            f"{data}: no such file or directory; set --data to a file of JSON lines, to a "
            f"directory with {lines.name}, or to a Hugging Face id such as openai/gsm8k"
        )
    source = str(path) if path.is_dir() else data
    return _dataset_records(source, config, split), f"{source} ({config or 'default'}, {split})"


def checked_rows(records: Iterable[Record], source: str, columns: Any = None) -> list[Row]:
    """Records as rows, with the columns renamed.

    Raises:
        DataUnusable: a record is no object, or a column is missing, or there is no record.
    """
    return collect(records, source, lambda content: renamed(content, columns or {}))


def collect(records: Iterable[Record], source: str, convert: Any) -> list[Any]:
    """Convert all records, or name those that cannot be converted.

    Args: convert: raises `ValueError` with the mistake in a record
    """
    found: list[Any] = []
    wrong: list[str] = []
    for record in records:
        try:
            found.append(convert(_object(record.content)))
        except ValueError as error:
            wrong.append(f"{record.place}: {error}")
    if wrong:
        listed = "\n".join(wrong[:_MAX_PROBLEMS_LISTED])
        raise DataUnusable(
            f"{source}: {len(wrong)} of {len(wrong) + len(found)} rows are invalid:\n{listed}"
        )
    if not found:
        raise DataUnusable(f"{source} contains no rows")
    return found


def messages_of(row: Row, system_prompt: str | None) -> list[Message]:
    """The conversation that the prompt column holds: a text of the user, or messages.

    Raises:
        ValueError: there is no such column, or it holds neither.
    """
    column = next((name for name in PROMPT_COLUMNS if row.get(name) is not None), None)
    if column is None:
        raise ValueError(
            f"no column for the prompt; expected one of {', '.join(PROMPT_COLUMNS)}, found "
            f"{', '.join(row) or 'none'}; name it with --columns prompt=COLUMN"
        )
    messages = _as_messages(column, row[column])
    if system_prompt is None:
        return messages
    rest = messages[1:] if messages[0]["role"] == "system" else messages
    return [{"role": "system", "content": system_prompt}, *rest] if system_prompt else rest


def _as_messages(column: str, value: Any) -> list[Message]:
    if isinstance(value, str):
        if not value.strip():
            raise ValueError(f"the column {column!r} is empty")
        return [{"role": "user", "content": value}]
    if not isinstance(value, Sequence) or not value:
        raise ValueError(f"the column {column!r} holds neither a text nor a list of messages")
    for number, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"the column {column!r}: message {number} has no role")
        content = message.get("content")
        if isinstance(content, list):
            raise ValueError(
                f"the column {column!r}: message {number} holds parts such as images; only text is "
                "supported, so give each message its content as one text"
            )
        if not isinstance(content, str):
            raise ValueError(f"the column {column!r}: message {number} has no text as its content")
    messages: list[Message] = [*value]
    return messages


def renamed(row: Row, columns: Any) -> dict[str, Any]:
    """The row with further columns under the task's names. Raises `ValueError`."""
    missing = sorted(set(columns.values()) - set(row))
    if missing:
        raise ValueError(
            f"no column {', '.join(map(repr, missing))}; the row has {', '.join(row) or 'none'}"
        )
    return {**row, **{ours: row[theirs] for ours, theirs in columns.items()}}


def _object(content: Any) -> dict[str, Any]:
    if isinstance(content, str):
        try:
            content = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the row is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError("the row is not an object with a name for each column")
    return content


def _json_records(path: Path) -> Iterator[Record]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataUnusable(f"cannot read {path}: {error}") from error
    # Not splitlines(), because a JSON string may contain Unicode line separators.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield Record(f"{path} line {number}", line)


def _file_records(path: Path, kind: str) -> Iterator[Record]:
    rows = _load(str(path), kind, data_files=str(path), split="train")
    for number, row in enumerate(rows, start=1):
        yield Record(f"{path} row {number}", row)


def _dataset_records(source: str, config: str | None, split: Split) -> Iterator[Record]:
    rows = _load(source, source, config, split=split)
    for number, row in enumerate(rows, start=1):
        yield Record(f"{source} ({config or 'default'}, {split}) row {number}", row)


def _load(source: str, *arguments: str | None, **options: str) -> Iterable[Any]:
    try:
        from datasets import disable_progress_bars, load_dataset
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise DatasetsMissing(
            f"{source} needs the Python package datasets: pip install -c constraints.txt datasets; "
            "or set --data to a file of JSON lines"
        ) from error
    disable_progress_bars()
    try:
        rows: Iterable[Any] = load_dataset(*arguments, **options)
    except (DatasetsError, OSError, ValueError) as error:
        is_missing = str(error).startswith("Unknown split")
        raise (NoSuchSplit if is_missing else DataUnusable)(
            f"{source}: cannot read the data set ({', '.join(filter(None, arguments[1:]))} "
            f"{options.get('split')}): {error}; check --data and --data-config, or use a file of "
            "JSON lines"
        ) from error
    return rows
