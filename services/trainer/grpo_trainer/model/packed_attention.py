"""The attention of packed sequences, registered with transformers under its own name.

On a GPU in a 16-bit type this is torch's flash attention for sequences of different lengths.
Otherwise sequences of nearly the same length go through torch's default attention together. Calls
without packed sequences use transformers' default for whole rows, so padded and packed calls can
alternate.

Legend: B rows, N tokens of the longest row, A heads, D their width; keys and values may have fewer
heads. S sequences of one attention call, Q and K the largest number of their own and of all their
tokens. Attention is causal, so padding on the right needs no mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from grpo_trainer.errors import FastPathRefused
from grpo_trainer.model.packing import AttentionCalls, PackedBounds
from grpo_trainer.model.policy import CausalLM

NAME = "packed_sequences"
DEFAULT = "sdpa"
"""The attention that transformers chooses by default, and with which packing is compared."""
_KNOWN_LAYERS = frozenset({"full_attention", "sliding_attention"})
_CHANGES_SCORES = ("attn_logit_softcapping", "attention_chunk_size", "alibi")
"""Options of a model's configuration that this attention does not support."""
_UNKNOWN_ARGUMENTS = ("softcap", "s_aux", "position_bias", "indices", "block_indices", "cu_seqlens")
"""Arguments that layers of some models pass to their attention; not supported here."""
_FLASH_TYPES = (torch.float16, torch.bfloat16)
_FLASH_CAPABILITY = (8, 0)
_FLASH_WIDTHS = range(8, 257, 8)

Attention = Callable[..., tuple[Tensor, None]]
"""The interface of attention functions in transformers."""


def obstacles(model: CausalLM) -> list[str]:
    """Reasons why packing does not fit the model, as far as its configuration shows them.

    Args: model: the transformers model, without an adapter's wrapper.
    """
    config = model.config.get_text_config()
    found = [
        f"the model's attention has {name} = {value}"
        for name in _CHANGES_SCORES
        if (value := getattr(config, name, None))
    ]
    foreign = set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYERS
    if foreign:
        found.append(f"the model has layers other than attention: {', '.join(sorted(foreign))}")
    if not getattr(config, "is_causal", True):
        found.append("the model's attention is not causal")
    if config._attn_implementation not in (DEFAULT, NAME):
        found.append(
            f"transformers computes the model's attention as {config._attn_implementation!r}"
        )
    if not getattr(model, "_supports_flash_attn", False):
        found.append("flash kernels do not support the model's attention")
    return found


def enable(model: CausalLM) -> None:
    """Make the model's layers call the attention of this file.

    Raises:
        FastPathRefused: they do not use transformers' registry.
    """
    from transformers import AttentionInterface

    device = next(model.parameters()).device
    default = AttentionInterface()[DEFAULT]
    AttentionInterface.register(
        NAME, partial(packed_attention, default=default, flash=Flash.on(device))
    )
    model.set_attn_implementation(NAME)
    if model.config.get_text_config()._attn_implementation != NAME:
        raise FastPathRefused(
            "the model's layers do not use the attention interface of the package transformers"
        )


@dataclass(frozen=True)
class Flash:
    """Torch's flash attention, which takes any strides of its inputs but the last.

    Its backward pass adds up a query's gradients with atomic operations, so their last bits differ
    from one time to the next, unless `torch.use_deterministic_algorithms(True)` was called.

    Args: takes_fewer_heads: whether keys and values may have fewer heads
    """

    takes_fewer_heads: bool

    @classmethod
    def on(cls, device: torch.device) -> Flash | None:
        """None if the device has no such kernels."""
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < _FLASH_CAPABILITY:
            return None
        from torch.nn.attention.varlen import varlen_attn

        return cls("enable_gqa" in inspect.signature(varlen_attn).parameters)  # not in torch 2.11

    def computes(self, query: Tensor, value: Tensor) -> bool:
        width = query.shape[-1]
        return query.dtype in _FLASH_TYPES and width == value.shape[-1] and width in _FLASH_WIDTHS

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bounds: PackedBounds,
        scaling: float | None,
        sliding_window: int | None,
    ) -> Tensor:
        """[1, A, N, D] → [1, N, A, D]"""
        from torch.nn.attention.varlen import varlen_attn

        q, k, v = (_tokens(t) for t in (query, key, value))  # [N, A, D]
        if bounds.key_places is not None:
            k, v = (GatheredKeys.apply(t, *bounds.key_places) for t in (k, v))  # type: ignore[no-untyped-call]
        options: dict[str, Any] = {}
        if q.shape[1] != k.shape[1]:
            if self.takes_fewer_heads:
                options["enable_gqa"] = True
            else:
                k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        # positions to the left and to the right of each; -1: all
        window = (-1 if sliding_window is None else sliding_window - 1, 0)
        found = varlen_attn(
            *(q, k, v),
            *(bounds.queries, bounds.keys),
            *(bounds.longest_queries, bounds.longest_keys),
            scale=scaling,
            window_size=window,
            **options,
        )
        assert isinstance(found, Tensor)  # a tuple only if other outputs are requested
        return found.unsqueeze(0)


