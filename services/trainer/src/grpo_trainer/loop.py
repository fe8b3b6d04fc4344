"""The training loop: batch → advantages → loss → update → served weights."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import structlog
import torch

from grpo_core.inference_client import BridgeClient
from grpo_core.run_api_client import TrainerClient
from grpo_trainer.alignment import Alignment, AlignmentProbe, require_alignment
from grpo_trainer.batch import Batch, CollationLimits, collate
from grpo_trainer.checkpoint import prepare_save_path, save_final_model
from grpo_trainer.errors import NonFiniteLoss
from grpo_trainer.loss import NO_SUMS, LossSums, grpo_loss
from grpo_trainer.metrics import StepTimes, append_record, step_record
from grpo_trainer.optimizer import MasterOptimizer
from grpo_trainer.policy import token_logprobs
from grpo_trainer.settings import TrainerSettings
from grpo_trainer.weight_sync.base import WeightSync
from grpo_trainer.weight_sync.shared_vllm import SharedVllm

log = structlog.get_logger()


@dataclass(frozen=True)
class GradientStats:
    loss: float
    sums: LossSums


@dataclass(frozen=True)
class Run:
    """What every step of a run works with. `started`: time.monotonic() of the first step."""

    settings: TrainerSettings
    api: TrainerClient
    sync: WeightSync
    policy: Any
    optimizer: MasterOptimizer
    probe: AlignmentProbe
    started: float


def train(settings: TrainerSettings) -> None:
    """Run `settings.training_steps` steps and save the final model.

    Raises:
        GrpoError: any of the named errors; the server is left serving in every case.
    """
    torch.manual_seed(settings.seed)
    with _clients(settings) as (api, sync):
        policy = sync.load_policy()
        # Dropout would make the trainer's log-probabilities differ from the server's at random.
        policy.eval()
        prepare_save_path(settings.save_path)
        optimizer = build_optimizer(policy, settings)
        api.register(settings.registration(first_step=0))
        sync.start(optimizer, step=0)
        run = Run(settings, api, sync, policy, optimizer, AlignmentProbe(policy), time.monotonic())
        for step in range(settings.training_steps):
            run_step(run, step)
        save_final_model(policy, settings.model_name, settings.save_path)


def run_step(run: Run, step: int) -> None:
    """One optimizer step, counted from 0, and its record."""
    settings, policy = run.settings, run.policy
    begin = time.monotonic()
    groups = run.api.next_batch(settings.batch_deadline_s)
    received = time.monotonic()
    limits = CollationLimits(settings.seq_len, settings.batch_size, policy.config.vocab_size)
    batch = collate(groups, limits)
    gradients = accumulate_gradients(policy, batch, settings.clip_eps, step)
    accumulated = time.monotonic()
    published = run.sync.apply(run.optimizer, step)
    alignment = verify(run, step)
    end = time.monotonic()
    times = StepTimes(
        wait_s=received - begin,
        train_s=accumulated - received + published.optimizer_s,
        publish_s=published.publish_s,
        step_s=end - begin,
    )
    record = step_record(
        step=step,
        steps=settings.training_steps,
        time_s=end - run.started,
        loss=gradients.loss,
        lr=run.optimizer.learning_rate(step),
        sums=gradients.sums,
        facts=batch.facts,
        published=published,
        times=times,
        alignment=alignment,
    )
    log.info("step", **record)
    if settings.metrics_file is not None:
        append_record(settings.metrics_file, record)


def accumulate_gradients(policy: Any, batch: Batch, clip_eps: float, step: int) -> GradientStats:
    """Forward and backward over the micro-batches; their gradients add up to the batch's.

    Raises:
        NonFiniteLoss: the loss of a micro-batch is NaN or infinite.
    """
    total, sums = 0.0, NO_SUMS
    for i, micro in enumerate(batch.micro_batches):
        logp = token_logprobs(policy, micro.inputs, micro.targets, micro.temperature)
        loss, part = grpo_loss(
            logp, micro.behaviour_logp, micro.advantages, micro.token_weight, clip_eps
        )
        value = float(loss.detach())
        if not math.isfinite(value):
            raise NonFiniteLoss(
                f"step {step}, micro-batch {i}: loss is {value} (mean ratio "
                f"{part.mean('ratio'):.3g}, largest |log ratio| {part.diff_max:.3g}); no weight "
                "was changed by this step. Lower the learning rate, or look at the batch's logprobs"
            )
        loss.backward()  # type: ignore[no-untyped-call]
        total, sums = total + value, sums + part
    return GradientStats(total, sums)


def verify(run: Run, step: int) -> Alignment | None:
    """After the first update and every N-th: does the server serve these weights?"""
    every = run.settings.verify_every_steps
    if every == 0 or (step != 0 and (step + 1) % every != 0):
        return None
    alignment = run.probe.measure(run.sync.served_logprobs)
    require_alignment(alignment, next(run.policy.parameters()).dtype, step)
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
        socket=settings.weights_socket,
        dtype=settings.dtype,
        lease_s=settings.pause_lease_s,
    )


@contextlib.contextmanager
def _clients(settings: TrainerSettings) -> Iterator[tuple[TrainerClient, WeightSync]]:
    with TrainerClient(settings.atropos_url, settings.service_deadline_s) as api:
        sync = build_weight_sync(settings)
        try:
            yield api, sync
        finally:
            sync.close()
