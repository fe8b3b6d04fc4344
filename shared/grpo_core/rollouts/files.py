"""Writes and reads a directory of rollouts: `step-000012.jsonl.gz` for each training step, with one
JSON object per sequence, beside `tokenizer.json`, which shows the text of each token."""

from __future__ import annotations

import gzip
import os
import re
import zlib
from collections.abc import Container, Generator, Iterable, Iterator
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from grpo_core.errors import BrokenRollouts, problems_of
from grpo_core.rollouts.record import RolloutRecord

ROLLOUTS = "rollouts"
"""Name of the directory, below a run's directory or --save-path."""
DROPPED, EVALUATION = "dropped", "evaluation"
"""Directories of rollouts that are not trained on: of groups with equal scores, and of evaluations.
"""
LOST_GROUPS = "lost.jsonl"
"""Beside them: one line for each group that was lost."""
TOKENIZER = "tokenizer.json"
"""The policy's tokenizer in the format of Hugging Face's library tokenizers."""
COMPRESS_LEVEL = 1
"""Higher levels make the file little smaller and take several times as long."""

_NAME = re.compile(r"step-(\d{6,})\.jsonl\.gz")
_PART = ".part"
_ADAPTER = TypeAdapter(RolloutRecord)


def file_of_step(directory: Path, step: int) -> Path:
    return directory / f"step-{step:06d}.jsonl.gz"


def write_step(
    directory: Path, step: int, records: Iterable[RolloutRecord], keep: int | None = None
) -> None:
    """Write a step's file completely or not at all, replacing an earlier one, then remove the files
    of the oldest steps beyond `keep`. The file is not synced to disk: after a power cut the newest
    files may be broken, which readers report.

    Raises:
        OSError: the file could not be written.
    """
    lines = b"".join(_ADAPTER.dump_json(record) + b"\n" for record in records)
    write_lines(directory, step, lines, keep)


def write_lines(directory: Path, step: int, lines: bytes, keep: int | None = None) -> Path:
    """Write the lines of a step's file, as `write_step`; returns its path."""
    target = file_of_step(directory, step)
    part = target.with_name(f".{target.name}{_PART}")
    directory.mkdir(parents=True, exist_ok=True)
    part.write_bytes(gzip.compress(lines, COMPRESS_LEVEL))
    part.replace(target)
    if keep is not None:
        for old in steps_in(directory)[:-keep]:
            file_of_step(directory, old).unlink(missing_ok=True)
    return target


def steps_in(directory: Path) -> list[int]:
    """The steps that the directory holds, in order.

    Raises:
        BrokenRollouts: the directory cannot be read.
    """
    try:
        names = os.listdir(directory)
    except OSError as error:
        raise BrokenRollouts(
            f"{directory} cannot be read: {error.strerror}; name the rollouts directory of a run"
        ) from error
    return sorted(int(found[1]) for name in names if (found := _NAME.fullmatch(name)))


def read_steps(directory: Path, steps: Container[int] | None = None) -> Iterator[RolloutRecord]:
    """The records of the steps in the directory, in order.

    Args: steps: others are left out; None for all

    Raises:
        BrokenRollouts: a file cannot be read. Names file and line.
    """
    for step in steps_in(directory):
        if steps is None or step in steps:
            yield from read_step(directory, step)


def read_step(directory: Path, step: int) -> Generator[RolloutRecord, None, None]:
    """The records of one step, which must be there. Raises the error of `read_steps`."""
    path, read = file_of_step(directory, step), 0
    try:
        if not path.stat().st_size:  # which gzip takes for no records
            raise EOFError("the file is empty")
        with gzip.open(path, "rb") as file:
            for line in file:
                yield _ADAPTER.validate_json(line)
                read += 1
    except ValidationError as error:
        raise BrokenRollouts(f"{path}, line {read + 1}: {problems_of(error)}; {_ADVICE}") from None
    except (EOFError, zlib.error, OSError) as error:
        raise BrokenRollouts(f"{path}, line {read + 1}: {error}; {_ADVICE}") from error


def remove_later_steps(directory: Path, last: int) -> None:
    """Remove the files of later steps than `last`, and unfinished files. Raises `OSError`."""
    if not directory.is_dir():
        return
    for step in steps_in(directory):
        if step > last:
            file_of_step(directory, step).unlink(missing_ok=True)
    for part in directory.glob(f".*{_PART}"):
        part.unlink(missing_ok=True)


_ADVICE = "remove this file to read the other steps"
