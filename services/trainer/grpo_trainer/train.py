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
from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.atomic_files import hold_save_path, remove_unfinished, write_whole
from grpo_trainer.checkpoint.resume import (
    continued_settings,
    find_state,
    leave_complete_run,
    restore,
)
from grpo_trainer.checkpoint.saver import BATCH_FOLLOWS, CHECKPOINT_FIRST, Saver
from grpo_trainer.checkpoint.store import SavedState, StateStore
from grpo_trainer.checks.data_checks import DataChecks
from grpo_trainer.checks.self_test import SelfTest, require_own_functions
from grpo_trainer.checks.served_weights import Bound
from grpo_trainer.config.cli import CONFIG_FILE, config_yaml
from grpo_trainer.config.trainer import AUTO, TrainerSettings
from grpo_trainer.control import Coefficients
from grpo_trainer.data.batches import BatchQueue, BatchSource, Position, TakenBatch
from grpo_trainer.data.collate import broadcast_batch
from grpo_trainer.data.filter import VersionHistory
from grpo_trainer.errors import NonFiniteStep, RolloutMismatch
from grpo_trainer.gradients import Accumulate, Update, build_learner
from grpo_trainer.model.adapter import trained_parameters
from grpo_trainer.model.forward import FastForward, build_forward_pass
from grpo_trainer.model.loading import broadcast_policy, warn_of_slow_type
from grpo_trainer.model.logprobs import tolerance_of
from grpo_trainer.model.policy import CausalLM, limits_of, train_only
from grpo_trainer.model.reference import Reference, build_reference, with_advantages
from grpo_trainer.objectives import Objective
from grpo_trainer.optim.master_optimizer import MasterOptimizer
from grpo_trainer.ranks.group import ALONE, Ranks
from grpo_trainer.stop import Stop
from grpo_trainer.telemetry.metrics import StepOutcome, StepWatch
from grpo_trainer.telemetry.rollouts import StepRollouts
from grpo_trainer.telemetry.sinks import Recorder, Sinks, begin_records, open_sinks
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


@dataclass(frozen=True)
class Run:
    """What every rank has. `lead`: None on ranks above 0."""

    settings: TrainerSettings
    ranks: Ranks
    policy: CausalLM
    forward: FastForward
    reference: Reference | None
    optimizer: MasterOptimizer
    accumulate: Accumulate
    lead: Lead | None

    @property
    def names(self) -> list[str]:
        """Of the trained parameters, in the order of the master weights."""
        return list(trained_parameters(self.policy))


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
        run, position = opened
        try:
            for _ in training_steps(run, position, stop):
                pass
        except SystemExit:
            if run.lead is not None and stop.listens and not stop.in_step:
                run.lead.saver.stop()
            raise
        if run.lead is not None and settings.benchmark:
            run.lead.recorder.report_times()


def training_steps(run: Run, position: Position, stop: Stop) -> Iterator[Position]:
    """The training loop. Yields the position after each step. Batches that cannot be trained on are
    skipped.

    Args:
        position: the steps taken so far; its epoch and step are the served policy version
        stop: defers a signal during a step to the step's end
    """
    optimizer, lead = run.optimizer, run.lead
    if lead is not None:
        lead.recorder.started = time.monotonic()
    while position.step < run.settings.steps:
        watch = StepWatch()
        taken = take(run, position)
        watch.fetched()
        with stop.deferred():
            objective = objective_now(run)
            batch, weights_entropy = with_advantages(
                taken.collated, taken.usable, objective, run.reference, run.ranks
            )
            taken = replace(taken, collated=batch)
            try:
                update = update_masters(run, taken, objective, position, watch)
            except NonFiniteStep as error:
                if lead is not None:
                    position = lead.batches.reject(taken, position, error)
                continue
            step = position.step + 1
            if lead is None:
                optimizer.write_into_parameters()
                position = Position(step, 0, 0)
            else:
                published = lead.sync.publish(optimizer, step)
                lead.checks.after_update(optimizer, position.step)
                record(run, position, taken, weights_entropy, update, published, watch)
                position = Position(step, taken.batch_id, published.version.epoch)
            # After the record: a checkpoint must not include a step that no record mentions.
            save(run, position)
        yield position


def take(run: Run, position: Position) -> TakenBatch:
    """Rank 0 waits for a batch of run-api, and sends its micro-batches to the others."""
    lead, ranks = run.lead, run.ranks
    if lead is not None:
        taken = lead.batches.take(position)
        lead.batches.request_next(position)
        ranks.broadcast(BATCH_FOLLOWS)
        broadcast_batch(taken.collated, ranks)
        return taken
    while ranks.broadcast(BATCH_FOLLOWS, "a batch") == CHECKPOINT_FIRST:
        take_part_in_checkpoint(run)
    return TakenBatch(0, [], [], broadcast_batch(None, ranks))


