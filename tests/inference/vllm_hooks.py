"""A table of all parts of vLLM that `grpo_vllm` uses."""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import dataclass
from types import ModuleType
from typing import Any

_NEW_SERVER, _OLD_SERVER = "vllm.entrypoints.launchers", "vllm.entrypoints.openai"
_LAYERS = "vllm.model_executor.layers"

# Owner (a module, or module:class) → attributes. "name(a, b)": it takes these parameters;
# "name ~ words": its source has these words, since only instances have the attribute that we use.
_EVERYWHERE: dict[str, list[str]] = {
    # loading the model
    "vllm.model_executor.model_loader": ["register_model_loader(load_format)"],
    "vllm.model_executor.model_loader.default_loader:DefaultModelLoader": [
        "load_weights(model, model_config) ~ self.get_all_weights(model_config",
        "get_all_weights(model_config, model)",
        "load_model(vllm_config, model_config, prefix) ~ self.load_weights(model",
    ],
    "vllm.config.load:LoadConfig": ["load_format"],
    "vllm.config.utils": ["replace"],
    # layers that serve from the memory into which they were loaded
    f"{_LAYERS}.linear": [
        "UnquantizedLinearMethod.process_weights_after_loading(layer)",
        "LinearBase ~ self.quant_method",
    ],
    f"{_LAYERS}.vocab_parallel_embedding": [
        "UnquantizedEmbeddingMethod.process_weights_after_loading"
    ],
    f"{_LAYERS}.utils": ["cpu_unquantized_gemm ~ cpu_linear"],
    # refusing layers and options that cannot be shared
    f"{_LAYERS}.attention": ["MLAAttention"],
    f"{_LAYERS}.quantization.base_config": ["QuantizeMethodBase"],
    f"{_LAYERS}.quantization.kv_cache": ["BaseKVCacheMethod"],
    "vllm.config:VllmConfig": [
        *("model_config", "parallel_config", "offload_config", "speculative_config"),
        "quant_config",
    ],
    "vllm.config:ModelConfig": [
        *("quantization", "use_mla", "get_num_experts", "enable_sleep_mode"),
        *("enable_cumem_allocator", "is_moe", "get_head_size"),
    ],
    "vllm.model_executor.model_loader.utils": ["get_model_architecture(model_config)"],
    "vllm.model_executor.models.interfaces": ["supports_lora"],
    "vllm.config:ParallelConfig": [
        *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
        *("prefill_context_parallel_size", "enable_expert_parallel", "worker_extension_cls"),
    ],
    "vllm.config": [
        *("OffloadConfig.uva", "UVAOffloadConfig.cpu_offload_gb", "SpeculativeConfig.method"),
        *("OffloadConfig.prefetch", "PrefetchOffloadConfig.offload_group_size"),
        *("CacheConfig.block_size", "DeviceConfig.device_type"),
    ],
    # the platform
    "vllm.platforms:current_platform": [
        *("is_cpu", "is_cuda", "device_name", "is_sleep_mode_available", "get_device_capability")
    ],
    # vLLM's own routes
    "vllm.utils.argparse_utils": ["FlexibleArgumentParser"],
    "vllm.entrypoints.serve.utils.api_utils": ["cli_env_setup"],
    "vllm.entrypoints.openai.models.serving:OpenAIServingModels": ["__init__ ~ self.lora_requests"],
    # a fork server that has imported everything
    "vllm.v1.engine.core": [""],
    "vllm.v1.executor.uniproc_executor": [""],
    "vllm.v1.worker.gpu_worker": ["Worker.get_model"],
    # the engine
    "vllm.usage.usage_lib:UsageContext": ["OPENAI_API_SERVER"],
    "vllm.engine.arg_utils:AsyncEngineArgs": [
        *("from_cli_args", "create_engine_config(usage_context)"),
        *("enable_log_requests", "disable_log_stats"),
    ],
    "vllm.v1.engine.async_llm:AsyncLLM": [
        "from_vllm_config(vllm_config, usage_context, enable_log_requests, disable_log_stats)",
        "__init__ ~ self.vllm_config",
        "__init__ ~ self.model_config",
        "generate(prompt, sampling_params, request_id, lora_request)",
        *("pause_generation(mode, clear_cache)", "resume_generation", "reset_prefix_cache"),
        *("add_lora(lora_request)", "remove_lora(lora_id)", "collective_rpc(method, kwargs)"),
        *("sleep", "wake_up", "errored", "shutdown(timeout)"),
        *("get_supported_tasks", "get_tokenizer"),
    ],
    # requests
    "vllm.sampling_params:SamplingParams": [
        *("logprob_token_ids", "skip_reading_prefix_cache", "structured_outputs")
    ],
    "vllm.sampling_params": [
        *("StructuredOutputsParams.grammar", "RequestOutputKind.DELTA"),
        "RequestOutputKind.FINAL_ONLY",
    ],
    "vllm.inputs": ["TokensPrompt"],
    "vllm.tokenizers.protocol:TokenizerLike": ["max_chars_per_token"],
    "vllm.v1.sample.logits_processor": [
        "LogitsProcessor.validate_params(sampling_params)",
        "validate_logits_processors_parameters",
    ],
    "vllm.v1.engine.exceptions": ["EngineDeadError", "EngineGenerateError"],
    "vllm.lora.request": ["LoRARequest(lora_name, lora_int_id, lora_path)"],
    # switches and counters
    "vllm.envs": [
        *("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_WORKER_MULTIPROC_METHOD"),
        "VLLM_LORA_DISABLE_PDL",
    ],
    "vllm.v1.metrics.loggers": [' ~ "vllm:generation_tokens"'],
}
_SINCE_0_32 = {
    # loading weights into the running engine
    "vllm.distributed.weight_transfer.factory": [
        "WeightTransferEngineFactory.register_engine(name, module_path_or_cls, class_name)"
    ],
    "vllm.distributed.weight_transfer.base": [
        *("WeightTransferEngine", "WeightTransferInitInfo", "WeightTransferUpdateInfo"),
        *("WeightTransferEngine.parse_update_info", "WeightTransferEngine.__init__ ~ self.model"),
    ],
    "vllm.model_executor.model_loader.reload": [
        *("initialize_layerwise_reload(model)", "finalize_layerwise_reload"),
    ],
    f"{_LAYERS}.vocab_parallel_embedding": ["ParallelLMHead"],
    "vllm.v1.worker.gpu_worker": [
        *("Worker.start_weight_update", "Worker.update_weights(update_info)"),
        "Worker.finish_weight_update",
    ],
    "vllm.v1.engine.async_llm:AsyncLLM": [
        *("update_weight_version", "start_weight_update"),
        "pause_generation ~ self.renderer.clear_mm_cache_async()",
        "pause_generation ~ self.engine_core.pause_scheduler_async(mode=mode, clear_cache=clear",
    ],
    "vllm.v1.engine.output_processor": [
        "OutputProcessor ~ self.request_states",
        "RequestState ~ self.max_tokens_param",
    ],
    "vllm.outputs:CompletionOutput": ["weight_versions"],
    "vllm.exceptions": ["VLLMClientError"],
}
_ON_CPU = {
    "vllm.v1.worker.cpu_worker": [""],
    # adapters, computed by a class that the platform names
    "vllm.platforms": ["cpu_platform_plugin", " ~ PLATFORM_PLUGINS_GROUP"],
    "vllm.platforms.cpu:CpuPlatform": ["get_punica_wrapper"],
    "vllm.lora.punica_wrapper.punica_selector": [
        "get_punica_wrapper ~ current_platform.get_punica_wrapper()"
    ],
    "vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU": [
        "update_metadata(mapping, lora_index_to_id, max_loras, vocab_size)",
        *("token_lora_indices", "add_lora_logits"),
        "add_lora_linear(y, x, lora_a_stacked, lora_b_stacked, scale, output_slices)",
    ],
    "vllm.lora.model_manager": [" ~ lora_config=self.lora_config,"],
    "vllm.utils.torch_utils": [
        "direct_register_custom_op(op_name, op_func, mutates_args, fake_impl, dispatch_key)"
    ],
    # small blocks of the KV cache
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackend": [
        *("get_supported_head_sizes", "get_supported_kernel_block_sizes")
    ],
    "vllm.v1.attention.backends.registry": [
        *("register_backend(backend, class_path)", "AttentionBackendEnum.CPU_ATTN")
    ],
    "vllm.v1.attention.backend": ["MultipleOf"],
    "vllm.platforms:CpuArchEnum": ["X86"],
}
_ON_CUDA = {"vllm.platforms.cuda:NvmlCudaPlatform": ["get_device_capability ~ pynvml"]}
# Places that moved between versions: one of them must exist.
_MOVED = [
    *(
        [f"{_NEW_SERVER}.cli_args:{name}", f"{_OLD_SERVER}.cli_args:{name}"]
        for name in ("make_arg_parser", "validate_parsed_serve_args")
    ),
    [
        f"{place}:build_app(args, supported_tasks, model_config)"
        for place in (f"{_NEW_SERVER}.app", f"{_OLD_SERVER}.api_server")
    ],
    [
        f"{place}:init_app_state(engine_client, state, args, supported_tasks)"
        for place in (f"{_NEW_SERVER}.api_server.app_state", f"{_OLD_SERVER}.api_server")
    ],
    [
        "vllm.entrypoints.serve.exception_handling.handlers.vllm_error ~ app.state.server",
        "vllm.entrypoints.serve.utils.server_utils ~ app.state.server",
    ],
]


