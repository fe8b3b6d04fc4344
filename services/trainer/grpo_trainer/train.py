"""The training loop: take → advantages → gradients → checks → step → publish → record → checkpoint.

Every rank runs it. Rank 0 also exchanges data with run-api and the server, checks and records.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace

import structlog
import torch

from grpo_core.clients.run_api import TrainerClient
from grpo_core.security import plain
from grpo_core.tree.objectives import Objective
from grpo_core.tree.trainer import AUTO, TrainerSettings
from grpo_core.tree.trainer_command import CONFIG_FILE, config_yaml
from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.atomic_files import hold_save_path, remove_unfinished, write_whole
from grpo_trainer.checkpoint import resume
from grpo_trainer.checkpoint.saver import Saver
from grpo_trainer.checkpoint.store import SavedState, StateStore
from grpo_trainer.checks.data_checks import DataChecks
from grpo_trainer.checks.self_test import SelfTest, require_own_functions
from grpo_trainer.checks.served_weights import Bound
from grpo_trainer.coefficients import Coefficients, coefficients_of
from grpo_trainer.data.batches import BatchQueue, BatchSource, Position, TakenBatch
from grpo_trainer.data.collate import broadcast_batch
from grpo_trainer.data.filter import VersionHistory
from grpo_trainer.errors import NonFiniteStep, RolloutMismatch
from grpo_trainer.learner import GradientStats, Learner, load_learner
from grpo_trainer.model.logprobs import tolerance_of
from grpo_trainer.model.policy import limits_of
from grpo_trainer.optim.master_optimizer import MasterOptimizer
from grpo_trainer.ranks.group import ALONE, BATCH_FOLLOWS, CHECKPOINT_FIRST, Ranks
from grpo_trainer.stop import Stop
from grpo_trainer.telemetry.metrics import StepOutcome, StepWatch
from grpo_trainer.telemetry.provenance import ProvenanceLog, recorded_steps, step_input
from grpo_trainer.telemetry.sinks import Recorder, Sinks, begin_records, open_sinks
from grpo_trainer.token_table import Distance
from grpo_trainer.weight_sync.base import Published, WeightSync
from grpo_trainer.weight_sync.build import open_weight_sync

log = structlog.get_logger()


@dataclass(frozen=True)
class Lead:
    """What rank 0 alone has: it exchanges data with run-api and the server, checks and records."""

    sync: WeightSync
    batches: BatchSource
    checks: DataChecks
    recorder: Recorder
    saver: Saver
    coefficients: Coefficients
    provenance: ProvenanceLog


def train(settings: TrainerSettings, ranks: Ranks = ALONE, stop: Stop | None = None) -> None:
    """Train up to step `settings.steps`, from a checkpoint if there is one, and save the
    final model. A stop between two steps saves a checkpoint.

    Args:
        ranks: this process among the trainer's processes
        stop: listens to signals

    Raises:
        GrpoError: any of the named errors. The server keeps serving in every case.
        SystemExit: a stop signal arrived.
    """
    stop = stop or Stop()
    token = plain(settings.run_api_token)
    with (
        TrainerClient(settings.run_api_url, settings.service_deadline_s, token) as api,
        open_run(settings, api, open_weight_sync, ranks) as opened,
    ):
        if opened is None:
            return
        learner, lead, position = opened
        try:
            for _ in training_steps(learner, lead, position, stop):
                pass
        except SystemExit:
            if lead is not None and stop.listens and not stop.in_step:
                lead.saver.stop()
            raise
        if lead is not None and settings.benchmark:
            lead.recorder.report_times()


def training_steps(
    learner: Learner, lead: Lead | None, position: Position, stop: Stop
) -> Iterator[Position]:
    """The training loop. Yields the position after each step. Batches that cannot be trained on are
    skipped.

    Args:
        lead: None on ranks above 0
        position: the steps taken so far; its epoch and step are the served policy version
        stop: defers a signal during a step to the step's end
    """
    optimizer, digests = learner.optimizer, learner.digests
    if lead is not None:
        lead.recorder.started = time.monotonic()
    while position.step < learner.settings.steps:
        watch = StepWatch() if lead is None else StepWatch(enter=lead.recorder.enter)
        taken = take(learner, lead, position)
        watch.fetched()
        with stop.deferred():
            objective = objective_now(learner, lead)
            batch = learner.with_advantages(taken.batch, taken.usable, objective)
            taken = replace(taken, batch=batch)
            inputs = step_input(learner, objective, position.step, taken.batch_id)
            try:
                gradients = learner.gradients(batch, objective, position.step)
            except NonFiniteStep as error:
                if lead is not None:
                    position = lead.batches.reject(taken, position, error)
                continue
            fresh = check(lead, taken, gradients, position)
            # The digests of the newest weights are computed before these change.
            (digests if lead is None else lead.provenance).finish()
            optimizer.step(position.step)  # changes the master weights alone
            digests.begin()
            watch.updated()
            published = publish(optimizer, lead, position)
            if lead is not None and fresh is not None:
                lr = optimizer.learning_rate(position.step)
                lead.provenance.step_taken(inputs, taken, gradients, published)
                record(lead, position, lr, taken, objective, gradients, fresh, published, watch)
                divergence = gradients.sums.mean("reference_kl") or 0.0
                lead.coefficients.observe(
                    divergence, len(batch.origins), batch.weights_entropy, position.step
                )
            # After the record: a checkpoint must not include a step that no record mentions.
            position = Position(position.step + 1, taken.batch_id, published.version.epoch)
            save(learner, lead, position)
        yield position


def take(learner: Learner, lead: Lead | None, position: Position) -> TakenBatch:
    """Rank 0 waits for a batch of run-api, and sends its micro-batches to the others."""
    ranks = learner.ranks
    if lead is not None:
        taken = lead.batches.take(position)
        lead.batches.request_next(position)
        ranks.broadcast(BATCH_FOLLOWS)
        broadcast_batch(taken.batch, ranks)
        return taken
    while ranks.broadcast(BATCH_FOLLOWS, "a batch") == CHECKPOINT_FIRST:
        learner.send_state()
    return TakenBatch(0, [], [], broadcast_batch(None, ranks))


def objective_now(learner: Learner, lead: Lead | None) -> Objective:
    """The objective with this step's coefficients, which rank 0 controls."""
    values = None if lead is None else lead.coefficients.values
    kl_coef, tau = learner.ranks.broadcast(values) or (0.0, 0.0)
    return replace(learner.settings.resolved_objective, kl_coef=kl_coef, maxent_tau=tau)


