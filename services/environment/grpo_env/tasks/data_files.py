"""Reads the records of a data set: a file, a directory, or an id on the Hugging Face hub."""

from __future__ import annotations

import csv
import gzip
import importlib.util
import io
import itertools
import json
import re
import site
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_core.errors import GrpoError
from grpo_core.settings.machine import DATA_FILES

_GZIP = ".gz"
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_SLICE = re.compile(r"(?P<split>[^\[\]]+)\[(?P<start>-?\d+%?)?:(?P<stop>-?\d+%?)?\]")
_MOST_CHARS_OF_A_CELL = 2**31 - 1
_NAMES = {",": "comma", ";": "semicolon", "\t": "tab"}


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


def is_file_name(data: str) -> bool:
    """Whether the name is that of a file that can be read, whether or not it exists."""
    return data.removesuffix(_GZIP).endswith(DATA_FILES)


def is_saved(path: Path) -> bool:
    """Whether `Dataset.save_to_disk` wrote this directory, which has rows of one split then."""
    return (path / "state.json").is_file()


def read_records(data: str, config: str | None, split: str) -> tuple[Iterator[Record], str]:
    """The records of a split, in the order of the source, and the source's name for messages.

    Args:
        data: a file of JSON lines, JSON, CSV, Parquet or Arrow, also compressed with gzip; a
            directory with `<split>.jsonl`; a directory with a Hugging Face data set, also as
            `save_to_disk` writes it, or the id of one
        config: the configuration of a Hugging Face data set
        split: a name, also with a slice such as `train[:1000]` or `train[10%:20%]`. The rows of a
            file are its split `train`

    Raises:
        NoSuchSplit: the data has no such split.
        DataUnusable: there is no such data, or it cannot be read.
        DatasetsMissing: the library `datasets` is needed but not installed.
    """
    path = Path(data).expanduser()
    name, cut = _sliced(split)
    if name != "train" and (path.is_file() or is_saved(path)):
        raise NoSuchSplit(f"{path} has the split train only; got {split}")
    if path.is_file():
        return cut(_file_records(path)), str(path)
    if is_saved(path):
        rows = _load(str(path), "arrow", data_files=str(path / "*.arrow"), split=split)
        return _numbered(f"{path} row", rows), str(path)
    if (lines := path / f"{name}.jsonl").is_file():
        return cut(_file_records(lines)), str(lines)
    if not path.is_dir() and (is_file_name(data) or not _HUB_ID.fullmatch(data)):
        raise DataUnusable(
            f"{data}: no such file or directory; set --data to a file of JSON lines, to a "
            f"directory with {lines.name}, or to a Hugging Face id such as openai/gsm8k"
        )
    source = str(path) if path.is_dir() else data
    place = f"{source} ({config or 'default'}, {split})"
    return _numbered(f"{place} row", _load(source, source, config, split=split)), place


def _sliced(split: str) -> tuple[str, Any]:
    """The name of a split, and what takes its slice of the records."""
    found = _SLICE.fullmatch(split)
    if not found:
        return split, lambda records: records
    ends = found["start"], found["stop"]

    def cut(records: Iterable[Record]) -> Iterator[Record]:
        if not any("%" in end or "-" in end for end in ends if end):
            return itertools.islice(records, *(None if e is None else int(e) for e in ends))
        rows = [*records]
        return iter(rows[slice(*(_of_share(end, len(rows)) for end in ends))])

    return found["split"], cut


def _of_share(end: str | None, rows: int) -> int | None:
    if end is None:
        return None
    return round(int(end[:-1]) * rows / 100) if end.endswith("%") else int(end)


def _file_records(path: Path) -> Iterator[Record]:
    name = path.name.removesuffix(_GZIP)
    if name.endswith((".parquet", ".arrow")):
        rows = _load(str(path), path.suffix[1:], data_files=str(path), split="train")
        return _numbered(f"{path} row", rows)
    text = _text(path)
    if name.endswith((".csv", ".tsv")):
        names = text.partition("\n")[0]  # a comma, or what they have instead of it
        separator = next((one for one in ",;\t" if one in names), ",")
        return _csv_records(path, text, "\t" if name.endswith(".tsv") else separator)
    if name.endswith(".json") and text.lstrip().startswith("["):
        try:
            return _numbered(f"{path} row", json.loads(text))
        except (ValueError, RecursionError) as error:
            raise DataUnusable(f"{path} is not JSON: {error}") from error
    # Not splitlines(), because a JSON string may contain Unicode line separators.
    lines = enumerate(text.split("\n"), start=1)
    return (Record(f"{path} line {number}", line) for number, line in lines if line.strip())


def _text(path: Path) -> str:
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == _GZIP else content
        return content.decode("utf-8-sig")  # also without a byte-order mark
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataUnusable(f"cannot read {path}: {error}") from error


def _csv_records(path: Path, text: str, separator: str) -> Iterator[Record]:
    """Every cell is the text of the file: `007` stays `007`, and `None` a word."""
    csv.field_size_limit(_MOST_CHARS_OF_A_CELL)
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    try:
        names = next(rows, [])
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise DataUnusable(f"{path} has several columns with the name {', '.join(repeated)}")
        for cells in filter(None, rows):
            if len(cells) != len(names):
                has = "1 cell" if len(cells) == 1 else f"{len(cells)} cells"
                raise DataUnusable(
                    f"{path} line {rows.line_num} has {has}, and the first line names {len(names)} "
                    f"columns, separated by {_NAMES[separator]}s (by semicolons or tabs if it has "
                    "no comma); put a cell with a separator between double quotes"
                )
            yield Record(f"{path} line {rows.line_num}", dict(zip(names, cells, strict=True)))
    except csv.Error as error:
        raise DataUnusable(f"{path} line {rows.line_num} is not CSV: {error}") from error


def _numbered(place: str, rows: Iterable[Any]) -> Iterator[Record]:
    return (Record(f"{place} {number}", row) for number, row in enumerate(rows, start=1))


def _load(source: str, *arguments: str | None, **options: str) -> Iterable[Any]:
    try:
        from datasets import disable_progress_bars, load_dataset
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise DatasetsMissing(f"{source}: {_why_no_datasets()}") from error
    disable_progress_bars()
    try:
        rows: Iterable[Any] = load_dataset(*arguments, **options)
    except (DatasetsError, OSError, ValueError, RuntimeError) as error:
        is_missing = str(error).startswith("Unknown split")
        which = " ".join(filter(None, (*arguments[1:], options["split"])))
        raise (NoSuchSplit if is_missing else DataUnusable)(
            f"{source}: cannot read the data set ({which}): {error}; check --data and --data-config"
        ) from error
    return rows


def _why_no_datasets() -> str:
    found = importlib.util.find_spec("datasets")
    if found is not None and found.origin is not None:
        own = Path(found.origin)
        places = (*site.getsitepackages(), site.getusersitepackages())
        if not any(own.is_relative_to(packages) for packages in places):
            return f"{own} hides the Python package datasets, which is needed; rename this file"
    return (
        "it needs the Python package datasets: pip install -c requirements/constraints.txt "
        "datasets; or set --data to a file of JSON lines"
    )
