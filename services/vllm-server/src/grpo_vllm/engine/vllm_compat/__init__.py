"""Everything of vLLM that this package touches; no other module imports vLLM.

vLLM moves between minor versions; when one breaks us, the repair belongs here: in `launch`
(options, engine, application), `layers` (model loading, weight layout) or `requests` (types).
Touched:

1. model loading: `register_model_loader`, `DefaultModelLoader` (methods `load_weights`,
   `get_all_weights`, `load_model`), `LoadConfig`
2. layers: `UnquantizedLinearMethod`, `UnquantizedEmbeddingMethod`, the attributes `quant_method`
   and `cpu_linear`; what `layout_facts` reads of layers and configurations. On CUDA the two methods
   leave weights where they were allocated (`process_weights_after_loading` does nothing), and no
   graph has them as constants
3. platform: `current_platform` with `is_cpu()`, `is_cuda()`, `device_name`,
   `is_sleep_mode_available()`, and `get_device_capability()`, which asks NVML and leaves CUDA alone
4. server: `make_arg_parser`, `validate_parsed_serve_args`, `AsyncEngineArgs`, `AsyncLLM`,
   `build_app`, `init_app_state`, `cli_env_setup`; what `preload` imports
5. engine (the client that `open_engine` yields): `generate`, `add_lora`, `remove_lora`,
   `pause_generation`, `resume_generation`, `update_weight_version` (0.32), `reset_prefix_cache`,
   `sleep`, `wake_up`, `collective_rpc`, `errored`, `get_tokenizer`; the worker's `get_model`. Only
   in 0.32 does a pause wait for the device. What a worker answers must be made of None, bool, int,
   float, str, bytes, list and dict: anything else ends the thread that sends all answers
6. requests: `SamplingParams`, `StructuredOutputsParams`, `RequestOutputKind`, `TokensPrompt`, the
   outputs' `weight_versions`, the tokenizer's `max_chars_per_token`
7. admission: a `LogitsProcessor`'s `validate_params`, called for every request on every route
8. errors: `VLLMClientError` (the request is wrong; `ValueError` in 0.24), `EngineDeadError`,
   `EngineGenerateError`; the handlers for its own routes read `app.state.server`
9. switches: `VLLM_ENABLE_V1_MULTIPROCESSING`, `VLLM_WORKER_MULTIPROC_METHOD`,
   `VLLM_LORA_DISABLE_PDL`
10. adapters: `LoRARequest`; the mapping `lora_requests` of `app.state.openai_serving_models`, which
    every route asks before it takes a name for the base model's
11. the cache of what model classes can do: `VLLM_CACHE_ROOT`/modelinfos
12. counters: `vllm:generation_tokens_total` in prometheus_client's registry;
    `cache_config.block_size`

Written for 0.24 (CUDA, from its source) and 0.32 (CPU, tested). `tests/inference/
test_vllm_internals.py` checks that each is still there.
"""
