"""Everything of vLLM that this package touches, in one place.

vLLM moves between minor versions; when one breaks us, the repair belongs here. Touched:

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

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
from collections.abc import AsyncIterator, MutableMapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm import envs
from vllm.config.load import LoadConfig
from vllm.config.utils import replace as replace_config
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.sample.logits_processor import LogitsProcessor

from grpo_core.wire import PolicyVersion
from grpo_vllm.weights.layout_checks import LayoutFacts

try:
    from vllm.exceptions import VLLMClientError as EngineRefusal
except ImportError:  # vLLM 0.24
    EngineRefusal = ValueError

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

__all__ = [
    "DefaultModelLoader",
    "EngineControl",
    "EngineDeadError",
    "EngineGenerateError",
    "EngineRefusal",
    "LoRARequest",
    "LoadConfig",
    "LogitsProcessor",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TokensPrompt",
    "UnquantizedEmbeddingMethod",
    "UnquantizedLinearMethod",
    "build_openai_app",
    "check_requests_with",
    "current_platform",
    "device_type",
    "generation_tokens",
    "kv_block_size",
    "layout_facts",
    "let_handlers_stop",
    "longest_token_chars",
    "open_engine",
    "parse_engine_arguments",
    "preload",
    "refuse_parallel_engines",
    "register_model_loader",
    "replace_config",
    "resolve_adapters_with",
    "stamped_versions",
    "stamps_versions",
    "switch_lora_pdl_off",
    "why_no_sleep",
]

START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
ONE_PROCESS = ("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
"""On CPU one engine process also is the worker: half a gigabyte less."""
LORA_WITHOUT_PDL = ("VLLM_LORA_DISABLE_PDL", "1")
SM100_MAJOR = 10
"""Compute capability 10.x: B200, B300."""
PARALLEL_SIZES = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "prefill_context_parallel_size",
)
DRAFTS_WITHOUT_WEIGHTS = frozenset({"ngram", "ngram_gpu", "suffix"})


def parse_engine_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """vLLM's own parsing of its own flags; a wrong one ends the process with status 2."""
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.launchers import cli_args
    except ImportError:  # vLLM before 0.30
        from vllm.entrypoints.openai import cli_args

    if current_platform.is_cpu():
        os.environ.setdefault(*ONE_PROCESS)
    cli_env_setup()
    parser = cli_args.make_arg_parser(FlexibleArgumentParser(prog="vllm-api-server"))
    parsed: argparse.Namespace = parser.parse_args(list(arguments))
    cli_args.validate_parsed_serve_args(parsed)
    return parsed


def check_requests_with(processor: str, arguments: argparse.Namespace) -> None:
    """Have the engine ask `processor` ("module:class") about every request's sampling parameters.

    Not with speculative decoding, which vLLM does not combine with logits processors.
    """
    if arguments.speculative_config is None:
        arguments.logits_processors = [*(arguments.logits_processors or []), processor]


def preload() -> str | None:
    """Import what vLLM's processes import, so that a fork of this one need not; why it cannot be
    forked, None where it can."""
    from vllm.v1.engine import async_llm, core  # noqa: F401
    from vllm.v1.executor import uniproc_executor  # noqa: F401

    _server()
    _restore_model_infos()
    if current_platform.is_cpu():
        from vllm.v1.worker import cpu_worker  # noqa: F401
    elif current_platform.is_cuda():
        from vllm.v1.worker import gpu_worker  # noqa: F401
    initialised: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return "importing vLLM has initialised CUDA" if initialised else None


def _restore_model_infos() -> None:
    """Into vLLM's cache, where an image has them (`containers/model_infos.py`)."""
    ours, vllms = Path(sys.prefix, "share", "vllm-modelinfos"), Path(envs.VLLM_CACHE_ROOT)
    if ours.exists():
        shutil.copytree(ours, vllms / "modelinfos", dirs_exist_ok=True)


@contextlib.asynccontextmanager
async def open_engine(arguments: argparse.Namespace) -> AsyncIterator[Any]:
    """Start the engine's processes; leaving the context ends them."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    usage = UsageContext.OPENAI_API_SERVER
    given = AsyncEngineArgs.from_cli_args(arguments)
    config = given.create_engine_config(usage_context=usage)
    if current_platform.is_cpu():
        # Making the configuration has set "spawn", which would import all of vLLM again.
        os.environ[START_METHOD] = "fork"
    engine = AsyncLLM.from_vllm_config(
        config,
        usage_context=usage,
        enable_log_requests=given.enable_log_requests,
        disable_log_stats=given.disable_log_stats,
    )
    try:
        yield engine
    finally:
        engine.shutdown()


async def build_openai_app(engine: Any, arguments: argparse.Namespace) -> FastAPI:
    """vLLM's application with all of its routes, bound to `engine`."""
    server = _server()
    tasks = await engine.get_supported_tasks()
    app: FastAPI = server.build_app(arguments, tasks, engine.model_config)
    await server.init_app_state(engine, app.state, arguments, tasks)
    return app


def let_handlers_stop(app: FastAPI, server: uvicorn.Server) -> None:
    """vLLM's handler of engine errors ends the server when the engine is dead."""
    app.state.server = server


