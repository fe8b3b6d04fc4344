"""Everything of vLLM that `grpo_vllm` hangs on, as a table: an entry per module or attribute."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Hook:
    """`place`: module, or module:attribute.attribute; the newest vLLM's place first, then those of
    older versions, with "or" between them.

    `purpose`: what we need it for; `parameters`: what we call it with; `mentions`: what its code
    must do, where only instances show it; `since`: the first vLLM that has it; `device`: where it
    can be looked at, None for anywhere.
    """

    place: str
    purpose: str
    parameters: tuple[str, ...] = ()
    mentions: str = ""
    since: tuple[int, int] = (0, 24)
    device: str | None = None

    def problem(self) -> str | None:
        """What is missing, by name; None where all of it is there."""
        problems = [self._problem_at(place) for place in self.places()]
        return None if None in problems else f"{' and '.join(map(str, problems))}: {self.purpose}"

    def places(self) -> list[str]:
        return self.place.split(" or ")

    def _problem_at(self, place: str) -> str | None:
        module_name, _, path = place.partition(":")
        module = _imported(module_name)
        if module is None:
            return f"there is no module {module_name}"
        found: Any = module
        reached = module_name
        for attribute in path.split(".") if path else ():
            if not _has(found, attribute):
                return f"{reached} has no {attribute}"
            found, reached = getattr(found, attribute, None), f"{reached}.{attribute}"
        if self.parameters:
            missing = sorted({*self.parameters} - {*inspect.signature(found).parameters})
            if missing:
                return f"{reached} takes no {', '.join(missing)}"
        if self.mentions and self.mentions not in inspect.getsource(found):
            return f"{reached} does not say {self.mentions}"
        return None


def _imported(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a dependency of vLLM's is not there, which is another matter
        return None


def _has(owner: Any, attribute: str) -> bool:
    """What a class only promises in the name of its base is not there; fields of dataclasses that
    have no default are no attributes of the class."""
    if getattr(getattr(owner, attribute, None), "__isabstractmethod__", False):
        return False
    return hasattr(owner, attribute) or attribute in getattr(owner, "__dataclass_fields__", ())


_LOADING = "the load format of shared weights"
_PLAIN = "weights that are served from where they were loaded"
_ENGINE = "starting the engine and asking it"
_ROUTES = "vLLM's own routes"
_BRIDGE = "pausing for an update"
_REQUESTS = "POST /generate"
_LAYOUT = "refusing models and options that cannot be shared"
_ADAPTERS = "LoRA adapters"
_ENGINE_ARGS = "vllm.engine.arg_utils"
_ASYNC_LLM = "vllm.v1.engine.async_llm:AsyncLLM"
_DEFAULT_LOADER = "vllm.model_executor.model_loader.default_loader:DefaultModelLoader"
_LINEAR = "vllm.model_executor.layers.linear"
_EMBEDDING = "vllm.model_executor.layers.vocab_parallel_embedding"
_PROCESSORS = "vllm.v1.sample.logits_processor"

HOOKS = [
    # 1. model loading
    Hook("vllm.model_executor.model_loader:register_model_loader", _LOADING, ("load_format",)),
    Hook(f"{_DEFAULT_LOADER}.load_weights", _LOADING, ("model", "model_config")),
    Hook(f"{_DEFAULT_LOADER}.load_weights", _LOADING, mentions="self.get_all_weights(model_config"),
    Hook(f"{_DEFAULT_LOADER}.get_all_weights", _LOADING, ("model_config", "model")),
    Hook(f"{_DEFAULT_LOADER}.load_model", _LOADING, ("vllm_config", "model_config", "prefix")),
    Hook(f"{_DEFAULT_LOADER}.load_model", _LOADING, mentions="self.load_weights(model"),
    Hook("vllm.config.load:LoadConfig.load_format", _LOADING),
    Hook("vllm.config.utils:replace", _LOADING),
    # 2. layers and configurations
    Hook(f"{_LINEAR}:UnquantizedLinearMethod.process_weights_after_loading", _PLAIN, ("layer",)),
    Hook(f"{_EMBEDDING}:UnquantizedEmbeddingMethod.process_weights_after_loading", _PLAIN),
    Hook("vllm.model_executor.layers.utils:cpu_unquantized_gemm", _PLAIN, mentions="cpu_linear"),
    Hook(f"{_LINEAR}:LinearBase", _PLAIN, mentions="self.quant_method"),
    Hook("vllm.model_executor.layers.attention:MLAAttention", _LAYOUT),
    Hook("vllm.model_executor.layers.quantization.base_config:QuantizeMethodBase", _LAYOUT),
    Hook("vllm.model_executor.layers.quantization.kv_cache:BaseKVCacheMethod", _LAYOUT),
    Hook("vllm.config:VllmConfig.model_config", _LAYOUT),
    Hook("vllm.config:VllmConfig.parallel_config", _LAYOUT),
    Hook("vllm.config:VllmConfig.offload_config", _LAYOUT),
    Hook("vllm.config:VllmConfig.speculative_config", _LAYOUT),
    Hook("vllm.config:VllmConfig.quant_config", _LAYOUT),
    Hook("vllm.config:ModelConfig.quantization", _LAYOUT),
    Hook("vllm.config:ModelConfig.use_mla", _LAYOUT),
    Hook("vllm.config:ModelConfig.get_num_experts", _LAYOUT),
    Hook("vllm.config:ModelConfig.enable_sleep_mode", _LAYOUT),
    Hook("vllm.config:ModelConfig.enable_cumem_allocator", _LAYOUT),
    Hook("vllm.config:ParallelConfig.tensor_parallel_size", _LAYOUT),
    Hook("vllm.config:ParallelConfig.pipeline_parallel_size", _LAYOUT),
    Hook("vllm.config:ParallelConfig.data_parallel_size", _LAYOUT),
    Hook("vllm.config:ParallelConfig.prefill_context_parallel_size", _LAYOUT),
    Hook("vllm.config:ParallelConfig.enable_expert_parallel", _LAYOUT),
    Hook("vllm.config:OffloadConfig.uva", _LAYOUT),
    Hook("vllm.config:OffloadConfig.prefetch", _LAYOUT),
    Hook("vllm.config:UVAOffloadConfig.cpu_offload_gb", _LAYOUT),
    Hook("vllm.config:PrefetchOffloadConfig.offload_group_size", _LAYOUT),
    Hook("vllm.config:SpeculativeConfig.method", _LAYOUT),
    # 3. platform
    Hook("vllm.platforms:current_platform.is_cpu", "what differs without a GPU"),
    Hook("vllm.platforms:current_platform.is_cuda", "what differs on a GPU"),
    Hook("vllm.platforms:current_platform.device_name", "errors that name the device"),
    Hook("vllm.platforms:current_platform.is_sleep_mode_available", "POST /bridge/sleep"),
    Hook("vllm.platforms:current_platform.get_device_capability", "LoRA on Blackwell"),
    Hook(
        "vllm.platforms.cuda:NvmlCudaPlatform.get_device_capability",
        "knowing the GPU without initialising CUDA",
        mentions="pynvml",
        device="cuda",
    ),
    # 4. server
    Hook(
        "vllm.entrypoints.launchers.cli_args:make_arg_parser or "
        "vllm.entrypoints.openai.cli_args:make_arg_parser",
        _ROUTES,
    ),
    Hook(
        "vllm.entrypoints.launchers.cli_args:validate_parsed_serve_args or "
        "vllm.entrypoints.openai.cli_args:validate_parsed_serve_args",
        _ROUTES,
    ),
    Hook("vllm.utils.argparse_utils:FlexibleArgumentParser", _ROUTES),
    Hook("vllm.entrypoints.serve.utils.api_utils:cli_env_setup", _ROUTES),
    Hook(
        "vllm.entrypoints.launchers.app:build_app or vllm.entrypoints.openai.api_server:build_app",
        _ROUTES,
        ("args", "supported_tasks", "model_config"),
    ),
    Hook(
        "vllm.entrypoints.launchers.api_server.app_state:init_app_state or "
        "vllm.entrypoints.openai.api_server:init_app_state",
        _ROUTES,
        ("engine_client", "state", "args", "supported_tasks"),
    ),
    Hook("vllm.v1.engine.core", "an engine host that has imported everything"),
    Hook("vllm.v1.executor.uniproc_executor", "an engine host that has imported everything"),
    Hook("vllm.v1.worker.gpu_worker", "an engine host that has imported everything"),
    Hook("vllm.v1.worker.cpu_worker", "an engine host that has imported everything", device="cpu"),
    # 5. engine
    Hook("vllm.usage.usage_lib:UsageContext.OPENAI_API_SERVER", _ENGINE),
    Hook(f"{_ENGINE_ARGS}:AsyncEngineArgs.from_cli_args", _ENGINE),
    Hook(f"{_ENGINE_ARGS}:AsyncEngineArgs.create_engine_config", _ENGINE, ("usage_context",)),
    Hook(f"{_ENGINE_ARGS}:AsyncEngineArgs.enable_log_requests", _ENGINE),
    Hook(f"{_ENGINE_ARGS}:AsyncEngineArgs.disable_log_stats", _ENGINE),
    Hook(
        f"{_ASYNC_LLM}.from_vllm_config",
        _ENGINE,
        ("vllm_config", "usage_context", "enable_log_requests", "disable_log_stats"),
    ),
    Hook(f"{_ASYNC_LLM}.shutdown", "ending the engine's processes"),
    Hook(f"{_ASYNC_LLM}.__init__", _ENGINE, mentions="self.vllm_config"),
    Hook(f"{_ASYNC_LLM}.__init__", _ENGINE, mentions="self.model_config"),
    Hook(f"{_ASYNC_LLM}.get_supported_tasks", _ROUTES),
    Hook(f"{_ASYNC_LLM}.get_tokenizer", _REQUESTS),
    Hook(f"{_ASYNC_LLM}.errored", "ending a server whose engine has ended"),
    Hook(
        f"{_ASYNC_LLM}.generate",
        _REQUESTS,
        ("prompt", "sampling_params", "request_id", "lora_request"),
    ),
    Hook(f"{_ASYNC_LLM}.pause_generation", _BRIDGE, ("mode", "clear_cache")),
    Hook(f"{_ASYNC_LLM}.resume_generation", _BRIDGE),
    Hook(f"{_ASYNC_LLM}.reset_prefix_cache", "POST /bridge/notify_update"),
    Hook(f"{_ASYNC_LLM}.update_weight_version", "versions per token", since=(0, 32)),
    Hook(f"{_ASYNC_LLM}.sleep", "POST /bridge/sleep"),
    Hook(f"{_ASYNC_LLM}.wake_up", "POST /bridge/wake_up"),
    Hook(f"{_ASYNC_LLM}.collective_rpc", "handing the weights to trainers", ("method", "kwargs")),
    Hook("vllm.v1.worker.gpu_worker:Worker.get_model", "handing the weights to trainers"),
    Hook("vllm.config:ParallelConfig.worker_extension_cls", "handing the weights to trainers"),
    Hook("vllm.config:CacheConfig.block_size", "GET /bridge/info"),
    Hook("vllm.config:DeviceConfig.device_type", "GET /bridge/info"),
    # 6. requests
    Hook("vllm.sampling_params:SamplingParams.logprob_token_ids", _REQUESTS),
    Hook("vllm.sampling_params:SamplingParams.skip_reading_prefix_cache", _REQUESTS),
    Hook("vllm.sampling_params:SamplingParams.structured_outputs", _REQUESTS),
    Hook("vllm.sampling_params:StructuredOutputsParams.grammar", _REQUESTS),
    Hook("vllm.sampling_params:RequestOutputKind.DELTA", _REQUESTS),
    Hook("vllm.sampling_params:RequestOutputKind.FINAL_ONLY", _REQUESTS),
    Hook("vllm.inputs:TokensPrompt", _REQUESTS),
    Hook("vllm.outputs:CompletionOutput.weight_versions", "versions per token", since=(0, 32)),
    Hook("vllm.tokenizers.protocol:TokenizerLike.max_chars_per_token", _REQUESTS),
    # 7. admission
    Hook(f"{_PROCESSORS}:LogitsProcessor.validate_params", "refusals", ("sampling_params",)),
    Hook(f"{_PROCESSORS}:validate_logits_processors_parameters", "refusals on every route"),
    # 8. errors
    Hook("vllm.exceptions:VLLMClientError", "400 for what the engine refuses", since=(0, 32)),
    Hook("vllm.v1.engine.exceptions:EngineDeadError", "ending a server whose engine has ended"),
    Hook("vllm.v1.engine.exceptions:EngineGenerateError", _REQUESTS),
    Hook(
        "vllm.entrypoints.serve.exception_handling.handlers.vllm_error or "
        "vllm.entrypoints.serve.utils.server_utils",
        "ending a server whose engine has ended",
        mentions="app.state.server",
    ),
    # 9. switches
    Hook("vllm.envs:VLLM_ENABLE_V1_MULTIPROCESSING", "one process on CPU"),
    Hook("vllm.envs:VLLM_WORKER_MULTIPROC_METHOD", "engines that are forked"),
    Hook("vllm.envs:VLLM_LORA_DISABLE_PDL", "LoRA on Blackwell"),
    # 10. adapters
    Hook("vllm.lora.request:LoRARequest", _ADAPTERS, ("lora_name", "lora_int_id", "lora_path")),
    Hook(f"{_ASYNC_LLM}.add_lora", _ADAPTERS, ("lora_request",)),
    Hook(f"{_ASYNC_LLM}.remove_lora", _ADAPTERS, ("lora_id",)),
    Hook(
        "vllm.entrypoints.openai.models.serving:OpenAIServingModels.__init__",
        _ADAPTERS,
        mentions="self.lora_requests",
    ),
    # 11. counters
    Hook("vllm.v1.metrics.loggers", "GET /status", mentions='"vllm:generation_tokens"'),
]
