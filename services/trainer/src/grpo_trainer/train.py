"""The training loop: batch → advantages → loss → update → served weights."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import structlog
import torch

from grpo_core.clients.run_api import TrainerClient
from grpo_core.security.bearer_token import plain
from grpo_core.wire import PolicyVersion
from grpo_trainer.algo.accumulate import GradientStats, accumulate_gradients
from grpo_trainer.checkpoint.atomic_dir import hold_save_path
from grpo_trainer.checkpoint.resume import find_state, rejoin, restore
from grpo_trainer.checkpoint.saver import Saver
from grpo_trainer.checkpoint.state import Position
from grpo_trainer.checkpoint.store import SavedState, StateStore
from grpo_trainer.config.packages import require_packages
from grpo_trainer.config.trainer import AUTO, TrainerSettings
from grpo_trainer.data.batch_source import next_batch, take_batch
from grpo_trainer.data.collate import Batch, CollationLimits, collate
from grpo_trainer.data.environment_watch import EnvironmentWatch
from grpo_trainer.data.group_checks import GroupLimits
from grpo_trainer.data.group_filter import Doorkeeper
from grpo_trainer.data.quarantine import Quarantine
from grpo_trainer.data.staleness import Lineage
from grpo_trainer.errors import NonFiniteStep, RolloutMismatch
from grpo_trainer.model.adapter import trained_parameters
from grpo_trainer.model.forward import ForwardPass, build_forward_pass
from grpo_trainer.optim.optimizer import MasterOptimizer
from grpo_trainer.optim.updates.build import build_update
from grpo_trainer.telemetry.alerts import RangeWatch
from grpo_trainer.telemetry.metrics import StepOutcome, StepWatch, step_record
from grpo_trainer.telemetry.sinks import Write, open_sinks, rotate_records, trim_records
from grpo_trainer.telemetry.timing import Stopwatch, server_status
from grpo_trainer.verify.alignment import (
    Alignment,
    AlignmentProbe,
    Bound,
    mention_little_power,
    require_written,
    tolerance_of,
)
from grpo_trainer.verify.rollout import RolloutCheck
from grpo_trainer.verify.token_table import Distance
from grpo_trainer.weight_sync.base import Published, WeightSync
from grpo_trainer.weight_sync.build import build_weight_sync
from grpo_trainer.weight_sync.files.server_process import inference_server

__all__ = ["Run", "begin", "build_weight_sync", "next_batch", "run_step", "train"]

log = structlog.get_logger()


@dataclass(frozen=True)
class Run:
    """What every step of a run works with. `started`: time.monotonic() of this process's first."""

    settings: TrainerSettings
    api: TrainerClient
    sync: WeightSync
    policy: Any
    forward: ForwardPass
    optimizer: MasterOptimizer
    probe: AlignmentProbe | None
    door: Doorkeeper
    rollouts: RolloutCheck
    ranges: RangeWatch
    saver: Saver
    environments: EnvironmentWatch
    quarantine: Quarantine
    write_record: Write
    stopwatch: Stopwatch
    started: float


def train(settings: TrainerSettings) -> None:
    """Run up to `settings.training_steps` steps, from a saved state where there is one, and save
    the final model.

    Raises:
        GrpoError: any of the named errors; the server is left serving in every case.
    """
    torch.manual_seed(settings.seed)
    require_packages(settings)
    with hold_save_path(settings.save_path), _run_api(settings) as api:
        store = StateStore(settings.save_path)
        store.remove_unfinished()
        saved = find_state(settings, store)
        if saved is not None and saved.record.step >= settings.training_steps:
            rejoin(api, settings, saved)
            log.info(
                "all steps were taken before",
                steps=saved.record.step,
                state=str(saved.directory),
                more="--training-steps",
                anew="--resume never, or another --save-path",
            )
            return
        settings = _in_group_of(saved, settings)
        with (
            open_sinks(settings) as write_record,
            inference_server(settings),
            _weight_sync(settings) as sync,
        ):
            run, position = begin(settings, api, sync, store, saved, write_record)
            while position.step < settings.training_steps:
                position = run_step(run, position)
                # After the record: a state must not hold a step that nobody knows of.
                run.saver.step_taken(position)
            if settings.benchmark:
                report_times(run)


