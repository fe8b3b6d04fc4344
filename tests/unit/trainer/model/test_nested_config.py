"""Models that also take images nest the configuration of their language model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3Config

from grpo_trainer.config.forward import ForwardOptions
from grpo_trainer.model.adapter import trained_parameters, with_adapter
from grpo_trainer.model.forward import _probe_batch, build_forward_pass
from grpo_trainer.model.logprobs import logprobs_of, sampled_tokens, tolerance_of
from grpo_trainer.model.policy import end_tokens_of, vocabulary_of
from tests.unit.trainer.tiny_policy import LORA

TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "head_dim": 8,
}
IMAGES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


@pytest.mark.parametrize("is_adapted", [False, True])
def test_the_language_model_of_gemma_3_is_trained(is_adapted: bool) -> None:
    torch.manual_seed(0)
    config = Gemma3Config(text_config=TEXT, vision_config=IMAGES, mm_tokens_per_image=4)
    policy: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    assert vocabulary_of(policy) == 97
    assert end_tokens_of(policy)
    if is_adapted:
        policy = with_adapter(policy, LORA).eval()
    assert tolerance_of(policy) > 0
    assert len(logprobs_of(policy, sampled_tokens(policy))) == 31
    forward = build_forward_pass(policy, ForwardOptions())
    forward(policy, _probe_batch(97)).logp.sum().backward()  # type: ignore[no-untyped-call]
    assert any(p.grad is not None for p in trained_parameters(policy).values())
