"""A policy with all that the trainer's own step needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.gpu_bench.train_variants import Options, Variant
from grpo_trainer.algo.accumulate import accumulate_gradients
from grpo_trainer.config.cli import CommandLine
from grpo_trainer.config.packages import require_packages
from grpo_trainer.config.trainer import TrainerSettings
from grpo_trainer.data.collate import Batch
from grpo_trainer.model.forward import ForwardPass, build_forward_pass
from grpo_trainer.optim.build import build_optimizer
from grpo_trainer.optim.optimizer import MasterOptimizer

CLIP_EPS = 0.2
LR = 1e-6


@dataclass(frozen=True)
class Trainee:
    """`batch`: the same in every step."""

    policy: Any
    optimizer: MasterOptimizer
    forward: ForwardPass
    batch: Batch

    def gather(self, step: int) -> None:
        """The gradients of the batch, into the optimizer."""
        accumulate_gradients(self.policy, self.batch, CLIP_EPS, step, self.forward)


def trainee_of(policy: Any, variant: Variant, batch: Batch) -> Trainee:
    """Raises what the trainer raises where the policy, or the machine, does not allow the
    variant."""
    settings = settings_with(variant.optimizer)
    require_packages(settings)
    return Trainee(
        policy=policy,
        optimizer=build_optimizer(policy, settings),
        forward=build_forward_pass(policy, variant.forward),
        batch=batch,
    )


def settings_with(options: Options) -> TrainerSettings:
    """Raises `pydantic.ValidationError` where the trainer has no such options."""
    fields = {
        "model_name": "random",
        "weight_bridge_mode": "shared_vllm",
        "lr": LR,
        **options,
    }
    return CommandLine.model_validate(fields).settings()
