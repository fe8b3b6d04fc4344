"""The training loop: batch → advantages → loss → update → publication."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import structlog
import torch

from grpo_core.clients.run_api import TrainerClient
from grpo_core.security.bearer_token import plain
from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.algo.accumulate import GradientStats
from grpo_trainer.algo.logprob_comparison import Distance
from grpo_trainer.checkpoint.atomic_dir import hold_save_path, remove_unfinished, write_whole
from grpo_trainer.checkpoint.resume import continued_settings, find_state, rejoin
from grpo_trainer.checkpoint.state import Position
from grpo_trainer.checkpoint.store import StateStore
from grpo_trainer.config.cli import CONFIG_FILE, config_yaml
from grpo_trainer.config.trainer import TrainerSettings
from grpo_trainer.data.batch_queue import BatchQueue
from grpo_trainer.data.batch_source import TakenBatch
from grpo_trainer.data.collate import Batch, with_penalties
from grpo_trainer.data.completion_weights import with_completion_weights
from grpo_trainer.data.group_checks import UsableGroup
from grpo_trainer.errors import NonFiniteStep, RolloutMismatch, StateOfAnotherRun
from grpo_trainer.model.reference import divergences, log_likelihoods
from grpo_trainer.objective.recipes import Objective
from grpo_trainer.ranks.lead import ALONE, Alone
from grpo_trainer.start import Run, start_run
from grpo_trainer.stop import Stop
from grpo_trainer.telemetry.metrics import StepOutcome, StepWatch
from grpo_trainer.telemetry.rollouts import StepRollouts
from grpo_trainer.telemetry.sinks import open_sinks
from grpo_trainer.weight_sync.base import Published, WeightSync
from grpo_trainer.weight_sync.build import build_weight_sync
from grpo_trainer.weight_sync.files.server_process import inference_server

log = structlog.get_logger()


@dataclass(frozen=True)
class Update:
    """`fresh`: the logprob difference over fresh tokens."""

    gradients: GradientStats
    fresh: Distance
    published: Published


def train(settings: TrainerSettings, team: Alone = ALONE, stop: Stop | None = None) -> None:
    """Train up to step `settings.steps`, from a checkpoint if there is one, and save the
    final model. A stop between two steps saves a checkpoint.

    Args:
        team: the other trainer processes, if there are some
        stop: listens to signals

    Raises:
        GrpoError: any of the named errors. The server keeps serving in every case.
        SystemExit: a stop signal arrived.
    """
    stop = stop or Stop()
    with (
        _run_api_client(settings) as api,
        open_run(settings, api, open_weight_sync, team) as opened,
    ):
        if opened is None:
            return
        run, position = opened
        try:
            while position.step < run.settings.steps:
                position = run_step(run, position, stop)
                # After the record: a checkpoint must not include a step that no record mentions.
                run.saver.step_taken(position)
                stop.in_step = False
                stop.raise_if_asked()
        except SystemExit:
            if stop.listens and not stop.in_step:
                run.saver.stop()
            raise
        if run.settings.benchmark:
            run.recorder.report_times()


@contextlib.contextmanager
def open_run(
    settings: TrainerSettings,
    api: BatchQueue,
    weight_sync: Callable[[TrainerSettings], AbstractContextManager[WeightSync]],
    team: Alone = ALONE,
) -> Iterator[tuple[Run, Position] | None]:
    """A run whose first weights are served, and the position to begin at; None if the run is
    complete already.

    Args:
        api: where batches come from
        weight_sync: opens the object that brings weights to the server
        team: the other trainer processes, if there are some
    """
    torch.manual_seed(settings.seed)
    with hold_save_path(settings.save_path):
        store = StateStore(settings.save_path)
        remove_unfinished(store.directory)
        saved = find_state(settings, store)
        if saved is not None and saved.record.step >= settings.steps:
            # If run-api has another run, nothing needs to be acknowledged.
            with contextlib.suppress(StateOfAnotherRun):
                rejoin(api, settings, saved)
            log.warning(
                "run.already_complete",
                reason=f"nothing was trained, because all {saved.record.step} steps are done",
                checkpoint=str(saved.directory),
                hint="raise --steps to continue, or start again with another --save-path",
            )
            yield None
            return
        settings = continued_settings(settings, saved)
        write_whole(settings.save_path / CONFIG_FILE, config_yaml(settings))
        with (
            open_sinks(settings, 0 if saved is None else saved.record.step) as sinks,
            weight_sync(settings) as sync,
        ):
            yield start_run(settings, api, sync, store, saved, sinks, team)


@contextlib.contextmanager
def open_weight_sync(settings: TrainerSettings) -> Iterator[WeightSync]:
    """That of the mode, with its inference server, which is started if the mode may do so."""
    with (
        inference_server(settings),
        contextlib.closing(build_weight_sync(settings)) as sync,
    ):
        yield sync


def run_step(run: Run, position: Position, stop: Stop) -> Position:
    """Take one optimizer step and record it. Batches that cannot be trained on are skipped.

    Args:
        position: the steps taken so far; its epoch and step are the served policy version
        stop: is told when the wait for a batch has ended
    Returns:
        The position after the step.
    """
    settings, step, watch = run.settings, position.step, StepWatch()
    stop.in_step = False
    stop.raise_if_asked()  # during a step that was given up
    taken = run.batches.take(position)
    stop.in_step = True
    watch.fetched()
    run.batches.request_next(position)
    objective = replace(
        settings.resolved_objective, kl_coef=run.kl_coefficient.value, maxent_tau=run.tau.value
    )
    batch, weights_entropy = compare_with_reference(run, taken, objective)
    try:
        update = update_policy(run, batch, taken.filtered.groups, objective, position, watch)
    except NonFiniteStep as error:
        return run_step(run, run.batches.reject(taken, position, error), stop)
    except RolloutMismatch as error:
        run.batches.quarantine.add(taken.batch_id, taken.groups, step, error)
        raise
    check, published = run.shared_memory, update.published
    run.checks.after_update(run.optimizer, step)
    outcome = StepOutcome(
        step=step,
        steps=settings.steps,
        lr=run.optimizer.learning_rate(step),
        kl_coef=None if run.reference is None else objective.kl_coef,
        maxent=None if weights_entropy is None else (objective.maxent_tau, weights_entropy),
        filtered=taken.filtered,
        quarantined_batches=run.batches.quarantine.since_step,
        failed_checks=run.checks.failed,
        facts=batch.stats,
        origins=batch.origins,
        held=PolicyVersion(position.epoch, step),
        gradients=update.gradients,
        fresh=update.fresh,
        published=published,
        alignment=published.alignment if check is None else check.after_step(step),
        times=watch.times(published, run.recorder.started),
        save_s=run.saver.seconds,
    )
    if run.reference is not None:
        divergence = update.gradients.sums.mean("reference_kl") or 0.0
        run.kl_coefficient.observe(divergence, len(batch.origins))
    if weights_entropy is not None:
        run.tau.observe(weights_entropy, step)
    run.batches.quarantine.step_taken()
    rollouts = StepRollouts(
        step + 1,
        published.version.epoch,
        taken.filtered.groups,
        batch,
        update.gradients.tokens,
    )
    run.recorder.record(outcome, rollouts)
    return Position(step + 1, taken.batch_id, published.version.epoch)


def compare_with_reference(
    run: Run, taken: TakenBatch, objective: Objective
) -> tuple[Batch, float | None]:
    """The batch with what a KL penalty needs, and with the weights of MaxEnt-GRPO; the mean entropy
    of these weights in nats, None if there are none."""
    batch, groups = taken.collated, taken.filtered.groups
    if run.reference is not None:
        batch = run.reference.added(batch)
    if objective.advantage == "maxent":
        is_prior = run.reference is not None and objective.kl_in == "weights"
        prior = log_likelihoods(batch) if is_prior else None
        return with_completion_weights(batch, groups, objective, prior)
    if run.reference is not None and objective.kl_in == "reward":
        penalties = objective.kl_coef * divergences(batch, objective.kl_estimator)
        batch = with_penalties(batch, groups, objective, penalties)
    return batch, None


def update_policy(
    run: Run,
    batch: Batch,
    groups: Sequence[UsableGroup],
    objective: Objective,
    position: Position,
    watch: StepWatch,
) -> Update:
    """Compute gradients, check the rollouts and update the weights. A failed attempt is repeated
    once, because the machine may have caused it.

    Raises:
        NonFiniteStep: both attempts failed; no weight was changed.
    """
    step, optimizer = position.step, run.optimizer
    held = PolicyVersion(position.epoch, step)
    fresh, is_repeated = None, False
    while True:
        try:
            gradients = run.accumulate(batch, objective, step)
            if fresh is None:  # the check keeps counts: run it once for each batch
                fresh = run.checks.before_update(batch, groups, gradients.tokens, held)
            watch.computed()
            return Update(gradients, fresh, run.sync.apply(optimizer, step))
        except NonFiniteStep as error:
            optimizer.gradients.clear()
            if is_repeated:
                raise
            is_repeated = True
            log.warning("step.retried", step=step, reason=str(error))


def _run_api_client(settings: TrainerSettings) -> TrainerClient:
    token = plain(settings.run_api_token)
    return TrainerClient(settings.run_api_url, settings.service_deadline_s, token)
