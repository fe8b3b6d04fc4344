"""Our options as vLLM's."""

from __future__ import annotations

import argparse

import structlog

from grpo_core.security.bearer_token import plain
from grpo_core.weights.ref import WeightRef
from grpo_vllm.engine.plugin import LOAD_FORMAT, WORKER_EXTENSION
from grpo_vllm.engine.sampling_params_check import PROCESSOR
from grpo_vllm.engine.vllm_compat.launch import (
    check_requests_with,
    parse_engine_arguments,
    refuse_parallel_engines,
    switch_lora_pdl_off,
)
from grpo_vllm.engine.vllm_compat.layers import current_platform
from grpo_vllm.settings import ServerSettings
from grpo_vllm.weights.lora import BASE_SUFFIX

log = structlog.get_logger()

LOGPROBS_MODE = "processed_logprobs"
"""Log-probabilities of the distribution sampled from: the ratio's denominator needs those."""


def parsed_engine_arguments(settings: ServerSettings, weights: WeightRef) -> argparse.Namespace:
    """A wrong flag ends the process with status 2, in vLLM's own words."""
    arguments = parse_engine_arguments(engine_arguments(settings, weights))
    refuse_what_is_ours(arguments, settings.share_weights)
    key = plain(settings.api_key)
    arguments.api_key = None if key is None else [key]
    # What serves a checkpoint of this run answers under the name that it was configured with.
    names = arguments.served_model_name or [settings.model]
    arguments.served_model_name = list(names)
    if settings.enable_lora:
        arguments.served_model_name.append(names[0] + BASE_SUFFIX)
    if settings.share_weights:
        refuse_parallel_engines(arguments)
    if arguments.enable_lora and current_platform.is_cuda():
        refuse_float32_adapters(arguments.dtype)
    # Here, not in the plugin: this process alone knows the options, and the engine's processes
    # inherit its environment before they read it.
    if arguments.enable_lora and switch_lora_pdl_off():
        log.info("LoRA kernels run without programmatic dependent launch on this GPU")
    if current_platform.is_cpu():
        check_requests_with(PROCESSOR, arguments)
    return arguments


def refuse_what_is_ours(arguments: argparse.Namespace, share_weights: bool) -> None:
    """What reached vLLM in a shortened flag or in a file of --config, which our parser does not
    look into.

    Raises:
        SystemExit: status 2, naming the flags.
    """
    taken = {
        "--api-key (write it out, once, or set VLLM_API_KEY)": arguments.api_key is not None,
        "--logprobs-mode": arguments.logprobs_mode != LOGPROBS_MODE,
        "--worker-extension-cls": share_weights
        and arguments.worker_extension_cls != WORKER_EXTENSION,
        "--load-format": share_weights and arguments.load_format != LOAD_FORMAT,
        f"{arguments.model_tag} (a word that belongs to no flag)": arguments.model_tag is not None,
    }
    found = [flag for flag, is_taken in taken.items() if is_taken]
    if found:
        raise SystemExit(f"vllm-api-server: {', '.join(found)}: not to be passed on to vLLM")


def refuse_float32_adapters(dtype: str) -> None:
    """vLLM's LoRA kernels on a GPU assert a 16-bit type, in the middle of a request.

    Raises:
        SystemExit: status 2, saying what to pass.
    """
    if dtype in ("float32", "float"):
        raise SystemExit(
            f"vllm-api-server: --enable-lora with --dtype {dtype}: on a GPU vLLM computes adapters "
            "in 16-bit types alone; pass --dtype bfloat16"
        )


def engine_arguments(settings: ServerSettings, weights: WeightRef) -> list[str]:
    """Ours, then the user's own, which win where both name one."""
    ours = [
        *("--model", str(weights.checkpoint or settings.model)),
        *("--tokenizer", settings.model),
        *("--host", settings.host),
        *("--port", str(settings.port)),
        *("--logprobs-mode", LOGPROBS_MODE),
        # Else the model's own defaults for top_p and the like would apply to /v1 requests unseen.
        *("--generation-config", "vllm"),
    ]
    if settings.share_weights:
        ours += ["--load-format", LOAD_FORMAT, "--worker-extension-cls", WORKER_EXTENSION]
    if settings.enable_lora:
        ours += ["--enable-lora", "--max-lora-rank", str(settings.max_lora_rank)]
        ours += ["--max-loras", str(settings.max_loras)]
    return [*ours, *settings.engine_arguments]
