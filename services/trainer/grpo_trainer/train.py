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
from grpo_core.security.bearer_token import plain
from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.advantages import with_advantages
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
from grpo_trainer.data.collate import Batch, broadcast_batch
from grpo_trainer.data.filter import VersionHistory
from grpo_trainer.errors import NonFiniteStep, RolloutMismatch
from grpo_trainer.gradients import Accumulate, GradientStats, build_learner
from grpo_trainer.model.adapter import trained_parameters
from grpo_trainer.model.forward import FastForward, build_forward_pass
from grpo_trainer.model.loading import broadcast_policy, warn_of_slow_type
from grpo_trainer.model.logprobs import tolerance_of
from grpo_trainer.model.policy import CausalLM, limits_of, train_only
from grpo_trainer.model.reference import Reference, build_reference
from grpo_trainer.objectives import Objective
from grpo_trainer.optim.master_optimizer import MasterOptimizer
from grpo_trainer.ranks.group import ALONE, Ranks
from grpo_trainer.stop import Stop
from grpo_trainer.telemetry.metrics import StepOutcome, StepWatch
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
    lead, ranks, reference = run.lead, run.ranks, run.reference
    if lead is not None:
        lead.recorder.started = time.monotonic()
    while position.step < run.settings.steps:
        watch = StepWatch()
        taken = take(run, position)
        watch.fetched()
        with stop.deferred():
            objective = objective_now(run)
            batch = taken.batch if reference is None else reference.added(taken.batch, ranks)
            batch = with_advantages(batch, taken.usable, objective, ranks)
            taken = replace(taken, batch=batch)
            try:
                gradients = gradients_of(run, batch, objective, position.step)
            except NonFiniteStep as error:
                if lead is not None:
                    position = lead.batches.reject(taken, position, error)
                continue
            fresh = check(run, taken, gradients, position)
            run.optimizer.step(position.step)
            watch.updated()
            published = publish(run, position)
            record(run, position, taken, objective, gradients, fresh, published, watch)
            # After the record: a checkpoint must not include a step that no record mentions.
            position = Position(position.step + 1, taken.batch_id, published.version.epoch)
            save(run, position)
        yield position


def take(run: Run, position: Position) -> TakenBatch:
    """Rank 0 waits for a batch of run-api, and sends its micro-batches to the others."""
    lead, ranks = run.lead, run.ranks
    if lead is not None:
        taken = lead.batches.take(position)
        lead.batches.request_next(position)
        ranks.broadcast(BATCH_FOLLOWS)
        broadcast_batch(taken.batch, ranks)
        return taken
    while ranks.broadcast(BATCH_FOLLOWS, "a batch") == CHECKPOINT_FIRST:
        take_part_in_checkpoint(run)
    return TakenBatch(0, [], [], broadcast_batch(None, ranks))


def objective_now(run: Run) -> Objective:
    """The objective with this step's coefficients, which rank 0 controls."""
    values = None if run.lead is None else run.lead.coefficients.values
    kl_coef, tau = run.ranks.broadcast(values) or (0.0, 0.0)
    return replace(run.settings.resolved_objective, kl_coef=kl_coef, maxent_tau=tau)


def gradients_of(run: Run, batch: Batch, objective: Objective, step: int) -> GradientStats:
    """A failed attempt is repeated once, because the machine may have caused it.

    Raises:
        NonFiniteStep: both attempts failed, on all ranks alike.
    """
    for is_repeated in (False, True):
        try:
            run.ranks.seed(run.settings.seed, step)
            return run.accumulate(batch, objective, step)
        except NonFiniteStep as error:
            run.optimizer.gradients.clear()
            if is_repeated:
                raise
            log.warning("step.retried", step=step, reason=str(error))
    raise AssertionError


def check(
    run: Run, taken: TakenBatch, gradients: GradientStats, position: Position
) -> Distance | None:
    """Rank 0 compares the behaviour logprobs with the trainer's. Returns the distance of fresh
    tokens.

    Raises:
        RolloutMismatch: the batch is in quarantine.
    """
    lead, trained = run.lead, PolicyVersion(position.epoch, position.step)
    if lead is None:
        return None
    try:
        return lead.checks.before_update(taken.batch, taken.usable, gradients.tokens, trained)
    except RolloutMismatch as error:
        lead.batches.quarantine.add(taken.batch_id, taken.groups, position.step, error)
        raise


def publish(run: Run, position: Position) -> Published:
    """Write the new master weights into the policy, and on rank 0 bring them to the server."""
    lead, step = run.lead, position.step
    if lead is None:
        run.optimizer.write_into_parameters()
        return Published(PolicyVersion(position.epoch, step + 1), seconds=0.0)
    published = lead.sync.publish(run.optimizer, step + 1)
    lead.checks.after_update(run.optimizer, step)
    return published


def record(
    run: Run,
    position: Position,
    taken: TakenBatch,
    objective: Objective,
    gradients: GradientStats,
    fresh: Distance | None,
    published: Published,
    watch: StepWatch,
) -> None:
    """Rank 0 records the step that began at `position`, and lets the coefficients follow its
    results."""
    lead, batch, step = run.lead, taken.batch, position.step
    if lead is None or fresh is None:
        return
    outcome = StepOutcome(
        step=step,
        steps=run.settings.steps,
        lr=run.optimizer.learning_rate(step),
        objective=objective,
        taken=taken,
        quarantined_batches=lead.batches.quarantine.since_step,
        failed_checks=lead.checks.failed,
        trained=PolicyVersion(position.epoch, step),
        gradients=gradients,
        fresh=fresh,
        published=published,
        times=watch.times(published.seconds, lead.recorder.started),
        save_s=lead.saver.seconds,
    )
    divergence = gradients.sums.mean("reference_kl") or 0.0
    lead.coefficients.observe(divergence, len(batch.origins), batch.weights_entropy, step)
    lead.batches.quarantine.step_taken()
    lead.recorder.record(outcome)


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
        tested = run.policy, run.forward, run.reference, run.optimizer
        SelfTest(*tested, run.settings, run.accumulate, ranks).require()
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
