"""Layers are frozen, recomputed or compiled: values and the other gradients stay the same."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_core.tree.objectives import GRPO
from grpo_core.tree.trainer import Choice, ForwardOptions
from grpo_trainer.errors import FastPathRefused, MissingPackage, PolicyMismatch
from grpo_trainer.learner import accumulate_gradients
from grpo_trainer.model import forward, packed_attention
from grpo_trainer.model.adapter import adapter_dropouts, trained_parameters, with_adapter
from grpo_trainer.model.forward import (
    FastForward,
    ForwardPass,
    build_forward_pass,
    plain_forward,
)
from grpo_trainer.model.fused_head import EAGER
from grpo_trainer.model.packing import PACKED
from grpo_trainer.model.policy import base_model, compile_layers, train_only
from tests.unit.trainer.forward_rig import (
    adapted,
    outcome,
    qwen,
    ragged,
    ragged_batch,
    require_equal,
)
from tests.unit.trainer.tiny_policy import LORA, optimizer_of

TRACED = "aot_eager"
"""A backend of torch.compile that runs the traced operations one by one and skips the slow code
generation: tracing and differentiation do not depend on the generated code."""
FAST = FastForward(PACKED, EAGER)
EVERYTHING = ForwardOptions(packing="on", fused_head="on", compile=True)
COMPILED = pytest.mark.filterwarnings("ignore")
"""torch.compile uses deprecated functions of torch. It suppresses its own warnings, but not those
that pytest turns into errors."""
RECOMPUTED = EVERYTHING.model_copy(update={"gradient_checkpointing": True})


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
        chosen = built(policy, "off", gradient_checkpointing)
        torch.manual_seed(5)
        stats = accumulate_gradients(policy, ragged_batch(), GRPO, step=0, forward=chosen)
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


@pytest.fixture(autouse=True)
def nothing_compiled_yet() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.full
@COMPILED
@pytest.mark.parametrize("make", [qwen, adapted])
def test_values_gradients_and_hooks_follow_the_parameters_wherever_they_are(
    make: Callable[[], Any],
) -> None:
    policy, eager, micro = make(), make(), ragged()
    before = {name: p.data_ptr() for name, p in policy.named_parameters()}
    fired = []
    trained = [name for name, p in policy.named_parameters() if p.requires_grad]
    for name in trained:
        policy.get_parameter(name).register_post_accumulate_grad_hook(
            lambda _, name=name: fired.append(name)
        )
    packed_attention.enable(base_model(policy))
    compile_layers(base_model(policy), TRACED)
    require_equal(outcome(policy, FAST, micro), outcome(eager, plain_forward, micro))
    assert {name: p.data_ptr() for name, p in policy.named_parameters()} == before
    assert sorted(fired) == sorted(trained)
    assert policy.state_dict().keys() == eager.state_dict().keys()

    with torch.no_grad():
        for parameter in (*policy.parameters(), *eager.parameters()):
            parameter.mul_(1.1)  # in place, like an update
            parameter.data = parameter.detach() * 0.9  # elsewhere, like after a server's restart
    require_equal(outcome(policy, FAST, micro), outcome(eager, plain_forward, micro))


@pytest.mark.full
@COMPILED
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here, which torch.compile needs")
@pytest.mark.parametrize("options", [EVERYTHING, RECOMPUTED])
def test_everything_at_once_really_compiled(options: ForwardOptions) -> None:
    policy, micro = qwen(num_hidden_layers=1), ragged()
    expected = outcome(policy, plain_forward, micro)
    require_equal(outcome(policy, build_forward_pass(policy, options), micro), expected)


@COMPILED
def test_compiled_code_that_answers_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrongly_compiled(model: Any) -> None:
        model.model.layers[0].register_forward_hook(lambda _m, _i, out: 2 * out)

    monkeypatch.setattr(forward, "require_compiler", lambda _: None)
    monkeypatch.setattr(forward, "compile_layers", wrongly_compiled)
    with pytest.raises(FastPathRefused, match=r"--compile: .* differ by .*; omit --compile"):
        build_forward_pass(qwen(), ForwardOptions(packing="off", fused_head="off", compile=True))


def test_a_run_without_a_compiler_ends_before_it_touches_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    policy = qwen()
    with pytest.raises(MissingPackage, match=r"there is no g\+\+ .* omit --compile"):
        build_forward_pass(policy, EVERYTHING)
    assert policy.config._attn_implementation == packed_attention.DEFAULT
