"""Tiny models with the properties of real ones: their families, vocabularies and heads.

The tokenizer is that of the tiny model, so a real vocabulary has more rows than the tokenizer has
tokens. The weights are random.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from grpo_tiny_model.model import build_tokenizer

SMOLLM2_VOCABULARY, QWEN2_VOCABULARY = 49_152, 151_936
ATTENTION = ("q_proj", "v_proj")
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.05,
}


@dataclass(frozen=True)
class Shape:
    """Args:
    config: transformers' configuration of the family
    vocabulary: rows of the embedding
    tied: the embedding is the head too
    adapted: modules that get an adapter
    changes: further values of the configuration
    """

    config: Callable[..., Any]
    vocabulary: int = SMOLLM2_VOCABULARY
    tied: bool = True
    adapted: tuple[str, ...] = ATTENTION
    changes: dict[str, Any] = field(default_factory=dict)

    def save(self, directory: Path) -> Path:
        """Write the model, in float32, and its tokenizer."""
        torch.manual_seed(0)
        tokenizer = build_tokenizer()
        tokens = {
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
        }
        words = {"vocab_size": self.vocabulary, "tie_word_embeddings": self.tied}
        config = self.config(**SIZES | words | tokens | self.changes)
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        return directory


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
GPT2 = {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 512}
SHAPES = {
    "Llama": Shape(LlamaConfig),
    "Llama, untied": Shape(LlamaConfig, tied=False),
    "Qwen2": Shape(Qwen2Config, QWEN2_VOCABULARY),
    "Qwen2, untied": Shape(Qwen2Config, QWEN2_VOCABULARY, tied=False),
    "Qwen3": Shape(Qwen3Config, QWEN2_VOCABULARY, changes={"head_dim": 32}),
    "Gemma 3": Shape(Gemma3TextConfig, changes={"head_dim": 32, "sliding_window": 16}),
    "Mistral": Shape(MistralConfig, tied=False, changes={"head_dim": 32}),
    "SmolLM3": Shape(SmolLM3Config),
    "Phi-3": Shape(Phi3Config, tied=False, adapted=("qkv_proj", "o_proj")),
    "GPT-2": Shape(GPT2Config, adapted=("c_attn",), changes=GPT2),
    "OLMo 2": Shape(Olmo2Config, tied=False),
    "Qwen3 MoE": Shape(Qwen3MoeConfig, changes=EXPERTS),
}
