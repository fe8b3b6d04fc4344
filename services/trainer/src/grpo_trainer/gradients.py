"""Forward and backward over the micro-batches of one step.

An adapter's dropout is on in the forward pass whose gradient is taken, and nowhere else. What is
compared with the server, and every metric but the loss, then comes from a second forward pass
without dropout and without gradients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_trainer.adapter import adapter_dropouts, dropout_on
from grpo_trainer.batch import Batch, MicroBatch
from grpo_trainer.errors import NonFiniteLoss
from grpo_trainer.loss import NO_SUMS, LossSums, grpo_loss
from grpo_trainer.policy import token_logprobs
from grpo_trainer.token_table import TokenTable


@dataclass(frozen=True)
class GradientStats:
    """`tokens`: what the trainer made of every trained token, before the update."""

    loss: float
    sums: LossSums
    tokens: TokenTable


def accumulate_gradients(policy: Any, batch: Batch, clip_eps: float, step: int) -> GradientStats:
    """Forward and backward over the micro-batches; their gradients add up to the batch's.

    Raises:
        NonFiniteLoss: the loss of a micro-batch is NaN or infinite.
    """
    total, sums = 0.0, NO_SUMS
    seen: list[Tensor] = []
    dropouts = adapter_dropouts(policy)
    for i, micro in enumerate(batch.micro_batches):
        with dropout_on(dropouts):
            trained_logp = _logprobs(policy, micro)
        logp = _without_gradient(policy, micro) if dropouts else trained_logp.detach()
        loss, _ = _loss(trained_logp, micro, clip_eps)
        _, part = _loss(logp, micro, clip_eps)
        value = _finite(float(loss.detach()), part, f"step {step}, micro-batch {i}")
        loss.backward()  # type: ignore[no-untyped-call]
        total, sums = total + value, sums + part
        seen.append(logp)
    return GradientStats(total, sums, TokenTable.of(batch.micro_batches, seen))


def _logprobs(policy: Any, micro: MicroBatch) -> Tensor:
    return token_logprobs(policy, micro.inputs, micro.targets, micro.temperature)


@torch.no_grad()
def _without_gradient(policy: Any, micro: MicroBatch) -> Tensor:
    return _logprobs(policy, micro)


def _loss(logp: Tensor, micro: MicroBatch, clip_eps: float) -> tuple[Tensor, LossSums]:
    return grpo_loss(logp, micro.behaviour_logp, micro.advantages, micro.token_weight, clip_eps)


def _finite(loss: float, sums: LossSums, where: str) -> float:
    if not math.isfinite(loss):
        raise NonFiniteLoss(
            f"{where}: loss is {loss} (largest ratio {sums.ratio_max:.3g}, largest |log ratio| "
            f"{sums.diff_max:.3g}); no weight was changed by this step. Lower the learning rate, "
            "or look at the batch's logprobs"
        )
    return loss