def _in_group_of(saved: SavedState | None, settings: TrainerSettings) -> TrainerSettings:
    """The W&B runs of all starts are in one group, unless the user names another."""
    if saved is None or not saved.record.wandb_group or "wandb_group" in settings.model_fields_set:
        return settings
    return settings.model_copy(update={"wandb_group": saved.record.wandb_group})


def begin(
    settings: TrainerSettings,
    api: TrainerClient,
    sync: WeightSync,
    store: StateStore,
    saved: SavedState | None,
    write_record: Write,
) -> tuple[Run, Position]:
    """Load the policy, go on from the state where there is one, and serve what is trained from."""
    policy = sync.load_policy(restoring=saved is not None)
    # Dropout would make the trainer's log-probabilities differ from the server's at random.
    policy.eval()
    forward = build_forward_pass(policy, settings)
    optimizer = build_optimizer(policy, settings)
    at = Position(step=0, batch_id=0, epoch=0)
    if saved is None:
        api.register(settings.registration(first_step=0))
    else:
        at = restore(saved, policy, optimizer, api, settings)
    _leave_own_records(settings.metrics_file, saved)
    bound = _bound(settings, policy, saved)
    version = sync.start(optimizer, at.step, at.epoch, bound)
    lineage = Lineage(version, sync.begun_as)
    position = replace(at, epoch=version.epoch)
    probe = _probe(settings, policy, sync, bound)
    saver = Saver(settings, policy, optimizer, api, store, bound)
    # A state that the user named may lie elsewhere, and may be gone on from in another run.
    own = saved if settings.resume == AUTO else None
    saver.begin(position, own is not None, own.record.checkpoints if own else ())
    limits = GroupLimits(policy.config.vocab_size, settings.seq_len)
    run = Run(
        settings=settings,
        api=api,
        sync=sync,
        policy=policy,
        forward=forward,
        optimizer=optimizer,
        probe=probe,
        door=Doorkeeper(limits, lineage, settings.max_staleness),
        rollouts=RolloutCheck(policy, sync.served_logprobs, bound.value),
        ranges=RangeWatch(),
        saver=saver,
        environments=EnvironmentWatch(settings.environment_return_deadline_s),
        quarantine=Quarantine(settings.save_path, api.run_uuid),
        write_record=write_record,
        stopwatch=Stopwatch(),
        started=time.monotonic(),
    )
    return run, position


def _leave_own_records(path: Path | None, saved: SavedState | None) -> None:
    if path is None:
        return
    if saved is None:
        rotate_records(path)
    else:
        trim_records(path, saved.record.step)


def run_step(run: Run, position: Position) -> Position:
    """One optimizer step and its record. A batch on which none can be taken is passed over.

    Args:
        position: steps taken so far; its epoch and step name the weights that are served.
    Returns:
        That after the step.
    """
    settings, step, watch = run.settings, position.step, StepWatch()
    taken = take_batch(run, position)
    watch.fetched()
    intake = taken.intake
    batch = collate(intake.groups, CollationLimits(settings.seq_len, settings.batch_size))
    try:
        taken_step = take_step(run, batch, position, watch)
    except NonFiniteStep as error:
        run.quarantine.keep(taken.batch_id, taken.groups, step, error)
        beyond = replace(position, batch_id=taken.batch_id)
        run.saver.batch_passed_over(beyond)
        return run_step(run, beyond)
    except RolloutMismatch as error:
        run.quarantine.keep(taken.batch_id, taken.groups, step, error)
        raise
    published = taken_step.published
    alignment = verify(run, step, published)
    outcome = StepOutcome(
        step=step,
        steps=settings.training_steps,
        lr=run.optimizer.learning_rate(step),
        intake=intake,
        quarantined_batches=run.quarantine.since_step,
        facts=batch.facts,
        gradients=taken_step.gradients,
        fresh=taken_step.fresh,
        published=published,
        alignment=alignment,
        times=watch.times(published, run.started),
        save_s=run.saver.seconds,
    )
    run.quarantine.step_taken()
    report(run, outcome)
    return Position(step + 1, taken.batch_id, published.version.epoch)


