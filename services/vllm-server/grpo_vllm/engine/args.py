"""Translates the server's settings into vLLM's command-line options."""

from __future__ import annotations

import argparse
import json

import structlog

from grpo_core.security import plain
from grpo_core.tree.server import ServerSettings
from grpo_core.weights.ref import WeightRef
from grpo_vllm.engine.vllm_compat.launch import (
    STAGED_UPDATE,
    WHY_NO_UPDATE,
    adapt_to_cpu,
    can_update_weights,
    current_platform,
    multiply_float32_exactly,
    parse_engine_arguments,
    refuse_parallel_engines,
    switch_lora_pdl_off,
)
from grpo_vllm.engine.vllm_compat.layers import LOAD_FORMAT
from grpo_vllm.weights.lora import BASE_SUFFIX

log = structlog.get_logger()

WORKER_EXTENSION = "grpo_vllm.weights.loader.WeightExport"
ADAPTER_EXTENSION = "grpo_vllm.engine.vllm_compat.requests.AdapterModules"
FLOAT32 = ("float32", "float")
LOGPROBS_MODE = "processed_logprobs"
"""Report logprobs after temperature and top-p are applied. The importance ratio divides by them."""


def parsed_engine_arguments(settings: ServerSettings, weights: WeightRef) -> argparse.Namespace:
    """vLLM's parsed options. A wrong option ends the process with status 2 and vLLM's message."""
    arguments = parse_engine_arguments(engine_arguments(settings, weights))
    refuse_reserved_options(arguments, settings.share_weights)
    refuse_ignored_options(arguments)
    key = plain(settings.api_key)
    arguments.api_key = None if key is None else [key]
    # The model's name stays the configured one, also if the engine serves a checkpoint of the run.
    names = arguments.served_model_name or [settings.model]
    arguments.served_model_name = list(names)
    if settings.enable_lora:
        arguments.served_model_name.append(names[0] + BASE_SUFFIX)
    if settings.follows and settings.loads_in_place and not can_update_weights():
        log.warning("engine.restarts", reason=WHY_NO_UPDATE, effect="at each publication")
    if settings.share_weights:
        refuse_parallel_engines(arguments)
    if arguments.enable_lora and current_platform.is_cuda():
        refuse_float32_adapters(arguments.dtype)
    # Here, not in the plugin: only this process has the options. vLLM's other processes inherit
    # its environment.
    if arguments.enable_lora and switch_lora_pdl_off():
        log.info(
            "lora.pdl_disabled",
            reason="Triton cannot compile programmatic dependent launch (PDL) on this GPU",
        )
    if arguments.dtype in FLOAT32:
        multiply_float32_exactly()
    if current_platform.is_cpu():
        adapt_to_cpu(arguments)
    return arguments


_NO_TLS = "the server speaks HTTP only; put a proxy that ends TLS before it"
IGNORED = {
    "ssl_keyfile": _NO_TLS,
    "ssl_certfile": _NO_TLS,
    "ssl_ca_certs": _NO_TLS,
    "uds": "the server listens on --host and --port",
    "api_server_count": "one process answers HTTP requests",
    "headless": "the server always answers HTTP requests",
    "lora_modules": "a trainer, or POST /lora/load, chooses the adapter",
}
"""vLLM's options without effect here, each with the reason."""
NEUTRAL = {"api_server_count": 1}
"""Values that mean what this server does anyway."""


def refuse_ignored_options(arguments: argparse.Namespace) -> None:
    """Refuse options that vLLM's own server would honour, and this one would not. Raises
    `SystemExit` with the names of the options."""
    found = [
        f"--{name.replace('_', '-')} ({why})"
        for name, why in IGNORED.items()
        if getattr(arguments, name, None) not in (None, False, NEUTRAL.get(name))
    ]
    if found:
        raise SystemExit(
            "vllm-api-server: these options of vLLM have no effect here; remove them: "
            + "; ".join(found)
        )


def refuse_reserved_options(arguments: argparse.Namespace, share_weights: bool) -> None:
    """Refuse options that the server sets itself. They can still reach vLLM abbreviated, or in
    vLLM's own configuration file, which our parser does not read. Raises `SystemExit` with the
    names of the options."""
    extension = WORKER_EXTENSION if share_weights else ADAPTER_EXTENSION
    taken = {
        "--api-key (give it once, unabbreviated, or set VLLM_API_KEY)": arguments.api_key
        is not None,
        "--logprobs-mode": arguments.logprobs_mode != LOGPROBS_MODE,
        "--worker-extension-cls": (share_weights or arguments.enable_lora)
        and arguments.worker_extension_cls != extension,
        "--load-format": share_weights and arguments.load_format != LOAD_FORMAT,
        f"{arguments.model_tag} (a word without an option)": arguments.model_tag is not None,
    }
    found = [flag for flag, is_taken in taken.items() if is_taken]
    if found:
        raise SystemExit(
            "vllm-api-server: the server sets these options of vLLM itself; remove them: "
            + ", ".join(found)
        )


def refuse_float32_adapters(dtype: str) -> None:
    """Refuse float32 at the start: vLLM's LoRA kernels on a GPU would fail at the first request.
    Raises `SystemExit` with the option to pass."""
    if dtype in FLOAT32:
        raise SystemExit(
            f"vllm-api-server: --enable-lora with --dtype {dtype}: on a GPU vLLM supports adapters "
            "in 16-bit types only; pass --dtype bfloat16"
        )


def engine_arguments(settings: ServerSettings, weights: WeightRef) -> list[str]:
    """Our options, then the user's, which win if both set the same one."""
    ours = [
        *("--model", str(weights.checkpoint or settings.model)),
        *("--tokenizer", settings.model),
        *("--host", settings.host),
        *("--port", str(settings.port)),
        *("--logprobs-mode", LOGPROBS_MODE),
        # Otherwise the model's own defaults, for example of top_p, would apply to /v1 requests.
        *("--generation-config", "vllm"),
    ]
    if settings.share_weights:
        ours += ["--load-format", LOAD_FORMAT, "--worker-extension-cls", WORKER_EXTENSION]
    if settings.enable_lora:
        ours += ["--enable-lora", "--max-lora-rank", str(settings.max_lora_rank)]
        ours += ["--max-loras", str(settings.max_loras)]
        ours += ["--worker-extension-cls", ADAPTER_EXTENSION]
    if not settings.share_weights and can_update_weights():
        ours += ["--weight-transfer-config", json.dumps({"backend": STAGED_UPDATE})]
    return [*ours, *settings.engine_arguments]
