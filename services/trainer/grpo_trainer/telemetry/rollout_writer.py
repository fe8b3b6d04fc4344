"""Writes the rollouts of each step in a thread, so that the step does not wait for the disk.

After the start, a disk that fails never ends the run: the trainer warns and continues, because
training does not need these files.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from queue import Full, Queue
from threading import Thread

import structlog

from grpo_core.errors import GrpoError
from grpo_core.rollouts.files import (
    ROLLOUTS,
    TOKENIZER,
    remove_later_steps,
    steps_in,
    write_step,
)
from grpo_trainer.checkpoint.atomic_dir import write_whole
from grpo_trainer.config.trainer import TrainerSettings
from grpo_trainer.errors import CheckpointNotSaved
from grpo_trainer.telemetry.rollout_records import StepRollouts

log = structlog.get_logger()

DEADLINE_S = 60.0
"""Longest time to wait for the disk, in a step and at the end of the run."""


def rollouts_directory(settings: TrainerSettings) -> Path:
    return settings.rollouts_dir or settings.save_path / ROLLOUTS


def prepare_rollouts(settings: TrainerSettings, steps_taken: int | None) -> None:
    """Remove what a killed trainer wrote after its checkpoint, or move the rollouts of another run
    away; then save the policy's tokenizer.

    Args: steps_taken: by the checkpoint; None for a new run

    Raises:
        CheckpointNotSaved: the directory cannot be written.
    """
    if not settings.keep_rollouts:
        return
    directory = rollouts_directory(settings)
    try:
        if steps_taken is not None:
            remove_later_steps(directory, steps_taken)
        elif directory.is_dir() and steps_in(directory):
            _move_away(directory)
    except OSError as error:
        raise CheckpointNotSaved(
            f"{directory} contains rollouts of an earlier run and cannot be changed: {error}; move "
            "this directory away, or pass another --rollouts-dir"
        ) from error
    _save_tokenizer(settings.model, directory)


def _move_away(directory: Path) -> None:
    numbers = itertools.count(1)
    aside = next(p for n in numbers if not (p := Path(f"{directory}.{n}")).exists())
    directory.rename(aside)
    log.info("rollouts.renamed", directory=str(directory), renamed_to=str(aside))


def _save_tokenizer(model: str, directory: Path) -> None:
    from transformers.utils import cached_file

    try:
        source = cached_file(model, TOKENIZER)
    except OSError as error:  # none, or the hub does not answer
        source = None
        log.info(
            "rollouts.tokenizer_skipped",
            reason=f"readers of the rollouts cannot show the text of each token: {error}",
        )
    if source is not None:
        write_whole(directory / TOKENIZER, Path(source).read_text(encoding="utf-8"))


@contextlib.contextmanager
def rollout_writer(settings: TrainerSettings) -> Iterator[RolloutWriter]:
    """On exit, wait until the last step is on disk."""
    writer = RolloutWriter(rollouts_directory(settings), settings.keep_rollouts)
    try:
        yield writer
    finally:
        writer.close()


class RolloutWriter:
    """Owns the thread. At most two steps are in memory: one being written and one waiting."""

    def __init__(self, directory: Path, keep: int, deadline_s: float = DEADLINE_S) -> None:
        self._directory = directory
        self._keep = keep
        self._deadline_s = deadline_s
        self._waiting: Queue[StepRollouts | None] = Queue(maxsize=1)
        self._has_failed = self._has_given_up = False
        # A daemon, so that a disk that hangs does not keep the trainer from ending.
        self._thread = Thread(target=self._write_all, name="rollouts", daemon=True)
        self._thread.start()

    def add(self, rollouts: StepRollouts) -> None:
        """Write a step soon. Waits only if an earlier step is still waiting. Never raises."""
        self._put(rollouts)

    def close(self) -> None:
        """Wait until all steps are on disk, and end the thread. Never raises."""
        self._put(None)
        if self._has_given_up:
            return
        self._thread.join(self._deadline_s)
        if self._thread.is_alive():
            self._give_up()

    def _put(self, rollouts: StepRollouts | None) -> None:
        if self._has_given_up:
            return
        try:
            if self._thread.is_alive():
                self._waiting.put(rollouts, timeout=self._deadline_s)
                return
        except Full:
            pass
        self._give_up()

    def _write_all(self) -> None:
        while (rollouts := self._waiting.get()) is not None:
            try:
                write_step(self._directory, rollouts.step, rollouts.records(), self._keep)
                self._has_failed = False
            except (OSError, GrpoError, ValueError) as error:
                self._report(rollouts.step, error)

    def _report(self, step: int, error: Exception) -> None:
        """Once for a series of failures."""
        if not self._has_failed:
            log.warning(
                "rollouts.not_written",
                step=step,
                reason=str(error),
                hint="training continues, and the trainer tries again at each step; free disk "
                f"space, or check {self._directory}",
            )
        self._has_failed = True

    def _give_up(self) -> None:
        self._has_given_up = True
        log.warning(
            "rollouts.stopped",
            reason=f"{self._directory} took no rollouts for {self._deadline_s:g} s"
            if self._thread.is_alive()
            else "the thread that writes rollouts ended; see its traceback above",
            hint="training continues without rollouts; check the disk",
        )
