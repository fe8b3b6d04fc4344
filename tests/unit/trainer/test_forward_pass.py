"""Every way of computing gives the plain way's numbers, or is refused when the run begins."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma2Config, Qwen2ForCausalLM

from grpo_trainer import packed_attention
from grpo_trainer.errors import FastPathRefused
from grpo_trainer.forward_options import Choice, ForwardOptions
from grpo_trainer.forward_pass import (
    FastForward,
    ForwardPass,
    FusedHead,
    build_forward_pass,
    is_taken,
    plain_forward,
)
from grpo_trainer.gradients import accumulate_gradients
from grpo_trainer.layout import packed, padded
from tests.unit.trainer.forward_rig import outcome, qwen, ragged, ragged_batch, require_equal
from tests.unit.trainer.test_fused_head import adapted
from tests.unit.trainer.test_packed_attention import SMALL

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
ON, OFF, AUTO = Choice.ON, Choice.OFF, Choice.AUTO
BOTH = list(product([ON, OFF], repeat=2))
"""Of packing and of the head."""


def built(policy: Any, packing: Choice = OFF, fused_head: Choice = OFF) -> ForwardPass:
    return build_forward_pass(policy, ForwardOptions(packing, fused_head))


def test_what_the_options_stand_for_on_a_cpu() -> None:
    assert built(qwen(), AUTO, AUTO) is plain_forward
    assert built(qwen()) is plain_forward
    assert built(qwen(), ON) == FastForward(layout=packed)
    assert built(qwen(), OFF, ON) == FastForward(padded, FusedHead())
    assert built(qwen(), ON, ON) == FastForward(packed, FusedHead())


@pytest.mark.parametrize(
    ("choice", "device", "tried"),
    [(AUTO, GPU, True), (AUTO, CPU, False), (ON, CPU, True), (OFF, GPU, False)],
)
def test_when_a_faster_way_is_taken(choice: Choice, device: torch.device, tried: bool) -> None:
    calls = []
    assert is_taken("packing", choice, device, lambda: calls.append(1)) is tried
    assert bool(calls) is tried


def refuse() -> None:
    raise FastPathRefused("the model is of clay")


def test_a_refusal_is_said_where_nobody_asked_by_name() -> None:
    with capture_logs() as events:
        assert not is_taken("packing", AUTO, GPU, refuse)
    assert events == [
        {
            "event": "a faster way is not taken",
            "option": "--packing",
            "why": "the model is of clay",
            "log_level": "info",
        }
    ]


def test_a_refusal_ends_the_start_where_it_was_asked_for() -> None:
    with pytest.raises(FastPathRefused) as told:
        is_taken("fused-head", ON, GPU, refuse)
    assert str(told.value) == "--fused-head on, but the model is of clay; use --fused-head off"


@pytest.mark.parametrize("make", [qwen, adapted], ids=["whole model", "adapter"])
@pytest.mark.parametrize(("packing", "fused_head"), BOTH)
def test_values_and_gradients_are_the_plain_ones(
    make: Any, packing: Choice, fused_head: Choice
) -> None:
    policy, micro = make(), ragged()
    expected = outcome(policy, plain_forward, micro)
    require_equal(outcome(policy, built(policy, packing, fused_head), micro), expected)


@pytest.mark.parametrize(("packing", "fused_head"), BOTH)
def test_bfloat16_stays_within_its_rounding(packing: Choice, fused_head: Choice) -> None:
    """Each is about as near to float32 as the plain way is: a temperature that is off by 2 % takes
    the log-probabilities 3.5 times as far away, hidden states in float8 2.5 times and the gradients
    30 times. One way with kernels of different widths is within 1.2."""
    micro = ragged()
    exact, rounded = qwen(), qwen(torch.bfloat16)
    exact.load_state_dict(rounded.state_dict())
    expected = outcome(exact, plain_forward, micro)
    plain = outcome(rounded, plain_forward, micro)
    found = outcome(rounded, built(rounded, packing, fused_head), micro)
    assert distance(found[0], expected[0]) <= 2 * distance(plain[0], expected[0])
    exact_gradient = joined(expected[1])
    limit = 2 * distance(joined(plain[1]), exact_gradient)
    assert distance(joined(found[1]), exact_gradient) <= limit


def distance(a: Tensor, b: Tensor) -> float:
    return float(torch.linalg.vector_norm(a.double() - b.double()))


def joined(gradients: dict[str, Tensor]) -> Tensor:
    """In the order of the model, which is that of every way of computing."""
    return torch.cat([gradient.flatten() for gradient in gradients.values()])


@pytest.mark.parametrize("micro_batch_size", [1, 4, 6])
@pytest.mark.parametrize(("packing", "fused_head"), [(ON, OFF), (OFF, ON), (ON, ON)])
def test_a_step_s_gradient_metrics_and_tokens(
    micro_batch_size: int, packing: Choice, fused_head: Choice
) -> None:
    batch = ragged_batch(micro_batch_size)
    results = []
    for choices in ((OFF, OFF), (packing, fused_head)):
        policy = qwen()
        forward = built(policy, *choices)
        stats = accumulate_gradients(policy, batch, 0.2, step=0, forward=forward)
        results.append((stats, {name: p.grad for name, p in policy.named_parameters()}))
    (plain, expected), (fast, found) = results
    assert fast.loss == pytest.approx(plain.loss, rel=1e-4)
    assert vars(fast.sums) == pytest.approx(vars(plain.sums), rel=1e-4)
    torch.testing.assert_close(fast.tokens.logp, plain.tokens.logp, rtol=1e-5, atol=1e-5)
    assert torch.equal(fast.tokens.sequence, plain.tokens.sequence)
    assert torch.equal(fast.tokens.position, plain.tokens.position)
    require_equal((fast.tokens.logp, found), (plain.tokens.logp, expected))


def test_a_micro_batch_in_which_nothing_counts() -> None:
    policy, micro = qwen(), ragged()
    forward = built(policy, ON, ON)
    nothing = replace(micro, token_weight=torch.zeros_like(micro.token_weight))
    logp = forward(policy, nothing)
    logp.sum().backward()  # type: ignore[no-untyped-call]
    assert logp.shape == micro.targets.shape
    assert not logp.any()
    assert not policy.lm_head.weight.grad.any()


class Hotter(Qwen2ForCausalLM):
    """Does something with its logits that no configuration tells."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = super().forward(*args, **kwargs)
        found.logits = found.logits * 1.1
        return found


