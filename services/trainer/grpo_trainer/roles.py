"""The two sides of the training loop: rank 0 leads, all other ranks follow.

Each begins with its function `open_...`, and has the same verbs. What `Lead` sends in one of them,
`OtherRank` receives in the same one: exchanges of `Ranks`, of the learner and of its optimizer.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import structlog
import torch

from grpo_core.errors import GrpoError, LeasesFull
from grpo_core.provenance.batches import StepInput
from grpo_core.tree.objectives import Objective
from grpo_core.tree.trainer import AUTO, TrainerSettings
from grpo_core.tree.trainer_command import CONFIG_FILE, config_yaml
from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.atomic_files import hold_save_path, remove_unfinished, write_whole
from grpo_trainer.checkpoint import resume
from grpo_trainer.checkpoint.background import Background
from grpo_trainer.checkpoint.saver import Saver
from grpo_trainer.checkpoint.store import SavedState, StateStore, save_part
from grpo_trainer.checks.data_checks import DataChecks
from grpo_trainer.checks.served_weights import Bound
from grpo_trainer.coefficients import Coefficients, coefficients_of
from grpo_trainer.data.batches import BatchQueue, BatchSource, Position, SkippedBatch
from grpo_trainer.data.collate import Batch, broadcast_batch
from grpo_trainer.data.filter import VersionHistory
from grpo_trainer.errors import RolloutMismatch
from grpo_trainer.learner import GradientStats, Learner, Meanwhile, load_learner
from grpo_trainer.memory_plan import with_micro_batch
from grpo_trainer.model.logprobs import tolerance_of
from grpo_trainer.model.policy import device_of, limits_of
from grpo_trainer.ranks import LOAD, SAVE, STOP, Ranks
from grpo_trainer.telemetry.metrics import StepOutcome
from grpo_trainer.telemetry.provenance import ProvenanceLog, recorded_steps
from grpo_trainer.telemetry.sinks import Recorder, begin_records, open_sinks
from grpo_trainer.telemetry.speed import Speed
from grpo_trainer.token_table import Distance, TokenTable
from grpo_trainer.weight_sync.base import Published, WeightSync

log = structlog.get_logger()

OpenSync = Callable[[TrainerSettings], AbstractContextManager[WeightSync]]


@dataclass
class Lead:
    """Rank 0: exchanges data with run-api and the server, checks and records."""

    learner: Learner
    sync: WeightSync
    batches: BatchSource
    checks: DataChecks
    recorder: Recorder
    saver: Saver
    coefficients: Coefficients
    provenance: ProvenanceLog
    _fresh: Distance = field(init=False)

    def take(self, position: Position) -> Batch:
        """Wait for a batch of run-api, and send its micro-batches to the other ranks."""
        self.recorder.watch.begin()
        self.learner.orders.begin()
        batch = self._awaited(position)
        self.learner.orders.end()
        broadcast_batch(batch, self.learner.ranks)
        self.recorder.watch.fetched()
        return batch

    def _awaited(self, position: Position) -> Batch:
        while True:
            match self.batches.look(position):
                case Batch() as batch:
                    return batch
                case SkippedBatch(batch_id):
                    position = self._skip(batch_id, position)
                case LeasesFull() as full:
                    self._write()
                    if not self.saver.release_batches():
                        raise full
                case None:
                    self._write()
                    self.saver.poll()
                    with self.batches.suspended():
                        self.sync.recover_server()

    def _skip(self, batch_id: int, position: Position) -> Position:
        position = replace(position, batch_id=batch_id)
        self.saver.batch_skipped(position)
        return position

    def agree_on_objective(self) -> Objective:
        """The objective with this step's coefficients, which rank 0 controls."""
        return _objective(self.learner, self.learner.ranks.broadcast(self.coefficients.values))

    def reject(self, batch: Batch, position: Position, error: GrpoError) -> Position:
        """No step can be taken on the batch. Returns the position behind it."""
        self.batches.quarantine.add(batch.batch_id, batch.received, position.step, error)
        return self._skip(batch.batch_id, position)

    def meanwhile(self, batch: Batch, position: Position) -> Meanwhile:
        """While the gradients are computed: what is not needed before them, but keeps the
        interpreter busy."""

        def begun() -> None:
            self.batches.request_next(position)
            self._write()

        def known(tokens: TokenTable) -> None:
            self.learner.orders.begin()
            self._check(batch, tokens, position)
            self.learner.orders.end()

        return Meanwhile(begun, known)

    def _write(self) -> None:
        """Write what is known of the previous step, in threads."""
        self.provenance.write()
        self.recorder.write_rollouts()

    def _check(self, batch: Batch, tokens: TokenTable, position: Position) -> None:
        """Compare the behaviour logprobs with the trainer's, before the update.

        Raises:
            RolloutMismatch: the batch is in quarantine.
        """
        trained = PolicyVersion(position.epoch, position.step)
        try:
            self._fresh = self.checks.before_update(batch, tokens, trained)
        except RolloutMismatch as error:
            self.batches.quarantine.add(batch.batch_id, batch.received, position.step, error)
            raise

    def finish_digests(self) -> None:
        """Wait for the digests of the master weights, and write them into the provenance."""
        self.provenance.finish()

    def publish(self, position: Position) -> Published:
        """Write the new master weights into the policy, and bring them to the server. From here to
        the next batch, this rank works alone."""
        optimizer, device = self.learner.optimizer, device_of(self.learner.policy)
        if device.type == "cuda":  # otherwise the update would count as publication
            torch.cuda.synchronize(device)
        self.recorder.watch.updated()
        self.learner.orders.begin()
        published = self.sync.publish(optimizer, position.step + 1)
        self.checks.after_update(optimizer, position.step)
        return published

    def finish(
        self,
        position: Position,
        batch: Batch,
        objective: Objective,
        inputs: StepInput,
        stats: GradientStats,
        published: Published,
    ) -> Position:
        """Record the step that began at `position`, and save what is due. Returns the position
        behind the step."""
        self.provenance.step_taken(inputs, batch, stats, published)
        outcome = StepOutcome(
            trained=PolicyVersion(position.epoch, position.step),
            lr=self.learner.optimizer.learning_rate(position.step),
            objective=objective,
            batch=batch,
            quarantined_batches=self.batches.quarantine.since_step,
            failed_checks=self.checks.failed,
            gradients=stats,
            fresh=self._fresh,
            published=published,
            speed=self.recorder.speed,
            times=self.recorder.watch.times(published.seconds),
            save_s=self.saver.seconds,
        )
        self.batches.quarantine.step_taken()
        self.recorder.record(outcome)
        divergence, sequences = stats.sums.mean("reference_kl") or 0.0, len(batch.sequences)
        self.coefficients.observe(divergence, sequences, batch.weights_entropy, position.step)
        # After the record: a checkpoint must not include a step that no record mentions.
        position = Position(position.step + 1, batch.batch_id, published.version.epoch)
        if self.saver.is_due(position):
            self._write()
        self.saver.step_taken(position)
        return position

    def leave(self) -> None:
        """The run is over."""
        self.checks.report_abstentions()
        self.learner.orders.end()

    def stop(self) -> None:
        """After a stop signal between two steps: save a checkpoint, and end the other ranks."""
        if self.learner.ranks.count == 1 or self.learner.orders.are_followed:
            self.saver.stop()
            self.learner.orders.give(STOP)


