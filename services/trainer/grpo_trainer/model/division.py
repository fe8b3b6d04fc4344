"""The policy's whole tensors, one at a time."""

from __future__ import annotations

from collections.abc import Container, Iterator

from torch import Tensor

from grpo_trainer.model.policy import CausalLM


def model_tensors(policy: CausalLM) -> dict[str, Tensor]:
    """The tensors of a saved model by name: parameters, each once, and persistent buffers, for
    example the correction of a router."""
    saved = policy.state_dict()
    buffers = {name: buffer for name, buffer in policy.named_buffers() if name in saved}
    return dict(policy.named_parameters()) | buffers


def whole_tensors(
    policy: CausalLM, names: Container[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of `model_tensors`, without gradient, on the policy's device. Rank 0 alone calls
    it.

    Args: names: of the wanted tensors; None: all
    """
    for name, tensor in model_tensors(policy).items():
        if names is None or name in names:
            yield name, tensor.detach()
