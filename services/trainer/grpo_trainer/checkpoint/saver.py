"""Decides when checkpoints and exported models are saved and when batches are acknowledged.

A checkpoint is written beside the following steps. Its batches are acknowledged once it is
complete.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import structlog

from grpo_core.tree.trainer import TrainerSettings
from grpo_core.tree.weights import SERVED_KEPT
from grpo_core.weights.directory_checks import FINAL_ADAPTER, FINAL_MODEL
from grpo_trainer.atomic_files import remove_directory
from grpo_trainer.checkpoint.background import Background
from grpo_trainer.checkpoint.store import KEPT as STATES_KEPT
from grpo_trainer.checkpoint.store import StateStore, capture, checksum_of_untrained
from grpo_trainer.checks.served_weights import Bound
from grpo_trainer.coefficients import Coefficients
from grpo_trainer.data.batches import BatchQueue, Position
from grpo_trainer.learner import Learner
from grpo_trainer.model.adapter import trained_parameters
from grpo_trainer.model.division import model_tensors
from grpo_trainer.model.loading import TrainedWeights
from grpo_trainer.ranks import SAVE

log = structlog.get_logger()


@dataclass(frozen=True)
class Due:
    """What to save after a step: exported models, by directory name, and a checkpoint (`state`)."""

    models: tuple[str, ...]
    state: bool


def due_after(step: int, saved_step: int, settings: TrainerSettings) -> Due:
    """Decide after `step` steps, of which the newest checkpoint includes `saved_step`."""
    interval, is_last = settings.checkpoint_interval, step == settings.steps
    is_whole = settings.lora is None
    stem, final = ("step_", FINAL_MODEL) if is_whole else ("adapter_step_", FINAL_ADAPTER)
    models = [f"{stem}{step}"] if interval and step % interval == 0 else []
    if is_last:
        models.append(final)
    state_is_due = 0 < settings.state_interval <= step - saved_step
    return Due(tuple(models), bool(models) or state_is_due)


@dataclass
class Saver:
    """Saves checkpoints and exported models. Acknowledges batches once a complete checkpoint
    includes them.

    Args:
        before_save: called before a checkpoint is saved
        exported: called with the directory of an exported model, and the steps that it includes

    `seconds`: time that training waited for the last save, None if nothing was due after the
    previous step.
    """

    learner: Learner
    api: BatchQueue
    store: StateStore
    bound: Bound
    coefficients: Coefficients
    before_save: Callable[[], None] = lambda: None
    exported: Callable[[Path, int], None] = lambda *_: None
    seconds: float | None = field(init=False, default=None)
    _writer: Background = field(init=False)
    _begun: tuple[Position, float] | None = field(init=False, default=None)
    """The checkpoint that is being written, and when that began."""

    def __post_init__(self) -> None:
        self._writer = Background(self.learner.ranks, self.learner.optimizer.parts)

    def close(self) -> None:
        """Wait for the thread that writes."""
        self._writer.close()

    def begin(self, position: Position, is_saved: bool, checkpoints: Sequence[str] = ()) -> None:
        """Start at `position`, and save a checkpoint unless it is saved already. Without one, a
        trainer killed early would train the same batches into weights that already include them.

        Args:
            checkpoints: the exported models that the run has already written, the oldest first

        Raises:
            CheckpointNotSaved: the checkpoint could not be written.
        """
        self._position = self._saved = position
        # While a restarting server is away, `shared_vllm` has no weights to read.
        self._frozen = checksum_of_untrained(self.learner.policy, self.learner.settings)
        self._checkpoints = list(checkpoints)
        _log_disk_need(self.learner)
        if not is_saved:
            self._save_state(position)
            self._finish()

    def is_due(self, position: Position) -> bool:
        """Whether `step_taken` will save a checkpoint."""
        return due_after(position.step, self._saved.step, self.learner.settings).state

    def step_taken(self, position: Position) -> None:
        """Save what is due; the checkpoint comes last. After the last step, wait for it.

        Raises:
            CheckpointNotSaved: a file of this checkpoint or of the previous one could not be
                written; its batches were not acknowledged.
            ServiceUnavailable: the checkpoint is saved, but run-api did not answer.
        """
        self.poll()
        self._position, self.seconds = position, None
        due = due_after(position.step, self._saved.step, self.learner.settings)
        if not due.state:
            return
        started = time.monotonic()
        for name in due.models:
            self._save_model(name)
        self._save_state(position)
        if position.step == self.learner.settings.steps:
            self._finish()
        self.seconds = time.monotonic() - started

    def poll(self) -> None:
        """Acknowledge the batches of a checkpoint if it is complete by now. Raises the errors of
        `step_taken`."""
        self._finish(wait=False)

    def batch_skipped(self, position: Position) -> None:
        """A batch was skipped: the next checkpoint includes it."""
        self._position = position

    def release_batches(self) -> bool:
        """Wait for the checkpoint that is being written, or save one early, so that run-api can
        delete batches. False if the newest checkpoint already includes them all. Raises the errors
        of `step_taken`."""
        if self._begun is None:
            if self._position == self._saved:
                return False
            self._save_state(self._position)
        self._finish()
        return True

    def stop(self) -> None:
        """Save a checkpoint between two steps, if the newest one lacks some. run-api may be
        stopping too, so the next trainer acknowledges its batches."""
        self._finish(acknowledges=False)
        if self._position != self._saved:
            self._save_state(self._position)
            self._finish(acknowledges=False)

    def _save_model(self, name: str) -> None:
        settings = self.learner.settings
        target = settings.save_path / name
        weights = TrainedWeights(settings.model, settings.lora)
        weights.write(self.learner.policy, target, with_tokenizer=True)
        log.info("model.exported", directory=str(target))
        self.exported(target, self._position.step)
        if name in (FINAL_MODEL, FINAL_ADAPTER):
            return
        self._checkpoints = [*(kept for kept in self._checkpoints if kept != name), name]
        while len(self._checkpoints) > settings.keep_checkpoints:
            oldest = settings.save_path / self._checkpoints.pop(0)
            if remove_directory(oldest):
                log.info("export.removed", directory=str(oldest))

    def _save_state(self, position: Position) -> None:
        """Begin to write a checkpoint, once the previous one is complete."""
        self._finish()
        started = time.monotonic()
        self.before_save()
        run_uuid = self.api.run_uuid
        record = capture(
            self.learner.policy,
            self.learner.optimizer,
            self.learner.settings,
            position,
            run_uuid,
            self._frozen,
            checkpoints=tuple(self._checkpoints),
            noise=self.bound.noise,
            kl_coef=self.coefficients.kl.to_save,
            maxent=self.coefficients.tau.to_save,
        )
        tensors = self.learner.optimizer.tensors(list(record.parameters))
        if self.learner.optimizer.parts > 1:
            self.learner.orders.give(SAVE)
        self._writer.begin(tensors, partial(self.store.save, record))
        self._saved, self._begun = position, (position, started)

    def _finish(self, *, wait: bool = True, acknowledges: bool = True) -> None:
        directory = self._writer.finished(wait=wait)
        if self._begun is None or directory is None:
            return
        (position, started), self._begun = self._begun, None
        log.info(
            "checkpoint.saved",
            directory=str(directory),
            step=position.step,
            batch_id=position.batch_id,
            seconds=round(time.monotonic() - started, 3),
        )
        if position.batch_id and acknowledges:
            self.api.acknowledge(position.batch_id)


def _log_disk_need(learner: Learner) -> None:
    """Log the maximum disk space of the run's directories, including one that is being written.
    Only weights count: tokenizers and configurations are small."""
    settings, policy = learner.settings, learner.policy
    interval = settings.checkpoint_interval
    saved = settings.steps // interval if interval else 0
    models = 1 + min(saved, settings.keep_checkpoints + 1)
    if settings.sync.uses_files:
        models += 1 + SERVED_KEPT
    if settings.sync.mode == "none":
        models += 2  # the newest version without deltas, and all deltas since
    exported = trained_parameters(policy) if settings.lora else model_tensors(policy)
    model_bytes = sum(tensor.nbytes for tensor in exported.values())
    states, state_bytes = 1 + STATES_KEPT, learner.optimizer.state_bytes()
    log.info(
        "disk_usage.planned",
        save_path=str(settings.save_path),
        total_megabytes=_megabytes(models * model_bytes + states * state_bytes),
        models=models,
        megabytes_per_model=_megabytes(model_bytes),
        checkpoints=states,
        megabytes_per_checkpoint=_megabytes(state_bytes),
        hint="for fewer models, lower --keep-checkpoints or raise --checkpoint-interval",
    )


def _megabytes(count: int) -> float:
    return round(count / 1e6, 3)
