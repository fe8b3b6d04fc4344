"""The policy's interface: a causal language model of transformers, with or without an adapter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, Self, cast

import torch
from torch import Tensor, nn


class CausalOutput(Protocol):
    """What a model call returns, as far as the trainer reads it."""

    logits: Tensor  # [B, T, V]


class CausalLM(Protocol):
    """What the trainer uses of a policy. An `nn.Module`; PEFT's wrapper passes the rest on."""

    config: Any
    generation_config: Any

    def __call__(self, **model_inputs: Any) -> CausalOutput: ...

    def eval(self) -> Self: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]: ...

    def modules(self) -> Iterator[nn.Module]: ...

    def get_submodule(self, target: str) -> nn.Module: ...

    def get_decoder(self) -> nn.Module: ...

    def get_output_embeddings(self) -> nn.Module: ...

    def set_attn_implementation(self, name: str) -> None: ...

    def save_pretrained(self, directory: str | Path, **options: Any) -> object: ...


def device_of(policy: CausalLM) -> torch.device:
    """Where its weights are, and its inputs must be."""
    return next(policy.parameters()).device


def base_model(policy: CausalLM) -> CausalLM:
    """The model as transformers made it, without what PEFT wraps around it. The adapter's layers
    are part of it."""
    # Only PEFT's wrapper has that. To ask for its class would load the package without an adapter.
    unwrapped = getattr(policy, "get_base_model", None)
    return policy if unwrapped is None else cast(CausalLM, unwrapped())