@dataclass(frozen=True)
class Hook:
    """One of `places` must exist, from vLLM `since` on, if vLLM is built for `device`."""

    places: tuple[str, ...]
    since: tuple[int, int] = (0, 24)
    device: str | None = None

    def problem(self) -> str | None:
        """The name of the missing part; None if nothing is missing."""
        problems = [_problem_at(place) for place in self.places]
        return None if None in problems else " and ".join(map(str, problems))


def _hooks(table: dict[str, list[str]], **conditions: Any) -> list[Hook]:
    return [
        Hook((f"{owner}{'.' if ':' in owner else ':'}{attribute}",), **conditions)
        for owner, attributes in table.items()
        for attribute in attributes
    ]


HOOKS = [
    *_hooks(_EVERYWHERE),
    *_hooks(_SINCE_0_32, since=(0, 32)),
    *_hooks(_ON_CPU, device="cpu"),
    *_hooks(_ON_CUDA, device="cuda"),
    *(Hook(tuple(places)) for places in _MOVED),
]

_PLACE = re.compile(r"([\w.]+):?([\w.]*)(?:\((.*?)\))?(?: ~ (.*))?")


def module_and_path(place: str) -> tuple[str, str]:
    module, path, _, _ = _parsed(place)
    return module, path


def _parsed(place: str) -> tuple[str, str, str, str]:
    found = _PLACE.fullmatch(place)
    assert found, f"not a place of the table: {place}"
    module, path, parameters, words = found.groups(default="")
    return module, path, parameters, words


def _problem_at(place: str) -> str | None:
    module_name, path, parameters, words = _parsed(place)
    found: Any = _imported(module_name)
    if found is None:
        return f"there is no module {module_name}"
    for attribute in filter(None, path.split(".")):
        if not _has(found, attribute):
            return f"{module_name}: {found} has no {attribute}"
        found = getattr(found, attribute, None)
    if parameters:
        missing = {*parameters.split(", ")} - {*inspect.signature(found).parameters}
        if missing:
            return f"{module_name}:{path} takes no {', '.join(sorted(missing))}"
    if words and words not in inspect.getsource(found):
        return f"{module_name}:{path} does not say {words}"
    return None


def _imported(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a dependency of vLLM is missing, not a part of vLLM
        return None


def _has(owner: Any, attribute: str) -> bool:
    """An inherited abstract attribute does not count. A dataclass field without a default counts,
    although the class has no such attribute."""
    if getattr(getattr(owner, attribute, None), "__isabstractmethod__", False):
        return False
    return hasattr(owner, attribute) or attribute in getattr(owner, "__dataclass_fields__", ())
