"""Counts the bytes that the trainer keeps from step to step, from the shapes of the parameters.

A step holds all of it at once: weights, master weights, the optimizer's moments, and between the
first backward pass and the update the gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_trainer.config.optimizer import OptimizerName
from grpo_trainer.config.sync import LoraOptions
from grpo_trainer.model.adapter import trained_parameters, with_adapter
from grpo_trainer.model.layers import train_only
from grpo_trainer.model.policy_protocol import CausalLM
from grpo_trainer.optim.rules import Adafactor, AdamW32, State, empty_8bit_state

INITIAL_STATE: dict[OptimizerName, Callable[[Tensor], State]] = {
    "adamw": AdamW32().initial_state,
    "adamw_8bit": empty_8bit_state,
    "adafactor": Adafactor().initial_state,
}
MASTER_BYTES = {"float32": 4, "bfloat16": 2}
SUM_BYTES = 4
"""Gradients of several micro-batches are summed in float32."""


@dataclass(frozen=True)
class KeptBytes:
    """`weights`: the trainer's copies of the model, unless it trains in the server's memory, and of
    the reference model."""

    weights: int
    masters: int
    gradients: int
    moments: int

    @property
    def total(self) -> int:
        return self.weights + self.masters + self.gradients + self.moments


def planned_policy(
    model_name: str,
    dtype: torch.dtype,
    trained_layers: tuple[int, ...] | None = None,
    lora: LoraOptions | None = None,
) -> CausalLM:
    """The policy on the meta device, which has shapes but no memory.

    Raises:
        PolicyMismatch: the model has no such layers or modules.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        config = AutoConfig.from_pretrained(model_name)
        policy: CausalLM = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if trained_layers is not None:
        train_only(policy, trained_layers)
    return policy if lora is None else with_adapter(policy, lora)


def kept_bytes(
    policy: CausalLM,
    optimizer: OptimizerName,
    master_dtype: str,
    micro_batches: int,
    is_shared: bool,
    has_reference: bool,
) -> KeptBytes:
    """Args:
    policy: on the meta device
    micro_batches: of a step
    is_shared: the weights are in the server's memory
    has_reference: there is a reference model besides the policy
    """
    trained = list(trained_parameters(policy).values())
    states = (INITIAL_STATE[optimizer](p.detach()) for p in trained)
    return KeptBytes(
        weights=(has_reference + (not is_shared)) * sum(p.nbytes for p in policy.parameters()),
        masters=sum(p.numel() for p in trained) * MASTER_BYTES[master_dtype],
        gradients=sum(
            p.numel() * (p.element_size() if micro_batches == 1 else SUM_BYTES) for p in trained
        ),
        moments=sum(tensor.nbytes for state in states for tensor in state.values()),
    )
