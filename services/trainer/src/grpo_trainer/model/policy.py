"""The policy's side of the importance ratio: log-probabilities of given tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def token_logprobs(policy: Any, inputs: Tensor, targets: Tensor, temperature: Tensor) -> Tensor:
    """Log-probability of each target under the policy, at the temperature that sampled it.

    The plain way, which every other is held against. Padding is on the right and attention is
    causal, so no attention mask is needed.

    Args:
        policy: a causal language model of transformers
        inputs: [B, T] token ids
        targets: [B, T] the tokens one position later
        temperature: [B]
    Returns:
        [B, T] float32
    """
    logits = policy(input_ids=inputs, use_cache=False).logits  # [B, T, V]
    scaled = (logits.float() / temperature.view(-1, 1, 1)).flatten(0, 1)  # [B*T, V]
    losses = functional.cross_entropy(scaled, targets.flatten(), reduction="none")  # [B*T]
    return -losses.view(targets.shape)


def device_of(policy: Any) -> torch.device:
    """Where its weights are, and its inputs must be."""
    device: torch.device = next(policy.parameters()).device
    return device


def model_of(policy: Any) -> Any:
    """The model as transformers made it, without what PEFT wraps around it. The adapter's layers
    are part of it."""
    # Only PEFT's wrapper has that. To ask for its class would load the package without an adapter.
    unwrapped = getattr(policy, "get_base_model", None)
    return policy if unwrapped is None else unwrapped()
