"""The leader's side of several ranks, and the same interface for a single process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import get_args

import torch

from grpo_trainer.algo.accumulate import Accumulate, GradientStats, accumulate_gradients
from grpo_trainer.config.optimizer import OptimizerName
from grpo_trainer.config.trainer import TrainerSettings
from grpo_trainer.data.collate import Batch
from grpo_trainer.errors import UnusableOptimizer
from grpo_trainer.model.adapter import adapter_dropouts
from grpo_trainer.model.forward import FastForward
from grpo_trainer.model.policy import CausalLM, device_of
from grpo_trainer.model.reference import Reference, build_reference
from grpo_trainer.objective.recipes import Objective
from grpo_trainer.optim.master_optimizer import MasterOptimizer, build_optimizer
from grpo_trainer.ranks.group import Ranks
from grpo_trainer.ranks.joint import Joint
from grpo_trainer.ranks.messages import Command, Message, send, send_batch
from grpo_trainer.ranks.sharding import shard
from grpo_trainer.ranks.state import RankOptimizer, Tell

DTYPES = (torch.float32, torch.bfloat16)
"""Data types of the weights of several ranks."""
OPTIMIZERS: tuple[OptimizerName, ...] = get_args(OptimizerName)


@dataclass(frozen=True)
class Learner:
    """What computes and takes the steps. `reference`: None without a KL penalty."""

    optimizer: MasterOptimizer
    reference: Reference | None
    accumulate: Accumulate


class Alone:
    """A single process."""

    def share_model(self, policy: CausalLM, settings: TrainerSettings) -> None:
        """Called with the loaded policy."""

    def learner(self, policy: CausalLM, forward: FastForward, settings: TrainerSettings) -> Learner:
        """Raises the errors of `build_optimizer`."""
        reference = build_reference(policy, forward, settings)
        optimizer = build_optimizer(policy, settings)

        def accumulate(batch: Batch, objective: Objective, step: int) -> GradientStats:
            return accumulate_gradients(
                policy, batch, objective, step, forward, optimizer.loss_scale
            )

        return Learner(optimizer, reference, accumulate)


ALONE = Alone()


class Leader(Alone):
    """Rank 0 of several. The others run `follow`."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def tell(self, command: Command, *numbers: float) -> None:
        send(self.ranks, Message(command, numbers))

    def share_model(self, policy: CausalLM, settings: TrainerSettings) -> None:
        """Let the other ranks load the model, and send all weights to them.

        Raises:
            UnusableOptimizer: the weights are in float16.
        """
        device, dtype = device_of(policy), next(policy.parameters()).dtype
        if any(p.dtype not in DTYPES for p in policy.parameters()):
            raise UnusableOptimizer(
                f"several trainer processes need weights in bfloat16 or float32, not "
                f"{str(dtype).removeprefix('torch.')}; serve the model in bfloat16, or start one "
                "trainer process"
            )
        optimizer = settings.optimizer_on(device.type)
        self.tell(Command.LOAD_MODEL, DTYPES.index(dtype), OPTIMIZERS.index(optimizer))
        share_weights(self.ranks, policy)

    def learner(self, policy: CausalLM, forward: FastForward, settings: TrainerSettings) -> Learner:
        joint = build_joint(self.ranks, policy, forward, settings, self.tell)
        reference = joint.reference
        if reference is not None:
            reference = _JointReference(
                reference.model, reference.forward, reference.is_policy, self, joint
            )
        return Learner(joint.optimizer, reference, partial(self._accumulate, joint))

    def _accumulate(
        self, joint: Joint, batch: Batch, objective: Objective, step: int
    ) -> GradientStats:
        dropout = max((module.p for module in adapter_dropouts(joint.policy)), default=0.0)
        self.tell(Command.GRADIENTS, step, objective.kl_coef, objective.maxent_tau, dropout)
        send_batch(self.ranks, batch.micro_batches)
        return joint.gradients(batch.micro_batches, objective, step)

    def finish(self) -> None:
        """End the other ranks, after a run without an error."""
        self.tell(Command.STOP)


@dataclass(frozen=True)
class _JointReference(Reference):
    """The leader's reference model; each rank computes the logprobs of its micro-batches."""

    leader: Leader
    joint: Joint

    def added(self, batch: Batch) -> Batch:
        micro_batches = batch.micro_batches
        self.leader.tell(Command.COMPARE)
        send_batch(self.leader.ranks, micro_batches)
        found = self.joint.reference_logprobs(micro_batches)
        pairs = zip(micro_batches, found, strict=True)
        return replace(
            batch, micro_batches=[replace(micro, reference_logp=logp) for micro, logp in pairs]
        )


@torch.no_grad()
def share_weights(ranks: Ranks, policy: CausalLM) -> None:
    """Replace all weights by the leader's, also those that are not trained."""
    for parameter in policy.parameters():
        ranks.from_leader(parameter.data, "the weights")


def build_joint(
    ranks: Ranks, policy: CausalLM, forward: FastForward, settings: TrainerSettings, tell: Tell
) -> Joint:
    """Called on all ranks, with equal policies."""
    reference = build_reference(policy, forward, settings)
    sharded = shard(policy, ranks) if settings.fsdp else None
    kind = partial(RankOptimizer, ranks=ranks, tell=tell, sharded=sharded)
    own = policy if sharded is None else sharded.policy
    optimizer = build_optimizer(own, settings, kind)
    used = forward if sharded is None or forward.head is None else sharded.within(forward)
    return Joint(ranks, own, used, sharded is not None, optimizer, reference)