class GatheredKeys(torch.autograd.Function):
    """The keys or values of all tokens of all sequences: [N, A, D] → [sum of lengths, A, D].

    A token of a shared beginning is gathered several times. On a GPU `index_select` would add up
    its gradients with atomic operations, in another order each time. Here they are added up one
    after the other, in float32, with one kernel.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, row: Tensor, gathered: Tensor, edges: Tensor) -> Tensor:
        """Args: row, gathered, edges: see `KeyPlaces`"""
        ctx.save_for_backward(gathered, edges)
        return tokens.index_select(0, row)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gathered, edges = ctx.saved_tensors
        found = functional.embedding_bag(
            gathered, gradient.flatten(1), edges, mode="sum", include_last_offset=True
        )  # [N, A * D]
        return found.view(-1, *gradient.shape[1:]), None, None, None


def packed_attention(
    module: nn.Module,
    query: Tensor,  # [B, A, N, D], as key and value
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    default: Attention,
    flash: Flash | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    bounds: PackedBounds | None = None,
    attention_calls: AttentionCalls | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention with the interface of transformers' layers: [B, N, A, D], and no weights.

    Args:
        default: transformers' own attention
        sliding_window: number of tokens that each token attends to, itself included
        bounds, attention_calls: of the packed sequences; None: every row is one sequence

    Raises:
        FastPathRefused: the layer needs an unsupported feature.
    """
    _require_plain(module, attention_mask, dropout, others)
    options = (scaling, sliding_window)
    if bounds is None or attention_calls is None:
        return _causal(default, module, query, key, value, *options), None
    if flash is not None and flash.computes(query, value):
        return flash(query, key, value, bounds, *options), None
    return _gathered(query, key, value, attention_calls, *options), None


def _require_plain(
    module: nn.Module, attention_mask: Tensor | None, dropout: float, others: dict[str, Any]
) -> None:
    found = [
        f"{name} in its attention" for name in _UNKNOWN_ARGUMENTS if others.get(name) is not None
    ]
    if attention_mask is not None:
        found.append("an attention mask of its own")
    if dropout:
        found.append(f"dropout of {dropout} in its attention")
    if False in (others.get("is_causal"), getattr(module, "is_causal", True)):
        found.append("attention that is not causal")
    if found:
        raise FastPathRefused(
            f"packing does not support the layer {type(module).__name__}, which uses "
            f"{', '.join(found)}"
        )


# Not compiled, because torch.compile would fix the number and the lengths of sequences.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _gathered(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    calls: AttentionCalls,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    """Some sequences at a time: [1, A, N, D] → [1, N, A, D]."""
    q, k, v = (_tokens(t) for t in (query, key, value))  # [N, A, D]
    results = []
    planned, places = calls.planned
    masks = calls.masks(sliding_window, query.dtype)
    for call, mask in zip(planned, masks, strict=True):
        found = functional.scaled_dot_product_attention(
            _gather(q, call.queries),
            _gather(k, call.keys),
            _gather(v, call.keys),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )  # [S, A, Q, D]
        results.append(found.transpose(1, 2).flatten(0, 1))  # [S * Q, A, D]
    return torch.cat(results).index_select(0, places).unsqueeze(0)


def _tokens(values: Tensor) -> Tensor:
    """[1, A, N, D] → [N, A, D], a view. An index in its place would copy its gradient."""
    return values.squeeze(0).transpose(0, 1)


def _gather(values: Tensor, places: Tensor) -> Tensor:
    """[N, A, D], [S, Q] → [S, A, Q, D]"""
    found = values.index_select(0, places.flatten())
    return found.view(*places.shape, *values.shape[1:]).transpose(1, 2)


def _causal(
    default: Attention,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    """Every row is one sequence: [B, A, N, D] → [B, N, A, D]."""
    mask, length = None, query.shape[2]
    if sliding_window is not None and length > sliding_window:
        whole = torch.ones(length, length, dtype=torch.bool, device=query.device)
        mask = whole.tril().triu(1 - sliding_window)
    return default(module, query, key, value, mask, scaling=scaling, is_causal=True)[0]
