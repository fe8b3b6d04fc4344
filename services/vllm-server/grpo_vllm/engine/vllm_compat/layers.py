"""Keeps vLLM's weights in the checkpoint's layout on CPU, and reports layers that change it.

vLLM's CPU build packs linear weights for its kernels and serves from the packed copies, so writing
to the originals has no effect. The plain methods here do not pack: they multiply with the original
tensor by `torch.nn.functional.linear`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from vllm.config.load import LoadConfig
from vllm.config.utils import replace as replace_config
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.platforms import current_platform

from grpo_vllm.weights.in_place_checks import LayoutFacts

__all__ = [
    "DefaultModelLoader",
    "LoadConfig",
    "current_platform",
    "layout_facts",
    "packed_layers",
    "register_model_loader",
    "replace_config",
    "use_plain_layout",
]

PARALLEL_SIZES = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "prefill_context_parallel_size",
)
DRAFTS_WITHOUT_WEIGHTS = frozenset({"ngram", "ngram_gpu", "suffix"})
_METHOD = "quant_method"
_CPU_KERNEL = "cpu_linear"


class PlainLinearMethod(UnquantizedLinearMethod):  # type: ignore[misc]
    def process_weights_after_loading(self, layer: nn.Module) -> None:
        setattr(layer, _CPU_KERNEL, functional.linear)


class PlainEmbeddingMethod(UnquantizedEmbeddingMethod):  # type: ignore[misc]
    def process_weights_after_loading(self, layer: nn.Module) -> None:
        setattr(layer, _CPU_KERNEL, functional.linear)


def use_plain_layout(model: nn.Module) -> None:
    """Replace the method of every unquantised layer. `SharedModelLoader` reports other layers."""
    plain = {
        UnquantizedLinearMethod: PlainLinearMethod,
        UnquantizedEmbeddingMethod: PlainEmbeddingMethod,
    }
    for module in model.modules():
        method = plain.get(type(getattr(module, _METHOD, None)))
        if method is not None:
            setattr(module, _METHOD, method())


def packed_layers(model: nn.Module) -> list[str]:
    """Names of layers that multiply with a packed copy instead of their own weight (CPU only)."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(getattr(module, "weight", None), torch.Tensor)
        and getattr(module, _CPU_KERNEL, functional.linear) is not functional.linear
    ]


def layout_facts(vllm_config: Any, model: nn.Module | None = None) -> LayoutFacts:
    """Facts that decide whether weights can be shared. Layers are included only with `model`."""
    model_config, parallel = vllm_config.model_config, vllm_config.parallel_config
    offload, speculative = vllm_config.offload_config, vllm_config.speculative_config
    quantization = model_config.quantization
    if quantization is None and vllm_config.quant_config is not None:
        quantization = type(vllm_config.quant_config).__name__
    return LayoutFacts(
        quantization=quantization,
        latent_attention=model_config.use_mla,
        experts=model_config.get_num_experts(),
        parallel_sizes={name: getattr(parallel, name) for name in PARALLEL_SIZES},
        expert_parallel=parallel.enable_expert_parallel,
        sleep_mode=model_config.enable_sleep_mode,
        cumem_allocator=model_config.enable_cumem_allocator,
        uva_offload_gb=offload.uva.cpu_offload_gb,
        prefetch_offload_groups=offload.prefetch.offload_group_size,
        draft=speculative.method if speculative and _has_weights(speculative) else None,
        special_layers={} if model is None else _special_layers(model),
    )


def _has_weights(speculative: Any) -> bool:
    return speculative.method not in DRAFTS_WITHOUT_WEIGHTS


def _special_layers(model: nn.Module) -> dict[str, str]:
    """Layers that may store their weights in another form than the checkpoint: layer name → name of
    the class that serves it."""
    from vllm.model_executor.layers.attention import MLAAttention
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

    harmless = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, BaseKVCacheMethod)
    special: dict[str, str] = {}
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(module, MLAAttention):
            special[name] = type(module).__name__
        elif isinstance(method, QuantizeMethodBase) and not isinstance(method, harmless):
            special[name] = type(method).__name__
    return special
