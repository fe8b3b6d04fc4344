"""Starts a run: loads the policy or resumes it from a checkpoint, then serves the first weights."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial

import structlog
import torch

from grpo_core.process.cpu_types import SLOW, is_slow_in_bfloat16
from grpo_trainer.algo.accumulate import Accumulate
from grpo_trainer.checkpoint.resume import restore
from grpo_trainer.checkpoint.saver import Saver
from grpo_trainer.checkpoint.state import Position
from grpo_trainer.checkpoint.store import SavedState, StateStore
from grpo_trainer.config.trainer import AUTO, TrainerSettings
from grpo_trainer.data.batch_queue import BatchQueue
from grpo_trainer.data.batch_source import BatchSource, EnvironmentWatch
from grpo_trainer.data.collate import collate
from grpo_trainer.data.group_checks import GroupLimits
from grpo_trainer.data.group_filter import GroupFilter
from grpo_trainer.data.preparation import Preparation
from grpo_trainer.data.quarantine import Quarantine
from grpo_trainer.data.staleness import VersionHistory
from grpo_trainer.model.forward import FastForward, build_forward_pass
from grpo_trainer.model.logprobs import tolerance_of
from grpo_trainer.model.policy import CausalLM, end_tokens_of, train_only, vocabulary_of
from grpo_trainer.model.reference import Reference
from grpo_trainer.objective.kl_control import KlCoefficient
from grpo_trainer.objective.tau_control import Tau
from grpo_trainer.optim.master_optimizer import MasterOptimizer
from grpo_trainer.ranks.lead import ALONE, Alone
from grpo_trainer.telemetry.rollouts import prepare_rollouts
from grpo_trainer.telemetry.sinks import Recorder, Sinks, rotate_records, trim_records
from grpo_trainer.verify.alignment import AlignmentProbe, Bound, SharedMemoryCheck
from grpo_trainer.verify.data_checks import DataChecks
from grpo_trainer.verify.group_check import GroupCheck
from grpo_trainer.verify.ratio_check import RatioCheck
from grpo_trainer.verify.reference_check import ReferenceCheck
from grpo_trainer.verify.rollout_check import RolloutCheck
from grpo_trainer.verify.sampling_check import SamplingCheck
from grpo_trainer.verify.self_test import SelfTest
from grpo_trainer.weight_sync.base import WeightSync

log = structlog.get_logger()


@dataclass(frozen=True)
class Run:
    """The objects that every training step uses.

    `shared_memory` is None if the mode checks every publication, or if checks are off.
    """

    settings: TrainerSettings
    batches: BatchSource
    policy: CausalLM
    forward: FastForward
    reference: Reference | None
    kl_coefficient: KlCoefficient
    tau: Tau
    optimizer: MasterOptimizer
    sync: WeightSync
    checks: DataChecks
    shared_memory: SharedMemoryCheck | None
    recorder: Recorder
    saver: Saver
    accumulate: Accumulate


def warn_of_slow_type(policy: CausalLM) -> None:
    """Log if the policy is in bfloat16 on a CPU without instructions for it."""
    weights = next(policy.parameters())
    if weights.dtype == torch.bfloat16 and weights.device.type == "cpu" and is_slow_in_bfloat16():
        log.warning(
            "dtype.slow",
            reason=SLOW,
            hint="start the server and the trainer without --dtype, or with --dtype float32",
        )


def start_run(
    settings: TrainerSettings,
    api: BatchQueue,
    sync: WeightSync,
    store: StateStore,
    saved: SavedState | None,
    sinks: Sinks,
    team: Alone = ALONE,
) -> tuple[Run, Position]:
    """Load the policy, restore the checkpoint if there is one, and publish the first weights.

    Args:
        team: the other trainer processes, if there are some
    """
    # Dropout would make the trainer's logprobs differ from the server's at random.
    policy = sync.load_policy(restoring=saved is not None).eval()
    warn_of_slow_type(policy)
    settings = settings.model_copy(update={"run_id": sync.server_run_id})
    team.share_model(policy, settings)
    if settings.trained_layers is not None:
        train_only(policy, settings.trained_layers)
    forward = build_forward_pass(policy, settings, differentiates_entropy=settings.entropy_coef > 0)
    learner = team.learner(policy, forward, settings)
    reference, optimizer = learner.reference, learner.optimizer
    kl_coefficient, tau = settings.kl_coefficient, settings.tau
    if saved is not None:
        kl_coefficient.resume(saved.record.kl_coef)
        tau.resume(saved.record.maxent)
    if saved is None:
        api.register(settings.registration(first_step=0))
        position = Position(step=0, batch_id=0, epoch=0)
    else:
        position = restore(saved, policy, optimizer, api, settings)
    if settings.metrics_file is not None:
        if saved is None:
            rotate_records(settings.metrics_file)
        else:
            trim_records(settings.metrics_file, saved.record.step)
    prepare_rollouts(settings, None if saved is None else saved.record.step)
    bound = Bound(
        tolerance_of(policy),
        noise=None if saved is None else saved.record.noise,
        learns=saved is None and (settings.sync.hands_off or settings.verify_every_steps > 0),
    )
    version = sync.start(optimizer, position.step, position.epoch, bound)
    position = replace(position, epoch=version.epoch)
    check = None
    if settings.verify_every_steps:
        probe = AlignmentProbe(policy, bound)
        check = SharedMemoryCheck(
            probe,
            policy,
            optimizer,
            sync.served_logprobs,
            sync.sample,
            settings.verify_every_steps,
        )
        check.at_start()
    saver = Saver(settings, policy, optimizer, api, store, bound, kl_coefficient, tau)
    # A checkpoint that the user named may belong to another directory or run: leave it as it is.
    own = saved if settings.resume == AUTO else None
    saver.begin(position, own is not None, own.record.checkpoints if own else ())
    ends = end_tokens_of(policy)
    limits = GroupLimits(vocabulary_of(policy), settings.seq_len, settings.recompute_logprobs, ends)
    history = VersionHistory(version, sync.begun_as)
    collated = partial(
        collate,
        seq_len=settings.seq_len,
        tokens_per_micro_batch=settings.micro_batch_tokens,
        cut=forward.layout.cut,
        objective=settings.resolved_objective,
    )
    log.info("objective.chosen", name=settings.objective, **asdict(settings.resolved_objective))
    batches = BatchSource(
        settings=settings,
        api=api,
        recover_server=sync.recover_server,
        preparation=Preparation(GroupFilter(limits, history, settings.max_staleness), collated),
        environments=EnvironmentWatch(settings.environment_return_deadline_s),
        quarantine=Quarantine(settings.save_path, api.run_uuid),
        saver=saver,
    )
    SelfTest(policy, forward, reference, optimizer, settings, learner.accumulate).require()
    checks = DataChecks(
        GroupCheck(ends),
        RatioCheck(),
        SamplingCheck(policy, forward),
        None if reference is None else ReferenceCheck(reference),
        RolloutCheck(policy, sync.served_logprobs, bound.value),
    )
    recorder = Recorder(settings, sinks)
    run = Run(
        settings=settings,
        batches=batches,
        policy=policy,
        forward=forward,
        reference=reference,
        kl_coefficient=kl_coefficient,
        tau=tau,
        optimizer=optimizer,
        sync=sync,
        checks=checks,
        shared_memory=check,
        recorder=recorder,
        saver=saver,
        accumulate=learner.accumulate,
    )
    return run, position
