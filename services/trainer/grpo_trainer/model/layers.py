"""Finds a model's transformer layers, freezes all other weights, and recomputes layers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from grpo_trainer.errors import FastPathRefused, PolicyMismatch
from grpo_trainer.model.policy_protocol import CausalLM

CHUNK_ELEMENTS = 1 << 24
"""Elements that are summed at a time: the sum may need a copy in 64 bits."""
BASE_ELEMENTS = 4096
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


@torch.no_grad()
def base_checksum(model: CausalLM) -> int:
    """The same of a few elements of each frozen parameter, rounded to bfloat16: enough to recognise
    another model below an adapter, in any data type."""
    frozen = [p for p in model.parameters() if not p.requires_grad]
    return sum(
        place * _sum_of_bits(middle(p, BASE_ELEMENTS).to(torch.bfloat16))
        for place, p in enumerate(frozen, 1)
    )


def middle(tensor: Tensor, elements: int) -> Tensor:
    """[n ≤ elements] Some elements in the middle: the first row of an embedding may never be
    trained."""
    start = max(0, tensor.numel() - elements) // 2
    return tensor.reshape(-1)[start : start + elements]


def _sum_of_bits(tensor: Tensor) -> int:
    integers = _INTEGERS[tensor.element_size()]
    parts = torch.split(tensor.reshape(-1).view(integers), CHUNK_ELEMENTS)
    return sum(int(part.sum(dtype=torch.int64)) for part in parts)


def prepare_recomputing(model: CausalLM) -> None:
    """Call this once before `recomputing`. It changes nothing yet.

    Args:
        model: the transformers model, without an adapter's wrapper

    Raises:
        FastPathRefused: the model does not support it.
    """
    if layers_of(model) is None or not getattr(model, "supports_gradient_checkpointing", False):
        raise FastPathRefused(
            f"--gradient-checkpointing: {type(model).__name__} does not support it; omit the option"
        )
    model._set_gradient_checkpointing(True, _checkpointed)


@contextlib.contextmanager
def recomputing(model: CausalLM) -> Iterator[None]:
    """Compute each layer that is called in this context again in the backward pass, instead of
    storing its activations (arXiv 1604.06174).

    transformers recomputes layers in training mode only, and drops their cache. So a layer is in
    training mode from here to its call and no longer: neither what it computes nor what is sampled
    with the model may depend on it.

    Args:
        model: the transformers model that was given to `prepare_recomputing`
    """
    layers = layers_of(model)
    assert layers is not None
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False


def _checkpointed(run: partial[Tensor], *inputs: Tensor) -> Tensor:
    """Args: run: the call of a layer, as transformers' `GradientCheckpointingLayer` passes it"""
    run.func.__self__.training = False  # type: ignore[attr-defined]
    return checkpoint(run, *inputs, use_reentrant=False)  # type: ignore[no-any-return]
