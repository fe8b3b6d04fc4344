"""The rollouts of a step: their records, the files that a thread writes, and a table for W&B.

After the start, a disk that fails never ends the run: the trainer warns and continues, because
training does not need these files.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count, islice
from pathlib import Path
from queue import Full, Queue
from statistics import fmean
from threading import Thread
from typing import Any

import numpy
import structlog
from numpy.typing import NDArray

from grpo_core.errors import GrpoError
from grpo_core.rollouts.files import ROLLOUTS, TOKENIZER, remove_later_steps, steps_in, write_step
from grpo_core.rollouts.record import RolloutRecord, records_of_group, split_conversation, text_of
from grpo_core.tracker import Table
from grpo_core.tree.trainer import TrainerSettings
from grpo_core.wire.fields import FLOAT32_MAX
from grpo_core.wire.policy_version import PolicyVersion
from grpo_core.wire.scored_group import ScoredGroup
from grpo_trainer.atomic_files import write_whole
from grpo_trainer.data.collate import Batch
from grpo_trainer.errors import CheckpointNotSaved
from grpo_trainer.token_table import TokenTable

log = structlog.get_logger()

DECIMALS = 7
"""Of logprobs and advantages: about the precision of float32."""
DEADLINE_S = 60.0
"""Longest time to wait for the disk, in a step and at the end of the run."""
SAMPLE_EVERY_STEPS = 10
SAMPLES = 8
MAX_CHARS = 1000
"""Of each text of a sample."""
MAX_BYTES = 32 * 1024
"""Half of the smallest pipe to W&B. A table that does not fit into the pipe would end W&B's run."""
SAMPLES_NAME = "rollouts/samples"
COLUMNS = ["step", "task", "prompt", "completion", "score", "advantage", "reason"]


@dataclass(frozen=True)
class StepRollouts:
    """What the records of one step are built from. Threads may read it, since nothing changes it.

    Args:
        step: counted from 1
        epoch: of the trainer
        tokens: the trained tokens of `batch`
    """

    step: int
    epoch: int
    batch: Batch
    tokens: TokenTable

    @property
    def groups(self) -> Sequence[ScoredGroup]:
        return self.batch.groups

    def records(self) -> list[RolloutRecord]:
        """One for each sequence, group after group."""
        return [r for group in range(len(self.groups)) for r in self.records_of(group)]

    def records_of(self, group: int) -> list[RolloutRecord]:
        """Args: group: index in the batch"""
        records = records_of_group(self.step, group, self.groups[group])
        for record, row in zip(records, self._rows_of[group], strict=True):
            self._complete(record, row)
        return records

    def _complete(self, record: RolloutRecord, row: int) -> None:
        """Add what the trainer knows, and leave out the tokens that were cut off."""
        sequence = self.batch.sequences[row]
        begin, end = self._ends[row : row + 2]
        cut = int(self._positions[end - 1]) + 1 if end > begin else 0
        record.mask[cut:] = [0] * (len(record.mask) - cut)
        record.logprobs = self._logp[begin:end]
        # Where none were logged, the batch has the trainer's own.
        record.behaviour_logprobs = (
            self._behaviour_logp[begin:end]
            if sequence.is_logged
            else record.behaviour_logprobs[: end - begin]
        )
        record.teacher_logprobs = record.teacher_logprobs[: end - begin]
        record.advantage = self._advantage(row)
        record.temperature = sequence.temperature
        record.versions = [list(v) for v in sequence.versions] if sequence.versions else None
        record.staleness = self._staleness(sequence.begun_by)

    def _advantage(self, row: int) -> float | None:
        """[T] of the batch has a value for each target: target t is the token at t + 1."""
        values = self._advantages[row]
        if len(values) > 1:
            trained = self._positions[slice(*self._ends[row : row + 2])]
            values = [values[t - 1] for t in trained.tolist()]
        return round(fmean(values), DECIMALS) if values else None

    def _staleness(self, version: PolicyVersion | None) -> int | None:
        """As the metric: steps of different epochs cannot be compared, and a bound counts like a
        version."""
        if version is None or version.epoch != self.epoch:
            return None
        return self.step - 1 - version.step

    @cached_property
    def _positions(self) -> NDArray[numpy.int64]:
        return self.tokens.position.numpy()

    @cached_property
    def _ends(self) -> list[int]:
        """[rows + 1] where the trained tokens of each row begin, and where those of the last end.
        The tokens are in the order of the rows."""
        counts = numpy.bincount(self.tokens.sequence.numpy(), minlength=len(self.batch.order))
        return [0, *counts.cumsum().tolist()]

    @cached_property
    def _logp(self) -> list[float]:
        return _rounded(self.tokens.logp.numpy())

    @cached_property
    def _behaviour_logp(self) -> list[float]:
        return _rounded(self.tokens.behaviour_logp.numpy())

    @cached_property
    def _advantages(self) -> list[list[float]]:
        """Of each row: [1], or [T] if the environment sent one for each token."""
        return [row for micro in self.batch.micro_batches for row in micro.advantages.tolist()]

    @cached_property
    def _rows_of(self) -> list[list[int]]:
        """The rows of each group's sequences."""
        order = self.batch.order
        rows = iter(sorted(range(len(order)), key=order.__getitem__))
        return [[*islice(rows, group.size)] for group in self.groups]


