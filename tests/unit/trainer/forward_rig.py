"""Models, a micro-batch of different lengths, and the results of a forward pass on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from grpo_core.tree.objectives import GRPO
from grpo_core.wire.fields import MASKED, PROMPT_LOGPROB
from grpo_core.wire.scored_group import ScoredGroup
from grpo_trainer.advantages import with_advantages
from grpo_trainer.data.collate import Batch, MicroBatch, collate
from grpo_trainer.data.cuts import Cut, by_prefix
from grpo_trainer.data.groups import GroupLimits, sequences_of
from grpo_trainer.model.adapter import trained_parameters, with_adapter
from grpo_trainer.model.forward import ForwardPass
from tests.unit.trainer.tiny_policy import LORA

VOCABULARY = 48
LENGTHS = (9, 1, 5, 2, 16, 4, 16)
"""Lengths in tokens. A single token predicts nothing, so its row is only padding."""
SHARED = (6, 0, 0, 2, 7, 4, 12)
"""How many of them are the beginning of one and the same sequence."""
WINDOW = {
    "use_sliding_window": True,
    "sliding_window": 3,
    "layer_types": ["sliding_attention", "full_attention"],
}
SMALL: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}
"""Configuration of a small model of any architecture."""


def qwen(dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model with two query heads for each key. Its weights are large, so that attention is
    selective and attention between sequences changes the results."""
    torch.manual_seed(0)
    config = Qwen2Config(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "initializer_range": 0.3,
            "tie_word_embeddings": True,
        }
        | changes
    )
    return Qwen2ForCausalLM(config).to(dtype).eval()


def small(config: Callable[..., Any], **changes: Any) -> Any:
    """A small model of an architecture, with large weights."""
    torch.manual_seed(0)
    sizes = {**SMALL, "vocab_size": VOCABULARY, "initializer_range": 0.3, "n_positions": 64}
    model = AutoModelForCausalLM.from_config(config(**sizes, **changes)).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # GPT-2 begins with biases of 0
            nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.1)
    return model


def adapted(dropout: float = 0.0) -> Any:
    policy = with_adapter(qwen(), replace(LORA, dropout=dropout)).eval()
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:  # with B = 0 the adapter would have no effect
            nn.init.normal_(parameter, std=0.1)
    return policy


def ragged_batch(cut: Cut = by_prefix, tokens: int = 1000) -> Batch:
    """One group. The third sequence, and the first two tokens of the others, are not trained on.

    Args: tokens: of a micro-batch
    """
    generator = torch.Generator().manual_seed(1)
    stem = torch.randint(VOCABULARY, (16,), generator=generator).tolist()
    sequences = [
        stem[:shared] + torch.randint(VOCABULARY, (n - shared,), generator=generator).tolist()
        for n, shared in zip(LENGTHS, SHARED, strict=True)
    ]
    masks = [[MASKED] * len(row[:2]) + row[2:] for row in sequences]
    masks[2] = [MASKED] * len(sequences[2])
    group = ScoredGroup(
        tokens=sequences,
        masks=masks,
        scores=[0.1 * i for i in range(len(sequences))],
        inference_logprobs=[
            [PROMPT_LOGPROB if m == MASKED else -2.0 for m in row] for row in masks
        ],
        overrides=[{"temperature": 0.6 + 0.2 * i} for i in range(len(sequences))],
    )
    usable = sequences_of([group], GroupLimits(VOCABULARY, seq_len=64))
    return with_advantages(collate(usable, 64, tokens, cut, GRPO), GRPO)


def ragged() -> MicroBatch:
    return ragged_batch().micro_batches[0]


def outcome(
    policy: Any, forward: ForwardPass, micro: MicroBatch
) -> tuple[Tensor, dict[str, Tensor]]:
    """Logprobs of the trained tokens, and the gradient of their weighted sum. A parameter without a
    gradient counts as one with zeros."""
    for parameter in policy.parameters():
        parameter.grad = None
    logp = forward(policy, micro).logp[micro.token_weight > 0]
    weights = torch.linspace(-1, 2, len(logp))
    (weights * logp).sum().backward()  # type: ignore[no-untyped-call]
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in trained_parameters(policy).items()
    }
    return logp.detach(), gradients


def require_equal(
    found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]
) -> None:
    """Compare float32 results up to rounding; each gradient in units of its largest element."""
    assert float(expected[0].std()) > 0.5
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        size = float(gradient.abs().max())
        assert size > 0, name
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-5 * size, msg=name)
