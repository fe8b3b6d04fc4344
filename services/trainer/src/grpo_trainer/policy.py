"""The policy's side of the importance ratio: log-probabilities of given tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional


def token_logprobs(policy: Any, inputs: Tensor, targets: Tensor, temperature: Tensor) -> Tensor:
    """Log-probability of each target under the policy, at the temperature that sampled it.

    Padding is on the right and attention is causal, so no attention mask is needed.

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
