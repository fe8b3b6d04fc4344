"""Keeps weights in the layout of the checkpoint on CPU.

vLLM's CPU build packs linear weights for its kernels and serves from the packed copies; writing
to the originals then changes nothing. These methods leave the tensor where it is and multiply
with `torch.nn.functional.linear`.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from grpo_vllm.engine.vllm_compat import UnquantizedEmbeddingMethod, UnquantizedLinearMethod

_METHOD = "quant_method"
_CPU_KERNEL = "cpu_linear"


class PlainLinearMethod(UnquantizedLinearMethod):  # type: ignore[misc]
    def process_weights_after_loading(self, layer: nn.Module) -> None:
        setattr(layer, _CPU_KERNEL, functional.linear)


class PlainEmbeddingMethod(UnquantizedEmbeddingMethod):  # type: ignore[misc]
    def process_weights_after_loading(self, layer: nn.Module) -> None:
        setattr(layer, _CPU_KERNEL, functional.linear)


def use_plain_layout(model: nn.Module) -> None:
    """Swap the method of every unquantised layer; others are left for the arena check to name."""
    plain = {
        UnquantizedLinearMethod: PlainLinearMethod,
        UnquantizedEmbeddingMethod: PlainEmbeddingMethod,
    }
    for module in model.modules():
        method = plain.get(type(getattr(module, _METHOD, None)))
        if method is not None:
            setattr(module, _METHOD, method())


def packed_layers(model: nn.Module) -> list[str]:
    """Names of layers that multiply with something else than their own weight (CPU only)."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(getattr(module, "weight", None), torch.Tensor)
        and getattr(module, _CPU_KERNEL, functional.linear) is not functional.linear
    ]
