"""The training loop: batch → advantages → loss → update → served weights."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import structlog
import torch

from grpo_core.inference_client import BridgeClient
from grpo_core.run_api_client import TrainerClient
from grpo_core.wire import PolicyVersion
from grpo_trainer.alignment import (
    Alignment,
    AlignmentProbe,
    dtype_of,
    require_alignment,
    require_written,
    tolerance_of,
)
from grpo_trainer.batch import CollationLimits, collate
from grpo_trainer.checkpoint import prepare_save_path, save_final_model
from grpo_trainer.gradients import accumulate_gradients
from grpo_trainer.healthy_ranges import RangeWatch
from grpo_trainer.intake import Doorkeeper
from grpo_trainer.metrics import StepOutcome, StepWatch, step_record
from grpo_trainer.optimizer import MasterOptimizer
from grpo_trainer.rollout_check import RolloutCheck
from grpo_trainer.settings import TrainerSettings
from grpo_trainer.sinks import Write, open_sinks
from grpo_trainer.weight_sync.attachment import WeightPlaces
from grpo_trainer.weight_sync.base import WeightSync
from grpo_trainer.weight_sync.shared_vllm import SharedVllm

log = structlog.get_logger()


@dataclass(frozen=True)
class Run:
    """What every step of a run works with. `started`: time.monotonic() of the first step."""

    settings: TrainerSettings
    api: TrainerClient
    sync: WeightSync
    policy: Any
    optimizer: MasterOptimizer
    probe: AlignmentProbe
    door: Doorkeeper
    rollouts: RolloutCheck
    ranges: RangeWatch
    write_record: Write
    started: float


def train(settings: TrainerSettings) -> None:
    """Run `settings.training_steps` steps and save the final model.

    Raises:
        GrpoError: any of the named errors; the server is left serving in every case.
    """
    torch.manual_seed(settings.seed)
    with open_sinks(settings) as write_record, _clients(settings) as (api, sync):
        policy = sync.load_policy()
        # Dropout would make the trainer's log-probabilities differ from the server's at random.
        policy.eval()
        prepare_save_path(settings.save_path)
        optimizer = build_optimizer(policy, settings)
        api.register(settings.registration(first_step=0))
        version = sync.start(optimizer, step=0)
        run = Run(
            settings=settings,
            api=api,
            sync=sync,
            policy=policy,
            optimizer=optimizer,
            probe=AlignmentProbe(policy),
            door=Doorkeeper(policy.config.vocab_size),
            rollouts=RolloutCheck(policy, sync.served_logprobs, tolerance_of(dtype_of(policy))),
            ranges=RangeWatch(),
            write_record=write_record,
            started=time.monotonic(),
        )
        for step in range(settings.training_steps):
            version = run_step(run, step, version)
        save_final_model(policy, settings.model_name, settings.save_path)


def run_step(run: Run, step: int, version: PolicyVersion) -> PolicyVersion:
    """One optimizer step, counted from 0, and its record.

    Args:
        version: of the weights served so far.
    Returns:
        That of the weights served from now on.
    """
    settings, watch = run.settings, StepWatch()
    groups = run.api.next_batch(settings.batch_deadline_s, meanwhile=run.sync.tend)
    watch.fetched()
    intake = run.door.admit(groups, step)
    batch = collate(intake.groups, CollationLimits(settings.seq_len, settings.batch_size))
    gradients = accumulate_gradients(run.policy, batch, settings.clip_eps, step)
    held = PolicyVersion(version.epoch, step)
    fresh = run.rollouts.require_match(batch, gradients.tokens, held, step)
    watch.computed()
    published = run.sync.apply(run.optimizer, step)
    alignment = verify(run, step)
    outcome = StepOutcome(
        step=step,
        steps=settings.training_steps,
        lr=run.optimizer.learning_rate(step),
        intake=intake,
        facts=batch.facts,
        gradients=gradients,
        fresh=fresh,
        published=published,
        alignment=alignment,
        times=watch.times(published, run.started),
    )
    report(run, outcome)
    return published.version


def report(run: Run, outcome: StepOutcome) -> None:
    """To the log, to every sink, and as warnings where a value is not healthy."""
    record = step_record(outcome)
    log.info("step", **record)
    run.write_record(record)
    run.ranges.look(record)


def verify(run: Run, step: int) -> Alignment | None:
    """After the first update and every N-th: does the server serve these weights?"""
    every = run.settings.verify_every_steps
    if every == 0 or (step != 0 and (step + 1) % every != 0):
        return None
    require_written(run.optimizer, step)
    alignment = run.probe.measure(run.sync.served_logprobs)
    require_alignment(alignment, dtype_of(run.policy), step)
    return alignment


def build_optimizer(policy: Any, settings: TrainerSettings) -> MasterOptimizer:
    return MasterOptimizer(
        policy.parameters(),
        lr=settings.lr,
        warmup_steps=settings.warmup_steps,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
    )


def build_weight_sync(settings: TrainerSettings) -> WeightSync:
    """The object that stands for the mode."""
    return SharedVllm(
        bridge=BridgeClient(
            settings.inference_url, settings.service_deadline_s, settings.vllm_control_url
        ),
        model_name=settings.model_name,
        places=WeightPlaces(settings.weights_socket, settings.vllm_config_path),
        dtype=settings.dtype,
        lease_s=settings.pause_lease_s,
        return_deadline_s=settings.server_return_deadline_s,
    )


@contextlib.contextmanager
def _clients(settings: TrainerSettings) -> Iterator[tuple[TrainerClient, WeightSync]]:
    with TrainerClient(settings.atropos_url, settings.service_deadline_s) as api:
        sync = build_weight_sync(settings)
        try:
            yield api, sync
        finally:
            sync.close()
