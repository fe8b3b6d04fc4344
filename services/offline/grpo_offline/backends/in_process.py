"""Weights that stay in the trainer: for sampling in this process, and for frozen servers."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.checks.served_weights import Bound
from grpo_trainer.config.trainer import TrainerSettings
from grpo_trainer.model.loading import TrainedWeights, device_to_load_on
from grpo_trainer.model.logprobs import logprobs_of
from grpo_trainer.model.policy import CausalLM
from grpo_trainer.optim.master_optimizer import MasterOptimizer
from grpo_trainer.weight_sync.base import Published


@dataclass(eq=False)
class WeightsInProcess:
    """A `WeightSync` without a server. `samples`: rollouts are sampled from the policy.
    `version`: of its weights."""

    settings: TrainerSettings
    samples: bool
    version: PolicyVersion = field(init=False, default=PolicyVersion(0, 0))
    begun_as: PolicyVersion | None = field(init=False, default=None)
    server_run_id: str | None = field(init=False, default=None)
    policy: CausalLM = field(init=False)

    def load_policy(self, restoring: bool = False) -> CausalLM:  # noqa: ARG002
        """Raises `NoSuchDevice`, `PolicyMismatch`."""
        settings = self.settings
        device = device_to_load_on(settings.device)
        weights = TrainedWeights(settings.model, settings.lora)
        self.policy = weights.load(getattr(torch, settings.dtype), device)
        return self.policy

    def start(
        self,
        optimizer: MasterOptimizer,
        step: int,
        last_epoch: int = 0,
        bound: Bound | None = None,
    ) -> PolicyVersion:
        if bound is not None and self.samples:
            bound.learn(0.0)  # the policy's own logprobs have no noise
        optimizer.write_into_parameters()
        self.version = PolicyVersion(last_epoch + 1, step)
        return self.version

    def publish(self, optimizer: MasterOptimizer, step: int) -> Published:
        optimizer.write_into_parameters()
        self.version = PolicyVersion(self.version.epoch, step)
        return Published(self.version, 0.0)

    def recover_server(self) -> None:
        """There is no server."""

    def served_logprobs(self, token_ids: list[int]) -> list[float]:
        found: list[float] = logprobs_of(self.policy, token_ids).tolist()
        return found

    def close(self) -> None:
        """Nothing is open."""
