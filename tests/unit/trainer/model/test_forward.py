"""Every way of computing a step gives the plain way's numbers, or is refused at the start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GraniteConfig,
    HyperCLOVAXConfig,
    LlamaConfig,
    MistralConfig,
    MptConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

from grpo_core.tree.objectives import GRPO
from grpo_core.tree.trainer import Choice, ForwardOptions
from grpo_trainer.data.cuts import Cut, by_prefix
from grpo_trainer.errors import FastPathRefused, NonFiniteLoss
from grpo_trainer.learner import GradientStats, accumulate_gradients
from grpo_trainer.model import fused_head, packed_attention
from grpo_trainer.model.forward import (
    FastForward,
    ForwardPass,
    build_forward_pass,
    is_enabled,
    plain_forward,
)
from grpo_trainer.model.fused_head import EAGER
from grpo_trainer.model.packing import PACKED, PADDED
from tests.unit.trainer.forward_rig import (
    SMALL,
    WINDOW,
    adapted,
    outcome,
    qwen,
    ragged,
    ragged_batch,
    require_equal,
    small,
)

ON, OFF, AUTO = "on", "off", "auto"
FAST = {"packed": (ON, OFF), "fused head": (OFF, ON), "both": (ON, ON)}
POLICIES: dict[str, Callable[[], Any]] = {
    "grouped heads": qwen,
    "as many heads": lambda: qwen(num_key_value_heads=4),
    "window": lambda: qwen(**WINDOW),
    "untied": lambda: qwen(tie_word_embeddings=False),
    "adapter": adapted,
    "Qwen3": lambda: small(Qwen3Config),
    "Llama": lambda: small(LlamaConfig),
    "Gemma": lambda: small(GemmaConfig),
    "Gemma 2": lambda: small(
        Gemma2Config, attn_logit_softcapping=None, final_logit_softcapping=3.0
    ),
    "Gemma 3": lambda: small(
        Gemma3TextConfig,
        sliding_window=3,
        layer_types=WINDOW["layer_types"],
        final_logit_softcapping=3.0,
    ),
    "Cohere": lambda: small(CohereConfig, logit_scale=0.25),
    "Granite": lambda: small(GraniteConfig, logits_scaling=0.5),
    "HyperCLOVA X": lambda: small(HyperCLOVAXConfig, logits_scaling=0.5),
    "Mistral": lambda: small(MistralConfig, sliding_window=3),
    "GPT-2": lambda: small(GPT2Config),
}


def built(policy: Any, packing: Choice = OFF, fused_head: Choice = OFF) -> FastForward:
    return build_forward_pass(policy, ForwardOptions(packing=packing, fused_head=fused_head))


Step = tuple[GradientStats, dict[str, Tensor]]


def step_of(policy: Any, forward: ForwardPass, cut: Cut = by_prefix, tokens: int = 1000) -> Step:
    """Statistics of one step, and the gradient of every parameter that has one."""
    policy.zero_grad()
    batch = ragged_batch(cut, tokens)
    stats = accumulate_gradients(policy, batch, GRPO, step=0, forward=forward)
    return stats, {n: p.grad for n, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("tokens", [1000, 30])
@pytest.mark.parametrize("choices", FAST.values(), ids=FAST)
@pytest.mark.parametrize("name", POLICIES)
def test_a_step_is_the_one_that_padded_rows_and_all_logits_give(
    name: str, choices: tuple[Choice, Choice], tokens: int
) -> None:
    """Compare loss, metrics, tokens and every gradient; the plain way must be unchanged."""
    policy = POLICIES[name]()
    forward = built(policy, *choices)
    cut = forward.layout.cut
    fast, found = step_of(policy, forward, cut, tokens)
    plain, expected = step_of(policy, plain_forward, cut, tokens)
    assert fast.loss == pytest.approx(plain.loss, rel=1e-4)
    assert vars(fast.sums) == pytest.approx(vars(plain.sums), rel=1e-4)
    assert torch.equal(fast.tokens.sequence, plain.tokens.sequence)
    assert torch.equal(fast.tokens.position, plain.tokens.position)
    require_equal((fast.tokens.logp, found), (plain.tokens.logp, expected))
    logp = plain_forward(POLICIES[name](), ragged()).logp
    torch.testing.assert_close(plain_forward(policy, ragged()).logp, logp)


def test_the_cut_into_micro_batches_changes_neither_loss_nor_gradient_nor_metrics() -> None:
    """The archived trainer divided by a constant instead of the number of accumulated batches."""
    whole, expected = step_of(qwen(), plain_forward)
    for tokens in (1, 20, 30):
        stats, found = step_of(qwen(), plain_forward, by_prefix, tokens)
        assert stats.loss == pytest.approx(whole.loss, rel=1e-4)
        assert vars(stats.sums) == pytest.approx(vars(whole.sums), rel=1e-4, abs=1e-6)
        assert torch.equal(stats.tokens.sequence, whole.tokens.sequence)
        require_equal((stats.tokens.logp, found), (whole.tokens.logp, expected))


def test_a_non_finite_loss_stops_the_run_by_name() -> None:
    policy = qwen()
    with torch.no_grad():
        policy.model.embed_tokens.weight.fill_(float("nan"))
    with pytest.raises(NonFiniteLoss, match="step 3, micro-batch 0"):
        accumulate_gradients(policy, ragged_batch(), GRPO, step=3)


@pytest.mark.parametrize("choices", FAST.values(), ids=FAST)
def test_bfloat16_stays_within_its_rounding(choices: tuple[Choice, Choice]) -> None:
    """Each way has nearly the plain way's distance to float32; kernels of different widths stay
    within a factor of 1.2. A temperature that is wrong by 2 % makes the logprobs' distance 3.5
    times as large. Hidden states in float8 make it 2.5 times as large, and that of gradients 30
    times."""
    micro = ragged()
    exact, rounded = qwen(), qwen(torch.bfloat16)
    exact.load_state_dict(rounded.state_dict())
    expected = in_a_line(outcome(exact, plain_forward, micro))
    plain = in_a_line(outcome(rounded, plain_forward, micro))
    found = in_a_line(outcome(rounded, built(rounded, *choices), micro))
    for ours, theirs, true in zip(found, plain, expected, strict=True):
        assert torch.dist(ours, true) <= 2 * torch.dist(theirs, true)


def in_a_line(found: tuple[Tensor, dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
    logp, gradients = found
    return logp.double(), torch.cat([g.double().flatten() for g in gradients.values()])


def test_a_micro_batch_without_trained_tokens_has_zero_gradients() -> None:
    policy, micro = qwen(), ragged()
    nothing = replace(micro, token_weight=torch.zeros_like(micro.token_weight))
    logp = built(policy, ON, ON)(policy, nothing).logp
    logp.sum().backward()  # type: ignore[no-untyped-call]
    assert logp.shape == micro.targets.shape
    assert not logp.any()
    assert not policy.lm_head.weight.grad.any()


def test_options_choose_the_way() -> None:
    assert built(qwen(), AUTO, AUTO) == FastForward(PACKED, EAGER)
    assert built(qwen(), ON) == FastForward(PACKED)
    assert built(qwen(), OFF, ON) == FastForward(PADDED, EAGER)
    assert built(qwen(), OFF, OFF) == FastForward(PADDED)


def refuse() -> None:
    raise FastPathRefused("the model is of clay")


def test_a_refusal_is_logged_unless_the_way_was_asked_for_by_name() -> None:
    with capture_logs() as events:
        assert not is_enabled("packing", AUTO, refuse)
    (event,) = events
    assert (event["option"], event["reason"]) == ("--packing", "the model is of clay")
    with pytest.raises(FastPathRefused, match=r"--fused-head on is .*: .* pass --fused-head off"):
        is_enabled("fused-head", ON, refuse)
    assert not is_enabled("packing", OFF, refuse)


def test_a_layer_that_mixes_sequences_is_found_by_its_numbers() -> None:
    """A model whose positions depend on the previous one, as in convolutions and recurrences."""
    policy = qwen()
    layer = policy.model.layers[0]
    layer.register_forward_hook(lambda _m, _i, out: out + 0.5 * out.roll(1, dims=1))
    with pytest.raises(FastPathRefused, match=r"differ by .* pass --packing off"):
        built(policy, ON)
    assert policy.config._attn_implementation == packed_attention.DEFAULT


REFUSED: dict[str, tuple[Any, Any]] = {
    "attn_logit_softcapping = 50": (packed_attention, Gemma2Config(**SMALL)),
    "layers other than attention: linear_attention": (packed_attention, Qwen3NextConfig(**SMALL)),
    "logit_scale = inv_sqrt_d_model": (
        fused_head,
        MptConfig(**SMALL, logit_scale="inv_sqrt_d_model"),
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_model_that_a_faster_way_cannot_compute_is_named(reason: str) -> None:
    way, config = REFUSED[reason]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert reason in "; ".join(way.obstacles(model))


def test_obstacles_of_the_model_are_in_the_message() -> None:
    policy = qwen()
    policy.config.attn_logit_softcapping = 50.0
    with pytest.raises(FastPathRefused, match=r"Qwen2ForCausalLM does not .*softcapping = 50"):
        built(policy, ON)