def _rounded(values: NDArray[numpy.float32]) -> list[float]:
    """Args: values: [N] float32. An impossible token has the smallest float32: JSON knows no
    infinity."""
    exact = numpy.maximum(values.astype(numpy.float64), -FLOAT32_MAX)
    return exact.round(DECIMALS).tolist()  # type: ignore[no-any-return]


def rollouts_directory(settings: TrainerSettings) -> Path:
    return settings.rollouts_dir or settings.save_path / ROLLOUTS


def prepare_rollouts(settings: TrainerSettings, steps_taken: int | None) -> None:
    """As `prepare_steps`; then save the policy's tokenizer, if rollouts are kept."""
    directory = rollouts_directory(settings)
    prepare_steps(directory, steps_taken, "--rollouts-dir")
    if settings.keep_rollouts:
        _save_tokenizer(settings.model, directory)


def prepare_steps(directory: Path, steps_taken: int | None, option: str) -> None:
    """Remove what a killed trainer wrote after its checkpoint, or move the files of another run
    away.

    Args: steps_taken: by the checkpoint; None for a new run

    Raises:
        CheckpointNotSaved: the directory cannot be written.
    """
    try:
        if steps_taken is not None:
            remove_later_steps(directory, steps_taken)
        elif directory.is_dir() and steps_in(directory):
            aside = free_name(directory)
            directory.rename(aside)
            log.info("steps.renamed", directory=str(directory), renamed_to=str(aside))
    except OSError as error:
        raise CheckpointNotSaved(
            f"{directory} contains files of an earlier run and cannot be changed: {error}; move "
            f"this directory away, or pass another {option}"
        ) from error


def free_name(path: Path) -> Path:
    """`path.1`, or the next free number."""
    return next(p for n in count(1) if not (p := Path(f"{path}.{n}")).exists())


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

    def close(self) -> None:
        """Wait until all steps are on disk, and end the thread. Never raises."""
        self.add(None)
        if self._has_given_up:
            return
        self._thread.join(self._deadline_s)
        if self._thread.is_alive():
            self._give_up()

    def add(self, rollouts: StepRollouts | None) -> None:
        """Write a step soon; None ends the thread. Waits only if an earlier step is still waiting.
        Never raises."""
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


def samples_are_due(step: int) -> bool:
    """Args: step: counted from 1"""
    return step == 1 or step % SAMPLE_EVERY_STEPS == 0


def sample_table(rollouts: StepRollouts) -> Table:
    """Sequences whose scores range from the step's worst to its best."""
    places = [
        (score, number, index)
        for number, group in enumerate(rollouts.groups)
        for index, score in enumerate(group.scores)
    ]
    places.sort()
    count = min(SAMPLES, len(places))
    chosen = [places[i * (len(places) - 1) // max(1, count - 1)] for i in range(count)]
    records = [rollouts.records_of(group)[index] for _, group, index in chosen]
    limit = MAX_CHARS
    while True:
        rows = [_row(record, limit) for record in records]
        if limit == 0 or len(json.dumps(rows)) <= MAX_BYTES:
            return Table(SAMPLES_NAME, rollouts.step, COLUMNS, rows)
        limit //= 2


def _row(record: RolloutRecord, limit: int) -> list[Any]:
    prompt, completion = map(text_of, split_conversation(record))
    if not record.messages:
        ids = [str(token) for token in record.tokens]
        prompt, completion = "", f"token ids: {' '.join(ids)}"
    return [
        record.step,
        _shortened(record.task or "", limit),
        _shortened(prompt, limit),
        _shortened(completion, limit),
        record.score,
        record.advantage,
        _shortened(record.reason or "", limit),
    ]


def _shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}…"
