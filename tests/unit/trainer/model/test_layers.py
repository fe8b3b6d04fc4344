"""Layers are frozen or recomputed: the gradients of the others, and their values, stay the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_trainer.algo.accumulate import accumulate_gradients
from grpo_trainer.config.forward import Choice, ForwardOptions
from grpo_trainer.errors import FastPathRefused, PolicyMismatch
from grpo_trainer.model.adapter import adapter_dropouts, trained_parameters, with_adapter
from grpo_trainer.model.forward import ForwardPass, build_forward_pass, plain_forward
from grpo_trainer.model.policy import train_only
from grpo_trainer.objective.recipes import GRPO
from tests.unit.trainer.forward_rig import (
    adapted,
    outcome,
    qwen,
    ragged,
    ragged_batch,
    require_equal,
)
from tests.unit.trainer.tiny_policy import LORA, optimizer_of


def built(policy: Any, choice: Choice, gradient_checkpointing: bool) -> ForwardPass:
    options = ForwardOptions(
        packing=choice, fused_head=choice, gradient_checkpointing=gradient_checkpointing
    )
    return build_forward_pass(policy, options)


def test_only_the_named_layers_have_gradients_master_weights_and_new_values() -> None:
    whole, policy = qwen(num_hidden_layers=3), qwen(num_hidden_layers=3)
    train_only(policy, (1,))
    micro = ragged()
    logp, all_gradients = outcome(whole, plain_forward, micro)
    ours = {name: g for name, g in all_gradients.items() if name.startswith("model.layers.1.")}
    assert len(ours) == 12
    require_equal(outcome(policy, built(policy, "on", False), micro), (logp, ours))

    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    optimizer = optimizer_of(policy)
    plain_forward(policy, micro).logp.sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step(0)
    optimizer.write_into_parameters()
    moved = {n for n, p in policy.named_parameters() if not torch.equal(p, before[n])}
    assert moved == ours.keys()
    assert sum(m.numel() for m in optimizer.masters) == sum(g.numel() for g in ours.values())
    assert not any(p.grad is not None for p in policy.parameters())


def test_a_layer_that_the_model_does_not_have_is_named_with_the_range() -> None:
    match = r"--train-layer-indices \[2, 7\]: the model has layers 0 to 1"
    with pytest.raises(PolicyMismatch, match=match):
        train_only(qwen(), (1, 2, 7))


@pytest.mark.parametrize("choice", ["off", "on"])
@pytest.mark.parametrize("make", [qwen, adapted])
def test_recomputed_layers_give_the_same_logprobs_and_gradients_from_less_memory(
    make: Callable[[], Any], choice: Choice
) -> None:
    policy, micro = make(), ragged()
    stored = built(policy, choice, False)
    with saved_bytes(policy) as before:
        expected = outcome(policy, stored, micro)
    recomputed = built(policy, choice, True)
    with saved_bytes(policy) as after:
        found = outcome(policy, recomputed, micro)
    require_equal(found, expected)
    assert sum(after) < 0.5 * sum(before)


def test_a_recomputed_layer_repeats_its_dropout() -> None:
    """The model switches dropout off after the forward pass. The backward pass needs it again."""
    steps = []
    for gradient_checkpointing in (False, True):
        policy = with_adapter(qwen(), LORA_WITH_DROPOUT).eval()
        forward = built(policy, "off", gradient_checkpointing)
        torch.manual_seed(5)
        stats = accumulate_gradients(policy, ragged_batch(), GRPO, step=0, forward=forward)
        gradients = {n: p.grad for n, p in trained_parameters(policy).items()}
        steps.append((stats.loss, gradients))
        assert not any(module.training for module in adapter_dropouts(policy))
    (loss, expected), (again, found) = steps
    assert again == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)


def test_a_model_that_cannot_recompute_its_layers_is_refused() -> None:
    policy = qwen()
    policy.supports_gradient_checkpointing = False
    with pytest.raises(FastPathRefused, match="Qwen2ForCausalLM does not support it; omit"):
        built(policy, "off", True)


LORA_WITH_DROPOUT = LORA.__class__(**vars(LORA) | {"dropout": 0.5})


@contextmanager
def saved_bytes(policy: Any) -> Iterator[list[int]]:
    """The size of each tensor that the forward pass stores for the backward pass."""
    weights = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    found: dict[int, int] = {}
    sizes: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes
    sizes.extend(found.values())
