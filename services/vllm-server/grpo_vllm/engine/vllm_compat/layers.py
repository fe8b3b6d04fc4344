"""Keeps vLLM's weights in the checkpoint's layout on CPU, and finds what prevents writing in place.

vLLM's CPU build packs linear weights for its kernels and serves from the packed copies, so writing
to the originals has no effect. The plain methods here do not pack: they multiply with the original
tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from vllm.config.load import LoadConfig as LoadConfig
from vllm.config.utils import replace as replace
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader import register_model_loader as register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader as DefaultModelLoader
from vllm.platforms import current_platform as current_platform
from vllm.utils.torch_utils import direct_register_custom_op

from grpo_core import cpu

LOAD_FORMAT = "grpo_shared"
DRAFTS_WITHOUT_WEIGHTS = frozenset({"ngram", "ngram_gpu", "suffix"})
OTHER_MODES = "use --mode lora_only or none"
NAMED_LAYERS = 3
_METHOD = "quant_method"
_CPU_KERNEL = "cpu_linear"


def plain_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `torch.nn.functional.linear`; in float32 by oneDNN, where it is faster."""
    if inputs.dtype != torch.float32 or not cpu.CPU.is_faster_with_onednn:
        return functional.linear(inputs, weight, bias)
    found: Tensor = torch.ops.vllm.grpo_float32_linear(inputs, weight, bias)
    return found


def _onednn_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    found: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")
    return found


# An operator of its own, because torch.compile treats the weight of oneDNN's as a constant.
direct_register_custom_op(
    "grpo_float32_linear",
    _onednn_linear,
    fake_impl=lambda inputs, weight, _: inputs.new_empty(*inputs.shape[:-1], len(weight)),
    dispatch_key="CPU",
)


class PlainLinearMethod(UnquantizedLinearMethod):  # type: ignore[misc]
    def process_weights_after_loading(self, layer: nn.Module) -> None:
        setattr(layer, _CPU_KERNEL, plain_linear)


class PlainEmbeddingMethod(UnquantizedEmbeddingMethod):  # type: ignore[misc]
    def process_weights_after_loading(self, layer: nn.Module) -> None:
        setattr(layer, _CPU_KERNEL, plain_linear)


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
        and getattr(module, _CPU_KERNEL, plain_linear) not in (plain_linear, functional.linear)
    ]


def why_not_shareable(vllm_config: Any, model: nn.Module | None = None) -> list[str]:
    """One line for each option or layer of vLLM that prevents a trainer from writing the weights in
    place, with its fix; [] if there is none. Layers are checked only with `model`."""
    return [
        *_of_the_model(vllm_config, {} if model is None else _special_layers(model)),
        *_of_the_memory(vllm_config.model_config, vllm_config.offload_config),
    ]


def _of_the_model(vllm_config: Any, special_layers: Mapping[str, str]) -> Iterator[str]:
    model_config, speculative = vllm_config.model_config, vllm_config.speculative_config
    quantization, experts = model_config.quantization, model_config.get_num_experts()
    if quantization is None and vllm_config.quant_config is not None:
        quantization = type(vllm_config.quant_config).__name__
    if quantization is not None:
        yield (
            f"quantised weights ({quantization}): vLLM stores these weights in its own form; "
            f"serve the original checkpoint, or {OTHER_MODES}"
        )
    if model_config.use_mla:
        yield (
            "multi-head latent attention (MLA): the server computes with copies of the weights, "
            f"which it makes at its start; {OTHER_MODES}"
        )
    if experts:
        yield (
            f"mixture of experts ({experts}): the server rearranges the experts' weights for "
            "its kernels; use --mode none, or on a GPU lora_only"
        )
    if speculative and speculative.method not in DRAFTS_WITHOUT_WEIGHTS:
        yield (
            f"speculative decoding ({speculative.method}): the trainer does not update the draft "
            f"model; remove --speculative-config, or {OTHER_MODES}"
        )
    if vllm_config.parallel_config.enable_expert_parallel:
        yield "--enable-expert-parallel: a trainer writes only one worker's weights; remove it"
    # Layers of quantised, MLA and expert models are reported above as one obstacle.
    if special_layers and not (quantization or model_config.use_mla or experts):
        named = [f"{name}: {served_by}" for name, served_by in special_layers.items()]
        if len(named) > NAMED_LAYERS:
            named[NAMED_LAYERS:] = [f"and {len(named) - NAMED_LAYERS} more"]
        yield (
            f"a trainer cannot write layers that store weights in their own form "
            f"({', '.join(named)}); {OTHER_MODES}"
        )


def _of_the_memory(model_config: Any, offload: Any) -> Iterator[str]:
    if model_config.enable_sleep_mode:
        yield "--enable-sleep-mode: sleeping would release memory that a trainer shares; remove it"
    elif model_config.enable_cumem_allocator:  # sleep mode implies it
        yield "--enable-cumem-allocator: other processes cannot share its memory; omit it"
    if offload.uva.cpu_offload_gb > 0:
        yield (
            f"--cpu-offload-gb {offload.uva.cpu_offload_gb:g}: weights are in the host's memory "
            "instead of the GPU's; remove this option, or serve a smaller model"
        )
    if offload.prefetch.offload_group_size > 0:
        yield (
            f"--offload-group-size {offload.prefetch.offload_group_size}: layers are copied to the "
            "GPU only when they are needed; remove this option, or serve a smaller model"
        )


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