class EngineControl:
    """Pauses, names and resumes vLLM's engine client (a `write_lease.PausableEngine`).

    Args:
        shares_weights: the worker has the methods of `grpo_vllm.engine.worker_extension`
    """

    def __init__(self, engine: Any, shares_weights: bool = False) -> None:
        self._engine = engine
        self._shares_weights = shares_weights

    async def pause(self) -> None:
        await self._engine.pause_generation(mode="keep", clear_cache=True)
        if self._shares_weights:
            # The scheduler is at rest, and kernels that read the weights may still be queued.
            await self._engine.collective_rpc("wait_for_device")

    async def resume(self) -> None:
        await self._engine.resume_generation()

    async def name_weights(self, version: PolicyVersion) -> None:
        """Have the engine stamp what it samples, where it can (vLLM 0.32)."""
        if stamps_versions(self._engine):
            await self._engine.update_weight_version(str(version))

    async def reset_prefix_cache(self) -> bool:
        return bool(await self._engine.reset_prefix_cache())

    async def sleep(self) -> None:
        await self._engine.sleep()

    async def wake_up(self) -> None:
        await self._engine.wake_up()


def device_type(engine: Any) -> str:
    """ "cpu", "cuda"."""
    name: str = engine.vllm_config.device_config.device_type
    return name


def why_no_sleep(engine: Any) -> str | None:
    """What stands against `sleep`; None where vLLM offers it."""
    if not current_platform.is_sleep_mode_available():
        return f"vLLM has no sleep mode on {current_platform.device_name}"
    if not engine.vllm_config.model_config.enable_sleep_mode:
        return "start the server with --enable-sleep-mode"
    return None


def resolve_adapters_with(app: FastAPI, adapters: MutableMapping[Any, Any]) -> None:
    """Have every route of vLLM ask `adapters` (model name → LoRARequest) for the model it names."""
    app.state.openai_serving_models.lora_requests = adapters


def kv_block_size(engine: Any) -> int:
    """Tokens whose keys and values are cached and reused together."""
    size: int = engine.vllm_config.cache_config.block_size
    return size


def generation_tokens() -> int:
    """Tokens sampled since this process started."""
    from prometheus_client import REGISTRY

    samples = (s for metric in REGISTRY.collect() for s in metric.samples)
    return int(sum(s.value for s in samples if s.name == "vllm:generation_tokens_total"))


def longest_token_chars(tokenizer: Any) -> int:
    """Characters of the longest token."""
    length: int = tokenizer.max_chars_per_token
    return length


def stamps_versions(engine: Any) -> bool:
    """True where finished outputs say which weights sampled which tokens."""
    return hasattr(engine, "update_weight_version")


def stamped_versions(output: Any) -> list[PolicyVersion]:
    """The versions on a finished completion, in the order of its tokens; [] without any."""
    spans = getattr(output, "weight_versions", None) or ()
    return [PolicyVersion.parse(span.version) for span in spans]


def switch_lora_pdl_off() -> bool:
    """On SM100 Triton cannot compile vLLM's LoRA kernels with programmatic dependent launch: have
    vLLM leave it out there, unless the environment says otherwise. True where that was done.

    Call it before the engine's processes start: they inherit the environment, and read it once.
    """
    name, off = LORA_WITHOUT_PDL
    if name in os.environ or not current_platform.is_cuda():
        return False
    capability = current_platform.get_device_capability()
    if capability is None or capability.major != SM100_MAJOR:
        return False
    os.environ[name] = off
    return True


def layout_facts(vllm_config: Any, model: nn.Module | None = None) -> LayoutFacts:
    """What was configured; with the model, what became of its layers too."""
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
        draft=None if speculative is None else _draft_with_weights(speculative.method),
        special_layers={} if model is None else _special_layers(model),
    )


def _draft_with_weights(method: str) -> str | None:
    return None if method in DRAFTS_WITHOUT_WEIGHTS else method


def _special_layers(model: nn.Module) -> dict[str, str]:
    """Layers that may keep their weights in another form than the checkpoint's: name → what serves
    them."""
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


def refuse_parallel_engines(arguments: argparse.Namespace) -> None:
    """Weights are shared with one worker: others would go on serving what is on disk.

    Raises:
        SystemExit: status 2, naming the flags.
    """
    several = [
        f"--{n.replace('_', '-')} {getattr(arguments, n)}"
        for n in PARALLEL_SIZES
        if (getattr(arguments, n, None) or 1) > 1
    ]
    if several:
        raise SystemExit(
            f"vllm-api-server: --share-weights works with one worker; drop {', '.join(several)}"
        )


def _server() -> Any:
    """vLLM's server parts under one roof. Workers never need them, so they load on demand."""
    try:
        from vllm.entrypoints.launchers.api_server import app_state
        from vllm.entrypoints.launchers.app import build_app
    except ImportError:  # vLLM before 0.30
        from vllm.entrypoints.openai import api_server

        return api_server
    return SimpleNamespace(
        build_app=build_app,
        init_app_state=app_state.init_app_state,
    )