@dataclass(frozen=True)
class TakenStep:
    """`fresh`: of the tokens that the trainer's own weights sampled."""

    gradients: GradientStats
    fresh: Distance
    published: Published


def take_step(run: Run, batch: Batch, position: Position, watch: StepWatch) -> TakenStep:
    """Gradients, the check of the rollouts, the update. What fails is tried once more: the machine
    may have been to blame.

    Raises:
        NonFiniteStep: twice; no weight was changed.
    """
    step, fresh = position.step, None
    held, clip_eps = PolicyVersion(position.epoch, step), run.settings.clip_eps
    for is_last in (False, True):
        try:
            gradients = accumulate_gradients(
                run.policy, batch, clip_eps, step, run.forward, run.optimizer.loss_scale
            )
            if fresh is None:  # the check remembers what it has seen
                fresh = run.rollouts.require_match(batch, gradients.tokens, held, step)
            watch.computed()
            return TakenStep(gradients, fresh, run.sync.apply(run.optimizer, step))
        except NonFiniteStep as error:
            run.optimizer.gradients.clear()
            if is_last:
                raise
            log.warning("step.repeated", step=step, reason=str(error))
    raise AssertionError("unreachable")


def report(run: Run, outcome: StepOutcome) -> None:
    """To the log, to every sink, and as warnings where a value is not healthy."""
    record = step_record(outcome)
    log.info("step", **record)
    run.write_record(record)
    run.ranges.look(record)
    run.stopwatch.add(record, outcome.published.is_served)


def report_times(run: Run) -> None:
    """To standard output, and to benchmark.json."""
    settings = run.settings
    summary = run.stopwatch.summary(settings.sync.mode, server_status(settings))
    summary.write(settings.save_path)
    sys.stdout.write(f"\n{summary}")


def verify(run: Run, step: int, published: Published) -> Alignment | None:
    """Where both sides read one memory: does the server serve these weights? After the first update
    and every N-th. The other modes have proven every publication by now."""
    if run.probe is None:
        return published.alignment
    if step != 0 and (step + 1) % run.settings.verify_every_steps != 0:
        return None
    require_written(run.optimizer, step)
    alignment = run.probe.require(run.sync.served_logprobs, f"After step {step}")
    mention_little_power(alignment)
    return alignment


def _bound(settings: TrainerSettings, policy: Any, saved: SavedState | None) -> Bound:
    """The noise is learnt while nothing was trained yet; a run that goes on knows it."""
    is_checked = settings.sync.hands_off or settings.verify_every_steps > 0
    noise = None if saved is None else saved.record.noise
    return Bound(tolerance_of(policy), noise, learns=saved is None and is_checked)


def _probe(
    settings: TrainerSettings, policy: Any, sync: WeightSync, bound: Bound
) -> AlignmentProbe | None:
    """Where there are publications that nobody else proves. What is served now is asked for first:
    both sides read one memory."""
    if settings.verify_every_steps == 0:
        return None
    probe = AlignmentProbe(policy, bound)
    probe.require(sync.served_logprobs, "Before the first step")
    return probe


def build_optimizer(policy: Any, settings: TrainerSettings) -> MasterOptimizer:
    """Raises `UnusableOptimizer` where the options do not go with the policy's weights."""
    parameters = list(trained_parameters(policy).values())
    return MasterOptimizer(
        parameters,
        lr=settings.lr,
        warmup_steps=settings.warmup_steps,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        update=build_update(settings, parameters),
        # An adapter is in float32, and its gradients come through a model that is not.
        scales_loss=any(p.dtype == torch.float16 for p in policy.parameters()),
    )


def _run_api(settings: TrainerSettings) -> TrainerClient:
    token = plain(settings.run_api_token)
    return TrainerClient(settings.atropos_url, settings.service_deadline_s, token)


@contextlib.contextmanager
def _weight_sync(settings: TrainerSettings) -> Iterator[WeightSync]:
    sync = build_weight_sync(settings)
    try:
        yield sync
    finally:
        sync.close()