def hotter() -> Any:
    policy = qwen()
    policy.__class__ = Hotter
    return policy


def test_a_head_that_does_something_unknown_is_found_by_its_numbers() -> None:
    with pytest.raises(FastPathRefused, match="Hotter then answers otherwise"):
        built(hotter(), OFF, ON)


def sees_its_neighbour(policy: Any) -> Any:
    """Every position takes something of the one before, as convolutions and recurrences do."""
    layer = policy.model.layers[0]
    layer.register_forward_hook(lambda _m, _i, out: out + 0.5 * out.roll(1, dims=1))
    return policy


def test_a_layer_that_mixes_sequences_is_found_by_its_numbers() -> None:
    policy = sees_its_neighbour(qwen())
    with pytest.raises(FastPathRefused, match=r"differ by .* use --packing off"):
        built(policy, ON)
    assert policy.config._attn_implementation == packed_attention.DEFAULT


def test_what_the_model_does_is_in_the_message() -> None:
    model = AutoModelForCausalLM.from_config(Gemma2Config(**SMALL)).eval()
    with pytest.raises(FastPathRefused) as told:
        built(model, ON)
    assert "Gemma2ForCausalLM does not allow it" in str(told.value)
    assert "attn_logit_softcapping = 50" in str(told.value)
    with pytest.raises(FastPathRefused, match="final_logit_softcapping = 30"):
        built(model, OFF, ON)


def test_the_log_says_what_was_chosen() -> None:
    with capture_logs() as events:
        built(qwen(), ON, ON)
    assert events[-1] == {
        "event": "forward pass",
        "packed": True,
        "fused_head": True,
        "compiled": False,
        "log_level": "info",
    }
