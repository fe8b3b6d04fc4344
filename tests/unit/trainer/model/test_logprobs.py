"""The tolerance of the checks follows from the model's own rounding noise."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from grpo_trainer.model.logprobs import (
    KERNEL_FACTOR,
    LEAST_TOLERANCE,
    kernel_noise,
    logprobs_of,
    probe_tokens,
    tolerance_of,
)


def deep_model(dtype: torch.dtype, layers: int = 24) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def test_a_deep_model_in_bfloat16_gets_a_tolerance_above_its_distance_from_float32() -> None:
    model = deep_model(torch.bfloat16)
    tokens = probe_tokens(512)
    rounded = logprobs_of(model, tokens)
    kernel = model.config._attn_implementation
    tolerance = tolerance_of(model)
    assert model.config._attn_implementation == kernel
    exact = logprobs_of(model.float(), tokens)
    distance = float((rounded - exact).abs().mean())
    assert LEAST_TOLERANCE[torch.bfloat16] < distance < tolerance


def test_float32_keeps_the_least_tolerance() -> None:
    model = deep_model(torch.float32)
    assert 0 < KERNEL_FACTOR * kernel_noise(model) < LEAST_TOLERANCE[torch.float32]
    assert tolerance_of(model) == LEAST_TOLERANCE[torch.float32]


def test_a_model_with_one_kernel_has_the_least_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    model = deep_model(torch.bfloat16)
    model.set_attn_implementation("eager")
    monkeypatch.setattr(type(model), "_supports_sdpa", False)
    assert tolerance_of(model) == LEAST_TOLERANCE[torch.bfloat16]
