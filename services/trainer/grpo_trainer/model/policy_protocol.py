"""The policy's interface: a causal language model of transformers, with or without an adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, Self, cast

import torch
from torch import Tensor, nn

from grpo_trainer.data.group_checks import GroupLimits


class CausalOutput(Protocol):
    """The part of a model call's result that the trainer reads."""

    logits: Tensor  # [B, T, V]


class CausalLM(Protocol):
    """The methods of a policy that the trainer uses. An `nn.Module`; PEFT's wrapper
    forwards them."""

    config: Any
    generation_config: Any

    def __call__(self, **model_inputs: Any) -> CausalOutput: ...

    def eval(self) -> Self: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]: ...

    def state_dict(self) -> Mapping[str, Any]: ...

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]: ...

    def modules(self) -> Iterator[nn.Module]: ...

    def get_submodule(self, target: str) -> nn.Module: ...

    def get_decoder(self) -> nn.Module: ...

    def get_output_embeddings(self) -> nn.Module: ...

    def _set_gradient_checkpointing(
        self, enable: bool, gradient_checkpointing_func: Callable[..., Any]
    ) -> None: ...

    def set_attn_implementation(self, name: str) -> None: ...

    def save_pretrained(self, directory: str | Path, **options: Any) -> object: ...


def device_of(policy: CausalLM) -> torch.device:
    """The device of the policy's weights; its inputs must be there too."""
    return next(policy.parameters()).device


def base_model(policy: CausalLM) -> CausalLM:
    """The transformers model without PEFT's wrapper. The adapter's layers are part of it."""
    # Only PEFT's wrapper has this method. Checking for its class would import PEFT without need.
    unwrapped = getattr(policy, "get_base_model", None)
    return policy if unwrapped is None else cast(CausalLM, unwrapped())


def text_config_of(policy: CausalLM) -> Any:
    """The configuration of the language model; models that also take images nest it."""
    return policy.config.get_text_config()


def vocabulary_of(policy: CausalLM) -> int:
    """Number of token ids."""
    return int(text_config_of(policy).vocab_size)


def end_tokens_of(policy: CausalLM) -> frozenset[int]:
    """Token ids that end a completion; empty if the model names none."""
    configs = (base_model(policy).generation_config, policy.config, text_config_of(policy))
    named = (getattr(config, "eos_token_id", None) for config in configs)
    ends = next((found for found in named if found is not None), ())
    return frozenset([ends] if isinstance(ends, int) else ends)


def limits_of(policy: CausalLM, seq_len: int, recomputes: bool) -> GroupLimits:
    """What groups must keep to, so that the policy can be trained on them."""
    return GroupLimits(vocabulary_of(policy), seq_len, recomputes, end_tokens_of(policy))
