"""Estimates the memory that a step needs for a short time: activations, logits and buffers.

The activations are those of a layer of Llama or Qwen2: two norms, attention with rotary positions,
and a gated MLP. Other architectures differ by up to a quarter.

Legend: H hidden size, Q and K widths of all queries and of all keys, I size of the MLP, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_trainer.model.fused_head import CHUNK_LOGITS

FLOAT32_BYTES = 4
FUSED_COPIES, PLAIN_COPIES = 2, 3
"""Copies of the logits in float32 beside those in the model's type: scaled by the temperature and
normalised; in the plain head also their gradient."""


@dataclass(frozen=True)
class LayerSizes:
    """`element`: bytes of an activation."""

    hidden: int
    queries: int
    keys: int
    mlp: int
    vocabulary: int
    element: int

    @classmethod
    def of(cls, config: Any, element: int) -> LayerSizes:
        """Args: config: transformers' configuration of the text model."""
        heads = config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        key_heads = getattr(config, "num_key_value_heads", None) or heads
        return cls(
            hidden=config.hidden_size,
            queries=heads * width,
            keys=key_heads * width,
            mlp=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
            vocabulary=config.vocab_size,
            element=element,
        )

    @property
    def activations(self) -> int:
        """Bytes per token that the backward pass of one layer needs."""
        # Each norm stores its input in float32, and its result before and after the weight.
        # Attention stores queries, keys, values and its result. The MLP stores the gate, the gate's
        # activation, the other half, and their product.
        norms = 2 * self.hidden * (FLOAT32_BYTES + 2 * self.element)
        return norms + self.element * (2 * self.queries + 2 * self.keys + 4 * self.mlp)

    @property
    def layer_input(self) -> int:
        """Bytes per token that are stored of a layer that is computed again."""
        return self.element * self.hidden

    def head(self, tokens: int, is_fused: bool, is_trained: bool) -> int:
        """Bytes that the output layer needs for the logits, and for the gradient of its weights."""
        logits = tokens * self.vocabulary
        at_once = min(logits, CHUNK_LOGITS) if is_fused else logits
        weights = self.vocabulary * self.hidden if is_trained else 0
        copies = FUSED_COPIES if is_fused else PLAIN_COPIES
        per_weight = self.element + FLOAT32_BYTES * is_fused  # the fused head sums in float32
        return at_once * (self.element + copies * FLOAT32_BYTES) + weights * per_weight


def pass_bytes(
    sizes: LayerSizes,
    tokens: int,
    layers: int,
    is_recomputed: bool,
    is_fused: bool,
    trains_head: bool,
) -> int:
    """Highest memory of a forward and backward pass beside the kept bytes.

    Args:
        tokens: of a micro-batch
        layers: number of layers from the lowest trained one to the last; the others store nothing
        is_recomputed: with --gradient-checkpointing
        is_fused: with --fused-head
    """
    head = sizes.head(tokens, is_fused, trains_head)
    if not is_recomputed:
        return tokens * layers * sizes.activations + head
    # The head's backward pass comes first; then one layer at a time is computed again.
    return tokens * layers * sizes.layer_input + max(head, tokens * sizes.activations)


def update_bytes(
    trained: Sequence[Tensor], master_dtype: str, is_summed: bool, decays: bool
) -> int:
    """Buffers of the update, which takes one parameter at a time: float32 copies of the largest.

    Args:
        is_summed: the gradients are sums, which are in float32
        decays: with weight decay
    """
    has_wide_gradient = is_summed or trained[0].dtype == torch.float32
    copies = 1 + (master_dtype != "float32") + (not has_wide_gradient) + decays
    return copies * FLOAT32_BYTES * max(p.numel() for p in trained)
