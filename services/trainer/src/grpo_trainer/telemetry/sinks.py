"""Where the record of each step goes."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import structlog

from grpo_trainer.checkpoint.atomic_dir import write_whole
from grpo_trainer.config.trainer import TrainerSettings
from grpo_trainer.errors import CheckpointNotSaved
from grpo_trainer.telemetry.metrics import Record
from grpo_trainer.telemetry.wandb_sink import start_wandb

log = structlog.get_logger()

Write = Callable[[Record], None]


@contextlib.contextmanager
def open_sinks(settings: TrainerSettings) -> Iterator[Write]:
    """What writes a record everywhere that the settings name.

    Raises:
        WandbUnavailable: --use-wandb, and W&B cannot start.
    """
    with contextlib.ExitStack() as stack:
        writers: list[Write] = []
        if settings.metrics_file is not None:
            writers.append(partial(append_record, settings.metrics_file))
        if settings.use_wandb:
            writers.append(stack.enter_context(start_wandb(settings)).write)

        def write(record: Record) -> None:
            for writer in writers:
                writer(record)

        yield write


def trim_records(path: Path, steps_taken: int) -> None:
    """Leave one record of each step up to `steps_taken`: later steps, which a killed trainer took
    beyond the state that the run goes on from, are taken again. Lines that are no record go too.

    Raises:
        CheckpointNotSaved: the file could not be written anew; it is as it was.
    """
    if not path.is_file():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    steps = {step: line for line in lines if (step := _step_of(line)) is not None}
    kept = [line for step, line in sorted(steps.items()) if step <= steps_taken]
    if kept != lines:
        write_whole(path.resolve(), "".join(kept))


def rotate_records(path: Path) -> None:
    """Those of another run: `path` is renamed to `path.1`, or the next number that is free.

    Raises:
        CheckpointNotSaved: it cannot be renamed.
    """
    if not path.is_file() or not path.stat().st_size:
        return
    numbers = itertools.count(1)
    aside = next(p for n in numbers if not (p := path.with_name(f"{path.name}.{n}")).exists())
    try:
        path.rename(aside)
    except OSError as error:
        raise CheckpointNotSaved(
            f"{path} holds records of another run and cannot be renamed: {error}; move it away, or "
            "name another --metrics-file"
        ) from error
    log.info("metrics.set_aside", file=str(aside))


def _step_of(line: str) -> int | None:
    """None where it is not a whole record: its writer was killed, or the disk full."""
    try:
        step = json.loads(line)["step"] if line.endswith("\n") else None
    except (ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None


def append_record(path: Path, record: Record) -> None:
    """Add one JSON line, whole, so that others can follow the file.

    Raises:
        ValueError: a value is NaN or infinite.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(record, allow_nan=False) + "\n"
    with path.open("a", encoding="utf-8") as file:
        file.write(line)
