"""Finds a model's transformer layers, freezes all other weights, and recomputes layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from grpo_trainer.errors import FastPathRefused, PolicyMismatch
from grpo_trainer.model.policy_protocol import CausalLM

CHUNK_ELEMENTS = 1 << 24
"""Elements that are summed at a time: the sum may need a copy in 64 bits."""
_INTEGERS = {2: torch.int16, 4: torch.int32}
_LISTS = ("layers", "h")
"""Names of the list of layers in transformers' decoders; GPT-2 and Falcon call it h."""


def layers_of(model: CausalLM) -> nn.ModuleList | None:
    """The layers, or None if the model has no list of them.

    Args:
        model: the transformers model, without an adapter's wrapper
    """
    decoder = model.get_decoder()
    found = (getattr(decoder, name, None) for name in _LISTS)
    return next((layers for layers in found if isinstance(layers, nn.ModuleList)), None)


def train_only(model: CausalLM, indices: tuple[int, ...]) -> None:
    """Freeze every parameter outside the layers with these indices. A frozen parameter has no
    gradient, and the optimizer does not include it.

    Raises:
        PolicyMismatch: the model has no such layers; names all of them.
    """
    layers = layers_of(model)
    if layers is None:
        raise PolicyMismatch(
            f"--train-layer-indices: {type(model).__name__} has no list of layers; omit the option"
        )
    beyond = [index for index in indices if index >= len(layers)]
    if beyond:
        raise PolicyMismatch(
            f"--train-layer-indices {beyond}: the model has layers 0 to {len(layers) - 1}"
        )
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for index in indices:
        layers[index].requires_grad_(True)


@torch.no_grad()
def frozen_checksum(model: CausalLM) -> int:
    """A checksum of all frozen parameters; 0 if there are none. It depends on their bits and on
    their order."""
    frozen = [p for p in model.parameters() if not p.requires_grad]
    return sum(place * _sum_of_bits(p) for place, p in enumerate(frozen, 1))


def _sum_of_bits(tensor: Tensor) -> int:
    integers = _INTEGERS[tensor.element_size()]
    parts = torch.split(tensor.reshape(-1).view(integers), CHUNK_ELEMENTS)
    return sum(int(part.sum(dtype=torch.int64)) for part in parts)


def recompute_layers(model: CausalLM) -> None:
    """Compute each layer again in the backward pass, instead of storing its activations
    (arXiv 1604.06174).

    Args:
        model: the transformers model, without an adapter's wrapper
    Raises:
        FastPathRefused: the model does not support it.
    """
    layers = layers_of(model)
    if layers is None or not getattr(model, "supports_gradient_checkpointing", False):
        raise FastPathRefused(
            f"--gradient-checkpointing: {type(model).__name__} does not support it; omit the option"
        )
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in layers:
        # transformers recomputes only layers in training mode. The modules inside a layer, such as
        # dropout, stay in evaluation mode.
        layer.training = True
