"""The reference model, from which the policy must not move far: --model as it was before training,
or --reference-model.

In the LoRA modes --model is the policy without its adapter, and needs no memory. Otherwise the
reference model is a second copy.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any

import torch

from grpo_core.tree.trainer import TrainerSettings
from grpo_trainer.data.collate import Batch
from grpo_trainer.errors import PolicyMismatch
from grpo_trainer.model.division import Division
from grpo_trainer.model.forward import ForwardPass, build_forward_pass
from grpo_trainer.model.loading import NOWHERE, TrainedWeights
from grpo_trainer.model.logprobs import TokenValues, values_of_all
from grpo_trainer.model.policy import CausalLM, device_of, vocabulary_of
from grpo_trainer.ranks import ALONE, Orders, Ranks


@dataclass(frozen=True)
class Reference:
    """Args: is_policy: the model is the policy, whose adapter is switched off meanwhile"""

    model: CausalLM
    forward: ForwardPass
    is_policy: bool

    @torch.no_grad()
    def added(self, batch: Batch, ranks: Ranks = ALONE) -> Batch:
        """The batch with the reference's logprobs of all trained tokens. Each rank computes its
        portion."""
        device, model, whole = device_of(self.model), self.model, batch.micro_batches
        portion = ranks.portion(whole, whole[0].without_weight())
        with self.active():
            found = [self.forward(model, micro.to(device)) for micro in portion]
        seen = [TokenValues(*(value.cpu() for value in values)) for values in found]
        pairs = zip(whole, values_of_all(seen, whole, ranks), strict=True)
        return replace(
            batch, micro_batches=[replace(micro, reference_logp=s.logp) for micro, s in pairs]
        )

    def active(self) -> Any:
        """A context in which `model` computes the reference model's outputs."""
        if not self.is_policy:
            return contextlib.nullcontext()
        return self.model.disable_adapter()  # type: ignore[attr-defined]


def build_reference(
    policy: CausalLM, forward: ForwardPass, settings: TrainerSettings, orders: Orders | None = None
) -> Reference | None:
    """None if the objective has no KL penalty.

    Args: orders: of rank 0 to those that divide the policy, and then this model, too

    Raises:
        PolicyMismatch: --reference-model has another vocabulary.
    """
    if not settings.resolved_objective.kl_coef:
        return None
    name = settings.reference_model or settings.model
    if settings.lora is not None and name == settings.model:
        return Reference(policy, forward, is_policy=True)
    weights, device = TrainedWeights(name, is_divided=orders is not None), device_of(policy)
    is_led = orders is not None and not orders.ranks.leads
    copy = weights.load(next(policy.parameters()).dtype, NOWHERE if is_led else device).eval()
    if vocabulary_of(copy) != vocabulary_of(policy):
        raise PolicyMismatch(
            f"--reference-model {name} has a vocabulary of {vocabulary_of(copy)} tokens, but "
            f"--model has one of {vocabulary_of(policy)}; choose a model with the same tokenizer"
        )
    for parameter in copy.parameters():
        parameter.requires_grad_(False)
    if orders is not None:
        Division(copy, device, orders, "the reference model")
    options = settings.model_copy(update={"compile": False, "gradient_checkpointing": False})
    return Reference(copy, build_forward_pass(copy, options), is_policy=False)