def check(
    lead: Lead | None, taken: TakenBatch, gradients: GradientStats, position: Position
) -> Distance | None:
    """Rank 0 compares the behaviour logprobs with the trainer's. Returns the distance of fresh
    tokens.

    Raises:
        RolloutMismatch: the batch is in quarantine.
    """
    if lead is None:
        return None
    trained = PolicyVersion(position.epoch, position.step)
    try:
        return lead.checks.before_update(taken.batch, taken.usable, gradients.tokens, trained)
    except RolloutMismatch as error:
        lead.batches.quarantine.add(taken.batch_id, taken.groups, position.step, error)
        raise


def publish(optimizer: MasterOptimizer, lead: Lead | None, position: Position) -> Published:
    """Write the new master weights into the policy, and on rank 0 bring them to the server."""
    steps_taken = position.step + 1
    if lead is None:
        optimizer.write_into_parameters()
        return Published(PolicyVersion(position.epoch, steps_taken), seconds=0.0)
    published = lead.sync.publish(optimizer, steps_taken)
    lead.checks.after_update(optimizer, position.step)
    return published


def record(
    lead: Lead,
    position: Position,
    lr: float,
    taken: TakenBatch,
    objective: Objective,
    gradients: GradientStats,
    fresh: Distance,
    published: Published,
    watch: StepWatch,
) -> None:
    """Record the step that began at `position`."""
    outcome = StepOutcome(
        step=position.step,
        lr=lr,
        objective=objective,
        taken=taken,
        quarantined_batches=lead.batches.quarantine.since_step,
        failed_checks=lead.checks.failed,
        trained=PolicyVersion(position.epoch, position.step),
        gradients=gradients,
        fresh=fresh,
        published=published,
        times=watch.times(published.seconds, lead.recorder.started),
        save_s=lead.saver.seconds,
    )
    lead.batches.quarantine.step_taken()
    lead.recorder.record(outcome)


def save(learner: Learner, lead: Lead | None, position: Position) -> None:
    """Save what is due after a step."""
    is_due = learner.ranks.broadcast(lead is not None and lead.saver.is_due(position))
    if lead is not None:
        lead.saver.step_taken(position)
    elif is_due:
        learner.send_state()