@dataclass(frozen=True)
class OtherRank:
    """A rank above 0: computes its portion of each batch, and follows rank 0's orders in between.
    Its positions hold the step alone, and its publications have no result."""

    learner: Learner

    def take(self, _position: Position) -> Batch:
        self.learner.follow()
        return broadcast_batch(None, self.learner.ranks)

    def agree_on_objective(self) -> Objective:
        return _objective(self.learner, self.learner.ranks.broadcast((0.0, 0.0)))

    def reject(self, _batch: Batch, position: Position, _error: GrpoError) -> Position:
        return position

    def meanwhile(self, *_: object) -> Meanwhile:
        return Meanwhile(known=lambda _: self.learner.follow())

    def finish_digests(self) -> None:
        self.learner.digests.finish()

    def publish(self, _position: Position) -> Any:
        self.learner.optimizer.write_into_parameters()

    def finish(self, position: Position, *_: object) -> Position:
        return replace(position, step=position.step + 1)

    def leave(self) -> None:
        self.learner.follow()


Role = Lead | OtherRank


def _objective(learner: Learner, coefficients: tuple[float, float]) -> Objective:
    kl_coef, tau = coefficients
    return replace(learner.settings.resolved_objective, kl_coef=kl_coef, maxent_tau=tau)


def open_lead(
    stack: ExitStack,
    settings: TrainerSettings,
    ranks: Ranks,
    api: BatchQueue,
    weight_sync: OpenSync,
) -> tuple[Lead, Position] | None:
    """Load and restore the policy, publish its weights and save them; None if the run is complete.

    Args: stack: closes what it opens
    """
    stack.enter_context(hold_save_path(settings.save_path))
    store = StateStore(settings.save_path)
    remove_unfinished(store.directory)
    saved = resume.find_state(settings, store)
    ranks.broadcast(None if saved is None else (saved.record.step, str(saved.directory)))
    if saved is not None and saved.record.step >= settings.steps:
        resume.leave_complete_run(api, settings, saved)
        return None
    settings = resume.continued_settings(settings, saved)
    write_whole(settings.save_path / CONFIG_FILE, config_yaml(settings))
    recorded = recorded_steps(settings.save_path, saved)
    sinks = stack.enter_context(open_sinks(settings, recorded or 0))
    sync = stack.enter_context(weight_sync(settings))
    policy = sync.load_policy(saved is not None)
    settings = settings.model_copy(update={"run_id": sync.server_run_id})
    learner = _with_micro_batch(load_learner(policy, settings, ranks), saved)
    learner.orders.begin()
    provenance = stack.enter_context(contextlib.closing(ProvenanceLog(learner)))
    recorder = Recorder(settings, sinks, Speed.measured(learner.policy, ranks))
    stack.callback(recorder.write_rollouts)
    log.info("objective.chosen", name=settings.objective, **asdict(settings.resolved_objective))
    settings = learner.settings  # with what was chosen for the policy's device
    coefficients, bound = coefficients_of(settings), _bound(learner, saved)
    position = _restored(learner, api, saved, coefficients)
    begin_records(settings, recorded)
    served = sync.start(learner.optimizer, position.step, position.epoch, bound)
    position = replace(position, epoch=served.epoch)
    learner.digests.begin()
    provenance.start(served, saved, recorded, api.run_uuid)
    saver = Saver(
        learner, api, store, bound, coefficients, provenance.before_save, provenance.exported
    )
    # A checkpoint that the user named may belong to another directory or run: leave it as it is.
    own = saved if settings.resume == AUTO else None
    stack.callback(saver.close)
    saver.begin(position, own is not None, own.record.checkpoints if own else ())
    history = VersionHistory(served, sync.begun_as, sync.epochs)
    limits = limits_of(learner.policy, settings)
    cut, flops = learner.forward.layout.cut, recorder.speed.flops
    if ranks.count > 1:
        cut = replace(cut, ranks=ranks.count, view=flops.of_view / flops.of_token)
    batches = BatchSource(settings, api, limits, history, cut)
    checks = DataChecks(learner, sync.served_logprobs, bound.value)
    learner.orders.end()
    return Lead(learner, sync, batches, checks, recorder, saver, coefficients, provenance), position