def objective_now(run: Run) -> Objective:
    """The objective with this step's coefficients, which rank 0 controls."""
    values = None if run.lead is None else run.lead.coefficients.values
    kl_coef, tau = run.ranks.broadcast(values) or (0.0, 0.0)
    return replace(run.settings.resolved_objective, kl_coef=kl_coef, maxent_tau=tau)


def update_masters(
    run: Run, taken: TakenBatch, objective: Objective, position: Position, watch: StepWatch
) -> Update:
    """Gradients, checks, step. A failed attempt is repeated once, because the machine may have
    caused it.

    Raises:
        NonFiniteStep: both attempts failed, on all ranks alike; no weight was changed.
        RolloutMismatch: the batch is in quarantine.
    """
    step, lead, batch, fresh, is_repeated = position.step, run.lead, taken.collated, None, False
    groups, held = taken.usable, PolicyVersion(position.epoch, step)
    while True:
        try:
            run.ranks.seed(run.settings.seed, step)
            gradients = run.accumulate(batch, objective, step)
            if lead is not None and fresh is None:  # the checks keep counts: once for each batch
                fresh = lead.checks.before_update(batch, groups, gradients.tokens, held)
            grad_norm = run.optimizer.step(step)
            watch.updated()
            return Update(objective, gradients, fresh, grad_norm)
        except NonFiniteStep as error:
            run.optimizer.gradients.clear()
            if is_repeated:
                raise
            is_repeated = True
            log.warning("step.retried", step=step, reason=str(error))
        except RolloutMismatch as error:
            if lead is not None:
                lead.batches.quarantine.add(taken.batch_id, taken.groups, step, error)
            raise


def record(
    run: Run,
    position: Position,
    taken: TakenBatch,
    weights_entropy: float | None,
    update: Update,
    published: Published,
    watch: StepWatch,
) -> None:
    """Record the step that began at `position`, and let the coefficients follow its results."""
    lead, step, batch, gradients = run.lead, position.step, taken.collated, update.gradients
    assert lead is not None
    assert batch.stats is not None
    outcome = StepOutcome(
        step=step,
        steps=run.settings.steps,
        lr=run.optimizer.learning_rate(step),
        kl_coef=None if run.reference is None else update.objective.kl_coef,
        maxent=None if weights_entropy is None else (update.objective.maxent_tau, weights_entropy),
        dropped=taken.dropped,
        quarantined_batches=lead.batches.quarantine.since_step,
        failed_checks=lead.checks.failed,
        facts=batch.stats,
        origins=batch.origins,
        held=PolicyVersion(position.epoch, step),
        update=update,
        published=published,
        times=watch.times(published.seconds, lead.recorder.started),
        save_s=lead.saver.seconds,
    )
    divergence = gradients.sums.mean("reference_kl") or 0.0
    lead.coefficients.observe(divergence, len(batch.origins), weights_entropy, step)
    lead.batches.quarantine.step_taken()
    epoch, groups = published.version.epoch, taken.usable
    lead.recorder.record(outcome, StepRollouts(step + 1, epoch, groups, batch, gradients.tokens))


def save(run: Run, position: Position) -> None:
    """Save what is due after a step."""
    lead = run.lead
    is_due = run.ranks.broadcast(lead is not None and lead.saver.is_due(position))
    if lead is not None:
        lead.saver.step_taken(position)
    elif is_due:
        take_part_in_checkpoint(run)


def take_part_in_checkpoint(run: Run) -> None:
    """What ranks above 0 do while rank 0 saves: with FSDP2 each has a part of the state."""
    run.optimizer.tensors(run.names)


