"""The only package that imports vLLM; it hides differences between vLLM's versions.

If a new version of vLLM breaks the server, the fix belongs here: in `launch` (options, engine,
application), `layers` (model loading, weight layout), `requests` (types) or `cpu` (adapters and
attention on a CPU). We use:

1. model loading: `register_model_loader`, `DefaultModelLoader` (methods `load_weights`,
   `get_all_weights`, `load_model`), `LoadConfig`
2. layers: `UnquantizedLinearMethod`, `UnquantizedEmbeddingMethod`, the attributes `quant_method`
   and `cpu_linear`; the attributes of layers and configurations that `layout_facts` reads. On CUDA
   the two methods do not move the weights (`process_weights_after_loading` does nothing), and no
   CUDA graph holds them as constants
3. platform: `current_platform` with `is_cpu()`, `is_cuda()`, `device_name`,
   `is_sleep_mode_available()`, and `get_device_capability()`, which does not initialise CUDA
4. server: `make_arg_parser`, `validate_parsed_serve_args`, `AsyncEngineArgs`, `AsyncLLM`,
   `build_app`, `init_app_state`, `cli_env_setup`, and the modules that `preload` imports
5. engine (the client that `open_engine` yields): `generate`, `add_lora`, `remove_lora`,
   `pause_generation`, `resume_generation`, `update_weight_version` (0.32), `reset_prefix_cache`,
   `sleep`, `wake_up`, `collective_rpc`, `errored`, `get_tokenizer`; the worker's `get_model`; from
   0.32 on the parts of `pause_generation` (`renderer.clear_mm_cache_async`,
   `engine_core.pause_scheduler_async`) and `output_processor.request_states`. A pause waits for the
   device in 0.32, but not in 0.24. A worker may answer only with None, bool,
   int, float, str, bytes, list and dict: any other type ends the thread that sends all answers
6. requests: `SamplingParams`, `StructuredOutputsParams`, `RequestOutputKind`, `TokensPrompt`, the
   outputs' `weight_versions`, the tokenizer's `max_chars_per_token`
7. admission: a `LogitsProcessor`'s `validate_params`, called for every request on every route
8. errors: `VLLMClientError` (the request is wrong; `ValueError` in 0.24), `EngineDeadError`,
   `EngineGenerateError`; the error handlers of vLLM's own routes read `app.state.server`
9. switches: `VLLM_ENABLE_V1_MULTIPROCESSING`, `VLLM_WORKER_MULTIPROC_METHOD`,
   `VLLM_LORA_DISABLE_PDL`
10. adapters: `LoRARequest`; the mapping `lora_requests` of `app.state.openai_serving_models`, in
    which every route looks a model name up before it uses the base model
11. the cached properties of model classes: `VLLM_CACHE_ROOT`/modelinfos
12. counters: `vllm:generation_tokens_total` in prometheus_client's registry;
    `cache_config.block_size`
13. adapters on a CPU: the entry points `vllm.platform_plugins`, `cpu_platform_plugin`,
    `CpuPlatform.get_punica_wrapper`, `PunicaWrapperCPU` with `update_metadata`,
    `token_lora_indices`, `add_lora_linear` and `add_lora_logits`, `direct_register_custom_op`
14. refusals before a start: `get_model_architecture`, `supports_lora`, `ModelConfig.is_moe` and
    `get_head_size`, `CPUAttentionBackend.get_supported_head_sizes`

Written for 0.24 (CUDA, from its source) and 0.32 (CPU, tested).
`tests/inference/test_vllm_internals.py` checks that each of these still exists.
"""