def _with_micro_batch(learner: Learner, saved: SavedState | None) -> Learner:
    """With the number of tokens of the checkpoint, if the device can hold them."""
    settings, recorded = learner.settings, None
    if saved is not None:
        recorded = saved.record.tokens_per_micro_batch or settings.micro_batch_tokens
    chosen = with_micro_batch(settings, learner.policy, learner.ranks, recorded)
    return replace(learner, settings=chosen)


def _restored(
    learner: Learner, api: BatchQueue, saved: SavedState | None, coefficients: Coefficients
) -> Position:
    """Register a new run at run-api, or restore a checkpoint."""
    if saved is None:
        api.register(learner.settings.registration(first_step=0))
        return Position(step=0, batch_id=0, epoch=0)
    coefficients.resume(saved.record.kl_coef, saved.record.maxent)
    return resume.restore(
        saved, learner.policy, learner.optimizer, api, learner.settings, learner.orders
    )


def _bound(learner: Learner, saved: SavedState | None) -> Bound:
    """Of the checks of the served weights. A new run measures the noise, if a check is due."""
    floor, settings = tolerance_of(learner.policy), learner.settings
    if saved is not None:
        return Bound(floor, saved.record.noise)
    return Bound(floor, learns=settings.sync.uses_files or settings.verify_every_steps > 0)


def open_other_rank(
    stack: ExitStack, settings: TrainerSettings, ranks: Ranks
) -> tuple[OtherRank, Position] | None:
    """Args: stack: closes what it opens"""
    saved: tuple[int, str] | None = ranks.broadcast(None)
    steps_taken = saved[0] if saved else 0
    if saved and steps_taken >= settings.steps:
        return None
    learner = load_learner(None, settings, ranks)
    with_micro_batch(settings, learner.policy, ranks, None)
    checkpoints = Background(ranks, learner.optimizer.parts)
    stack.callback(checkpoints.close)
    learner.orders.actions |= {
        SAVE: lambda _: checkpoints.begin(learner.optimizer.tensors(learner.names), save_part),
        LOAD: lambda _: _load_part(learner, Path(saved[1] if saved else "")),
        STOP: lambda _: sys.exit(128 + signal.SIGTERM),
    }
    learner.follow()
    return OtherRank(learner), Position(steps_taken, 0, 0)


def _load_part(learner: Learner, directory: Path) -> None:
    resume.restore_part(directory, learner.policy, learner.optimizer, learner.ranks)
    learner.optimizer.write_into_parameters()