@contextlib.contextmanager
def open_run(
    settings: TrainerSettings,
    api: BatchQueue,
    weight_sync: Callable[[TrainerSettings], AbstractContextManager[WeightSync]],
    ranks: Ranks = ALONE,
) -> Iterator[tuple[Run, Position] | None]:
    """Load, restore, serve, check. Gives the run and the position to begin at; None if the run is
    complete already.

    Args:
        api: where batches come from
        weight_sync: opens the object that brings weights to the server
        ranks: this process among the trainer's processes
    """
    require_own_functions(settings.resolved_objective)
    torch.manual_seed(settings.seed)
    with contextlib.ExitStack() as stack:
        store, saved, sync, sinks = StateStore(settings.save_path), None, None, None
        if ranks.leads:
            stack.enter_context(hold_save_path(settings.save_path))
            remove_unfinished(store.directory)
            saved = find_state(settings, store)
        steps_taken = ranks.broadcast(None if saved is None else saved.record.step)
        if steps_taken is not None and steps_taken >= settings.steps:
            if saved is not None:
                leave_complete_run(api, settings, saved)
            yield None
            return
        if ranks.leads:
            settings = continued_settings(settings, saved)
            write_whole(settings.save_path / CONFIG_FILE, config_yaml(settings))
            sinks = stack.enter_context(open_sinks(settings, steps_taken or 0))
            sync = stack.enter_context(weight_sync(settings))
        run = load(settings, sync, ranks, is_restoring=steps_taken is not None)
        if sync is None or sinks is None:
            position = start_other_rank(run, steps_taken)
        else:
            run, position = start_rank_0(run, api, sync, store, saved, sinks)
        SelfTest(
            policy=run.policy,
            forward=run.forward,
            reference=run.reference,
            optimizer=run.optimizer,
            settings=run.settings,
            accumulate=run.accumulate,
            ranks=ranks,
        ).require()
        yield run, position


def load(
    settings: TrainerSettings, sync: WeightSync | None, ranks: Ranks, *, is_restoring: bool
) -> Run:
    """The policy and what computes its steps. Args: sync: None on ranks above 0"""
    policy = None
    if sync is not None:
        # Dropout would make the trainer's logprobs differ from the server's at random.
        policy = sync.load_policy(is_restoring).eval()
        warn_of_slow_type(policy)
        settings = settings.model_copy(update={"run_id": sync.server_run_id})
    policy, settings = broadcast_policy(policy, settings, ranks)
    if settings.trained_layers is not None:
        train_only(policy, settings.trained_layers)
    forward = build_forward_pass(policy, settings, differentiates_entropy=settings.entropy_coef > 0)
    reference = build_reference(policy, forward, settings)
    optimizer, accumulate = build_learner(policy, forward, settings, ranks)
    return Run(settings, ranks, policy, forward, reference, optimizer, accumulate, None)


def start_other_rank(run: Run, steps_taken: int | None) -> Position:
    """What ranks above 0 do during `start_rank_0`. Args: steps_taken: of the checkpoint"""
    if steps_taken is not None:
        run.optimizer.load_tensors(run.names, {})
    run.optimizer.write_into_parameters()
    if run.ranks.broadcast(False):  # whether rank 0 saves a checkpoint at the start
        take_part_in_checkpoint(run)
    return Position(steps_taken or 0, 0, 0)


def start_rank_0(
    run: Run,
    api: BatchQueue,
    sync: WeightSync,
    store: StateStore,
    saved: SavedState | None,
    sinks: Sinks,
) -> tuple[Run, Position]:
    """Restore the checkpoint, publish the first weights, and build what rank 0 alone has."""
    settings, policy, optimizer, ranks = run.settings, run.policy, run.optimizer, run.ranks
    coefficients = settings.coefficients
    if saved is None:
        api.register(settings.registration(first_step=0))
        position = Position(step=0, batch_id=0, epoch=0)
    else:
        coefficients.resume(saved.record.kl_coef, saved.record.maxent)
        position = restore(saved, policy, optimizer, api, settings)
    begin_records(settings, None if saved is None else saved.record.step)
    bound = Bound(
        tolerance_of(policy),
        noise=None if saved is None else saved.record.noise,
        learns=saved is None and (settings.sync.uses_files or settings.verify_every_steps > 0),
    )
    served = sync.start(optimizer, position.step, position.epoch, bound)
    position = replace(position, epoch=served.epoch)
    saver = Saver(settings, policy, optimizer, api, store, bound, coefficients, ranks)
    # A checkpoint that the user named may belong to another directory or run: leave it as it is.
    own = saved if settings.resume == AUTO else None
    ranks.broadcast(own is None)
    saver.begin(position, own is not None, own.record.checkpoints if own else ())
    log.info("objective.chosen", name=settings.objective, **asdict(settings.resolved_objective))
    limits = limits_of(policy, settings.seq_len, settings.recompute_logprobs)
    leading = Lead(
        sync=sync,
        batches=BatchSource(
            settings,
            api,
            skipped=saver.batch_skipped,
            release_batches=saver.release_batches,
            recover_server=sync.recover_server,
            limits=limits,
            history=VersionHistory(served, sync.begun_as),
            cut=run.forward.layout.cut,
        ),
        checks=DataChecks(policy, run.forward, run.reference, sync.served_logprobs, bound.value),
        recorder=Recorder(settings, sinks),
        saver=saver,
        coefficients=coefficients,
    )
    return replace(run, lead=leading), position
