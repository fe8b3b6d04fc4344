"""Files of evaluations: `eval.jsonl` with one line per evaluation, and one JSON file per result.

The JSON files of `eval.jsonl` are in the directory `eval/` beside it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from grpo_core.errors import GrpoError
from grpo_core.evaluation.results import EvalResult, EvalSummary

_NOT_IN_FILE_NAMES = re.compile(r"[^\w.-]+")

Record = TypeVar("Record", bound=EvalSummary)


class ResultsUnusable(GrpoError):
    """A file of evaluations cannot be written, or does not hold evaluations."""


def save(result: EvalResult, output: Path, label: str = "") -> Path:
    """Append the line to `output`, and write the whole result; returns the path of the latter.

    Args:
        output: for example `eval.jsonl`
        label: tells results of one task and step apart

    Raises:
        ResultsUnusable: the files cannot be written.
    """
    details = details_path(result, output, label)
    try:
        details.parent.mkdir(parents=True, exist_ok=True)
        temporary = details.with_suffix(".part")
        temporary.write_text(result.model_dump_json() + "\n", encoding="utf-8")
        temporary.replace(details)
        with output.open("a", encoding="utf-8") as file:
            file.write(result.line() + "\n")
    except OSError as error:
        raise ResultsUnusable(f"cannot write {error.filename}: {error.strerror}") from error
    return details


def details_path(result: EvalSummary, output: Path, label: str = "") -> Path:
    """For example `eval/gsm8k-step-000012.json`."""
    step = "" if result.step is None else f"step-{result.step:06}"
    name = "-".join(filter(None, (result.task, step, label)))
    return output.with_suffix("") / f"{_NOT_IN_FILE_NAMES.sub('-', name)}.json"


def read_result(path: Path) -> EvalResult:
    """The result that `save` wrote. Raises `ResultsUnusable`."""
    return _parsed(EvalResult, _text(path), str(path))


def read_results(output: Path) -> list[EvalResult]:
    """All results that `save` wrote for this `output`, by name. Raises `ResultsUnusable`."""
    return [read_result(path) for path in sorted(output.with_suffix("").glob("*.json"))]


def read_summaries(path: Path) -> list[EvalSummary]:
    """The complete lines of `eval.jsonl`. Raises `ResultsUnusable`, which names the line."""
    lines = _text(path).split("\n")[:-1]
    return [
        _parsed(EvalSummary, line, f"{path} line {number}")
        for number, line in enumerate(lines, start=1)
    ]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ResultsUnusable(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ResultsUnusable(f"{path} is no evaluation: it is not UTF-8: {error}") from error


def _parsed(kind: type[Record], text: str, place: str) -> Record:
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole record"
        raise ResultsUnusable(f"{place} is no evaluation: {where}: {first['msg']}") from error