@contextlib.contextmanager
def open_run(
    settings: TrainerSettings,
    api: BatchQueue,
    weight_sync: Callable[[TrainerSettings], AbstractContextManager[WeightSync]],
    ranks: Ranks = ALONE,
) -> Iterator[tuple[Learner, Lead | None, Position] | None]:
    """Load, restore, serve, check. Gives what the loop needs; None if the run is complete already.

    Args:
        api: where batches come from
        weight_sync: opens the object that brings weights to the server
        ranks: this process among the trainer's processes
    """
    require_own_functions(settings.resolved_objective)
    torch.manual_seed(settings.seed)
    with contextlib.ExitStack() as stack:
        store, saved = StateStore(settings.save_path), None
        sync, sinks, policy, recorded = None, None, None, None
        if ranks.leads:
            stack.enter_context(hold_save_path(settings.save_path))
            remove_unfinished(store.directory)
            saved = resume.find_state(settings, store)
        steps_taken = ranks.broadcast(None if saved is None else saved.record.step)
        if steps_taken is not None and steps_taken >= settings.steps:
            if saved is not None:
                resume.leave_complete_run(api, settings, saved)
            yield None
            return
        if ranks.leads:
            settings = resume.continued_settings(settings, saved)
            write_whole(settings.save_path / CONFIG_FILE, config_yaml(settings))
            recorded = recorded_steps(settings.save_path, saved)
            sinks = stack.enter_context(open_sinks(settings, recorded or 0))
            sync = stack.enter_context(weight_sync(settings))
            policy = sync.load_policy(steps_taken is not None)
            settings = settings.model_copy(update={"run_id": sync.server_run_id})
        learner, lead = load_learner(policy, settings, ranks), None
        if sync is None or sinks is None:
            position = start_other_rank(learner, steps_taken)
        else:
            provenance = stack.enter_context(contextlib.closing(ProvenanceLog(learner)))
            lead, position = start_rank_0(
                learner, api, sync, store, saved, recorded, sinks, provenance
            )
        SelfTest(learner).require()
        yield learner, lead, position


def start_other_rank(learner: Learner, steps_taken: int | None) -> Position:
    """What ranks above 0 do during `start_rank_0`. Args: steps_taken: of the checkpoint"""
    if steps_taken is not None:
        learner.optimizer.load_tensors(learner.names, {})
    learner.optimizer.write_into_parameters()
    learner.digests.begin()
    learner.digests.finish()
    if learner.ranks.broadcast(False):  # whether rank 0 saves a checkpoint at the start
        learner.send_state()
    return Position(steps_taken or 0, 0, 0)


def start_rank_0(
    learner: Learner,
    api: BatchQueue,
    sync: WeightSync,
    store: StateStore,
    saved: SavedState | None,
    recorded: int | None,
    sinks: Sinks,
    provenance: ProvenanceLog,
) -> tuple[Lead, Position]:
    """Restore the checkpoint, publish the first weights, and build what rank 0 alone has."""
    settings, policy, optimizer = learner.settings, learner.policy, learner.optimizer
    coefficients = coefficients_of(settings)
    if saved is None:
        api.register(settings.registration(first_step=0))
        position = Position(step=0, batch_id=0, epoch=0)
    else:
        coefficients.resume(saved.record.kl_coef, saved.record.maxent)
        position = resume.restore(saved, policy, optimizer, api, settings)
    begin_records(settings, recorded)
    bound = Bound(
        tolerance_of(policy),
        noise=None if saved is None else saved.record.noise,
        learns=saved is None and (settings.sync.uses_files or settings.verify_every_steps > 0),
    )
    served = sync.start(optimizer, position.step, position.epoch, bound)
    position = replace(position, epoch=served.epoch)
    learner.digests.begin()
    provenance.start(served, saved, recorded, api.run_uuid)
    saver = Saver(
        *(settings, policy, optimizer, api, store, bound, coefficients, learner.ranks),
        before_save=provenance.finish,
        exported=provenance.exported,
    )
    # A checkpoint that the user named may belong to another directory or run: leave it as it is.
    own = saved if settings.resume == AUTO else None
    learner.ranks.broadcast(own is None)
    saver.begin(position, own is not None, own.record.checkpoints if own else ())
    log.info("objective.chosen", name=settings.objective, **asdict(settings.resolved_objective))
    lead = Lead(
        sync=sync,
        batches=BatchSource(
            settings,
            api,
            skipped=saver.batch_skipped,
            release_batches=saver.release_batches,
            recover_server=sync.recover_server,
            limits=limits_of(policy, settings),
            history=VersionHistory(served, sync.begun_as, sync.epochs),
            cut=learner.forward.layout.cut,
        ),
        checks=DataChecks(learner, sync.served_logprobs, bound.value),
        recorder=Recorder(settings, sinks),
        saver=saver,
        coefficients=coefficients,
        provenance=provenance,
    )
    return lead, position
