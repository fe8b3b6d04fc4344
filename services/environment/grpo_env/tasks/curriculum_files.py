"""Saves what a curriculum has measured: `state.json`, from which an environment goes on, and
`pools.jsonl`, with the number of items in each pool over the training steps."""

from __future__ import annotations

import json
import os
from pathlib import Path

import structlog
from pydantic import BaseModel, ConfigDict, ValidationError

from grpo_core.curriculum import POOLS_FILE, pool_curve
from grpo_core.errors import problems_of
from grpo_env.tasks.curriculum import CurriculumUnusable, TaskState
from grpo_env.tasks.item_stream import ItemStream

log = structlog.get_logger()

STATE_FILE = "state.json"


class CurriculumState(BaseModel):
    """By the name of the task."""

    model_config = ConfigDict(extra="forbid")

    tasks: dict[str, TaskState]


class CurriculumFiles:
    """The directory of `--curriculum-dir`. Each environment needs its own. None: keeps nothing."""

    def __init__(self, directory: Path | None, stream: ItemStream) -> None:
        self._directory = directory
        self._stream = stream
        self._saved = ""

    def restore(self) -> None:
        """Let the stream go on from the saved state, if there is one. Raises `CurriculumUnusable`:
        the file cannot be read."""
        if self._directory is None:
            return
        path = self._directory / STATE_FILE
        try:
            state = CurriculumState.model_validate_json(path.read_text())
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            problem = problems_of(error) if isinstance(error, ValidationError) else error
            raise CurriculumUnusable(
                f"--curriculum-dir: {path} cannot be read: {problem}; remove it to measure anew"
            ) from error
        self._stream.restore(state.tasks)
        self._saved = self._content()
        items = sum(len(task.items) for task in state.tasks.values())
        if items:
            log.info("curriculum.restored", directory=str(self._directory), items=items)

    def save(self, step: int) -> None:
        """If anything was measured or drawn since the last time: replace the state, and add a line
        with the pools. Raises `CurriculumUnusable`."""
        if self._directory is None or (content := self._content()) == self._saved:
            return
        path = self._directory / STATE_FILE
        part = path.with_suffix(".part")
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with part.open("w") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
            self._saved = content
            with (self._directory / POOLS_FILE).open("a") as lines:
                curves = {
                    pool_curve(task, pool): count
                    for task, counts in self._stream.pools().items()
                    for pool, count in counts.items()
                }
                lines.write(json.dumps({"step": step, **curves}) + "\n")
        except OSError as error:
            raise CurriculumUnusable(
                f"--curriculum-dir: cannot write {self._directory}: {error.strerror}; name another"
            ) from error

    def _content(self) -> str:
        return CurriculumState(tasks=dict(self._stream.state())).model_dump_json()
