"""Where the record of each step goes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from grpo_trainer.metrics import Record
from grpo_trainer.settings import TrainerSettings
from grpo_trainer.wandb_sink import start_wandb

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


def append_record(path: Path, record: Record) -> None:
    """Add one JSON line, whole, so that others can follow the file.

    Raises:
        ValueError: a value is NaN or infinite.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(record, allow_nan=False) + "\n"
    with path.open("a", encoding="utf-8") as file:
        file.write(line)
