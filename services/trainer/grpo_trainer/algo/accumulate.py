"""Runs forward and backward passes over the micro-batches of one step, and adds up the gradients.

An adapter's dropout is on only in the forward pass whose gradient is used. The comparison with the
server, and every metric but the loss, use a second forward pass without dropout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_trainer.algo.logprob_comparison import TokenTable
from grpo_trainer.algo.loss import (
    NO_SUMS,
    LossParts,
    LossSums,
    loss_sums,
    step_loss,
)
from grpo_trainer.data.collate import Batch, MicroBatch
from grpo_trainer.errors import NonFiniteLoss
from grpo_trainer.model.adapter import adapter_dropouts, dropout_on
from grpo_trainer.model.forward import ForwardPass, plain_forward
from grpo_trainer.model.logprobs import TokenValues
from grpo_trainer.model.policy import CausalLM, device_of
from grpo_trainer.objective.recipes import Objective
from grpo_trainer.optim.gradients import LossScale


@dataclass(frozen=True)
class GradientStats:
    """Loss and metrics of a batch.

    Args:
        loss_parts: the policy's loss, the KL penalty and the entropy bonus; see `LossParts`
        tokens: the trained tokens with logprobs from before the update
    """

    loss_parts: Sequence[float]
    sums: LossSums
    tokens: TokenTable

    @property
    def loss(self) -> float:
        return sum(self.loss_parts)


Accumulate = Callable[[Batch, Objective, int], GradientStats]
"""Collects the gradients of a batch, for the step with this index."""


def accumulate_gradients(
    policy: CausalLM,
    batch: Batch,
    objective: Objective,
    step: int,
    forward: ForwardPass = plain_forward,
    loss_scale: LossScale | None = None,
) -> GradientStats:
    """Run forward and backward over the micro-batches; their gradients add up to the batch's.

    Args:
        loss_scale: multiplies the gradients; if they overflow, the batch is computed again with a
            smaller one
    Raises:
        NonFiniteLoss: the loss of a micro-batch is NaN or infinite.
    """

    def scaled_by(scale: float) -> GradientStats:
        found = computed(policy, batch.micro_batches, objective, step, forward, scale)
        return GradientStats(found.loss_parts, found.sums, TokenTable.of(found.micros, found.seen))

    return scaled_by(1.0) if loss_scale is None else loss_scale.without_overflow(scaled_by)


@dataclass(frozen=True)
class Computed:
    """Loss and metrics of some micro-batches.

    Args:
        micros: with the behaviour logprobs that were recomputed
        seen: [B, T] each, without gradient, in host memory
    """

    loss_parts: Sequence[float]
    sums: LossSums
    micros: Sequence[MicroBatch]
    seen: Sequence[TokenValues]


def computed(
    policy: CausalLM,
    micro_batches: Sequence[MicroBatch],
    objective: Objective,
    step: int,
    forward: ForwardPass,
    scale: float = 1.0,
    stops: bool = True,
) -> Computed:
    """Run forward and backward over some of a batch's micro-batches.

    Args:
        scale: multiplies the gradients
        stops: raise the error at once; else go on, because the backward passes of several ranks
            wait for each other
    Raises:
        NonFiniteLoss: the loss of a micro-batch is NaN or infinite.
    """
    totals, sums = [0.0] * len(LossParts._fields), NO_SUMS
    micros: list[MicroBatch] = []
    seen: list[TokenValues] = []
    dropouts, device = adapter_dropouts(policy), device_of(policy)
    for i, micro in enumerate(micro_batches):
        on_device = micro.to(device)
        with dropout_on(dropouts):
            trained = forward(policy, on_device)
        without_dropout = trained
        if dropouts:
            with torch.no_grad():
                without_dropout = forward(policy, on_device)
        on_device = on_device.with_recomputed(without_dropout.logp)
        parts = step_loss(trained, on_device, objective)
        loss = parts.policy + parts.kl + parts.entropy
        # One transfer to the host for all values that are read here: each transfer waits for the
        # device.
        read, values = _to_host(parts, without_dropout)
        known = micro.with_recomputed(values.logp)
        if stops and not math.isfinite(sum(read)):
            found = loss_sums(
                values.logp, values.entropy, micro.reference_logp, *_columns(known), objective
            )
            raise NonFiniteLoss(
                f"step {step}, micro-batch {i}: the loss is {sum(read)} (largest importance ratio "
                f"{found.ratio_max:.3g}, largest |log importance ratio| {found.diff_max:.3g}). The "
                "step changed no weight. Lower the learning rate, or inspect the batch's logprobs"
            )
        # Dropout is on again, because layers that are recomputed must repeat the forward pass.
        with dropout_on(dropouts):
            (scale * loss).backward()  # type: ignore[no-untyped-call]
        # The host computes the sums while the GPU runs the backward pass.
        totals = [a + b for a, b in zip(totals, read, strict=True)]
        sums += loss_sums(
            values.logp, values.entropy, micro.reference_logp, *_columns(known), objective
        )
        micros.append(known)
        seen.append(values)
    return Computed(totals, sums, micros, seen)


def _to_host(parts: LossParts, values: TokenValues) -> tuple[list[float], TokenValues]:
    """Copy all to host memory in one transfer: scalars, [B, T] each."""
    scalars = torch.stack(parts).detach()
    flat = torch.cat([scalars, *(value.detach().flatten() for value in values)]).cpu()
    shape = (len(values), *values.logp.shape)
    return flat[: len(parts)].tolist(), TokenValues(*flat[len(parts) :].view(shape))


def _columns(micro: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
    """The loss's inputs other than the policy's logprobs."""
    return micro.behaviour_logp, micro.advantages, micro.token_weight
