"""Starts vLLM: parses its options, preloads its modules, opens the engine, builds its routes."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable, MutableMapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import structlog
import torch
from vllm import envs
from vllm.platforms import current_platform as current_platform

from grpo_core import cpu
from grpo_core.errors import GrpoError, ModelNotFound
from grpo_core.weights.model_files import require_whole_model
from grpo_vllm.engine.vllm_compat.layers import LOAD_FORMAT
from grpo_vllm.engine.vllm_compat.platform_plugin import CPU_ADAPTERS

if TYPE_CHECKING:
    from fastapi import FastAPI

log = structlog.get_logger()

FORK = ("VLLM_WORKER_MULTIPROC_METHOD", "fork")
"""How vLLM starts its processes. It takes "spawn" all the same if CUDA is initialised."""
ONE_PROCESS = ("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
"""On CPU the engine also does the worker's job in the same process. This saves half a gigabyte."""
LORA_WITHOUT_PDL = ("VLLM_LORA_DISABLE_PDL", "1")
FLOAT32_PRODUCTS = ("TRITON_F32_DEFAULT", "ieee")
"""Without it, Triton's kernels, attention among them, multiply float32 in TF32 (10 bits)."""
_SMALL_BLOCKS = "grpo_vllm.engine.vllm_compat.cpu.SmallBlocks"
STAGED_UPDATE = "grpo_staged"
"""Backend of vLLM's weight transfer that loads a directory of weights into the running engine."""
_STAGED_MODULE = "grpo_vllm.engine.vllm_compat.staged_update"
_TOKENIZER_MODULE = "grpo_vllm.engine.vllm_compat.requests"
_HF_TOKENIZERS = "hf"
_FAILED = "Engine core initialization failed"
"""What vLLM raises, whatever the cause, which the process of the engine has written."""
READ_FORMATS = ("auto", LOAD_FORMAT)
"""Values of --load-format that read the model's own files."""
LEAST_KV_CACHE = 512 * 2**20
PARALLEL_SIZES = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "prefill_context_parallel_size",
)
SM100_MAJOR = 10
"""Major compute capability of B200 and B300."""


def parse_engine_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse vLLM's options with vLLM's parser. A wrong option ends the process with status 2."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_args, cli_env_setup = _command_line()
    if current_platform.is_cpu():
        os.environ.setdefault(*ONE_PROCESS)
    os.environ.setdefault(*FORK)
    cli_env_setup()  # would set "spawn", which imports all of vLLM again in each process
    parser = cli_args.make_arg_parser(FlexibleArgumentParser(prog="vllm-api-server"))
    parsed: argparse.Namespace = parser.parse_args(list(arguments))
    cli_args.validate_parsed_serve_args(parsed)
    return parsed


def preload() -> str | None:
    """Import everything that vLLM's processes import, so that forks of this process start fast.
    Returns the reason why it cannot be forked, None if it can."""
    from vllm.v1.engine import async_llm, core  # noqa: F401
    from vllm.v1.executor import uniproc_executor  # noqa: F401

    _server()
    # Model properties that `containers/model_infos.py` wrote into a container image.
    ours, vllms = Path(sys.prefix, "share", "vllm-modelinfos"), Path(envs.VLLM_CACHE_ROOT)
    if ours.exists():
        shutil.copytree(ours, vllms / "modelinfos", dirs_exist_ok=True)
    if current_platform.is_cpu():
        from vllm.v1.worker import cpu_worker  # noqa: F401

        # On an H100, vLLM's import starts two threads, and forks of the process serve nevertheless.
        threads = len(list(Path("/proc/self/task").iterdir())) - 1
        return f"importing vLLM started {threads} threads" if threads else None
    if current_platform.is_cuda():
        from vllm.v1.worker import gpu_worker  # noqa: F401
    initialised: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return "importing vLLM initialised CUDA" if initialised else None


def offer_small_blocks() -> None:
    """On a CPU, register the backend with vLLM. Each of vLLM's processes needs this."""
    if current_platform.is_cpu():
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        register_backend(AttentionBackendEnum.CPU_ATTN, _SMALL_BLOCKS)


def offer_staged_update() -> None:
    """Register the backend that loads weights from a directory. Each of vLLM's processes needs
    this. Its module is imported when an engine uses it."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    with contextlib.suppress(ValueError):  # a second call finds the backend registered
        WeightTransferEngineFactory.register_engine(STAGED_UPDATE, _STAGED_MODULE, "StagedUpdate")


def use_file_tokenizer() -> None:
    """Load tokenizers as the environments and the trainer load them. Each of vLLM's processes needs
    this."""
    from vllm.tokenizers.registry import TokenizerRegistry

    TokenizerRegistry.tokenizers[_HF_TOKENIZERS] = (_TOKENIZER_MODULE, "FileTokenizer")


WHY_NO_UPDATE = "vLLM 0.24 cannot load weights into a running engine on a CPU; 0.25 and newer can"


def can_update_weights() -> bool:
    """Whether a running engine can load weights: not on a CPU with vLLM 0.24, whose worker then
    waits for an accelerator."""
    from vllm.distributed.weight_transfer.base import WeightTransferEngine

    return not current_platform.is_cpu() or hasattr(WeightTransferEngine, "update_weights")


def adapt_to_cpu(arguments: argparse.Namespace) -> None:
    """Change vLLM's parsed options: check the sampling parameters of every request, and take small
    blocks of the KV cache, and a type that this CPU computes fast, as defaults."""
    from grpo_vllm.engine.vllm_compat.cpu import smallest_block
    from grpo_vllm.engine.vllm_compat.requests import PROCESSOR

    if arguments.speculative_config is None:  # otherwise vLLM supports no logits processors
        arguments.logits_processors = [*(arguments.logits_processors or []), PROCESSOR]
    if arguments.block_size is None:
        arguments.block_size = smallest_block()
    # vLLM would take bfloat16, also on a CPU without instructions for it.
    if arguments.dtype == "auto" and cpu.CPU.is_slow_in_bfloat16:
        arguments.dtype = "float32"
        log.info("dtype.chosen", dtype="float32", reason=cpu.SLOW)


class EngineNotStarted(GrpoError):
    """vLLM did not start: too little memory, or a model or an option that it cannot serve."""


@contextlib.asynccontextmanager
async def open_engine(arguments: argparse.Namespace) -> AsyncIterator[Any]:
    """Start vLLM's processes; leaving the context ends them."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    usage = UsageContext.OPENAI_API_SERVER
    given = AsyncEngineArgs.from_cli_args(arguments)
    try:
        config = given.create_engine_config(usage_context=usage)
    except OSError as error:  # of transformers: no such model on the hub, or no network
        raise ModelNotFound(
            f"--model {given.model}: {' '.join(str(error).split())} Name a directory or download it"
        ) from error
    refuse_partial_model(config)
    if config.lora_config is not None:
        refuse_adapters(config.model_config)
        warn_of_stock_adapters()
    if current_platform.is_cpu():
        refuse_head_size(config.model_config)
        size_kv_cache(config)
        os.environ.update([FORK])  # create_engine_config set "spawn"
    try:
        engine = AsyncLLM.from_vllm_config(
            config,
            usage_context=usage,
            enable_log_requests=given.enable_log_requests,
            disable_log_stats=given.disable_log_stats,
        )
    except RuntimeError as error:
        if _FAILED not in str(error):
            raise
        raise EngineNotStarted(
            "vLLM's engine ended while it started; the traceback above this line names the cause"
        ) from error
    try:
        yield engine
    finally:
        # On a CPU the engine holds nothing that it must return: without the grace for its teardown,
        # it ends a second sooner.
        engine.shutdown(timeout=0.0 if current_platform.is_cpu() else None)


async def build_openai_app(engine: Any, arguments: argparse.Namespace) -> FastAPI:
    """vLLM's application with all of its routes, bound to `engine`."""
    server = _server()
    tasks = await engine.get_supported_tasks()
    app: FastAPI = server.build_app(arguments, tasks, engine.model_config)
    await server.init_app_state(engine, app.state, arguments, tasks)
    return app


def device_type(engine: Any) -> str:
    """For example "cpu" or "cuda"."""
    name: str = engine.vllm_config.device_config.device_type
    return name


def why_no_sleep(engine: Any) -> str | None:
    """The reason why the engine cannot sleep; None if it can."""
    if not current_platform.is_sleep_mode_available():
        return f"vLLM has no sleep mode on {current_platform.device_name}"
    if not engine.vllm_config.model_config.enable_sleep_mode:
        return "the server was started without --enable-sleep-mode"
    return None


def resolve_adapters_with(app: FastAPI, adapters: MutableMapping[Any, Any]) -> None:
    """Let vLLM's routes look model names up in `adapters` (model name → LoRARequest)."""
    app.state.openai_serving_models.lora_requests = adapters


def generation_tokens() -> int:
    """Tokens sampled since this process started."""
    from prometheus_client import REGISTRY

    samples = (s for metric in REGISTRY.collect() for s in metric.samples)
    return int(sum(s.value for s in samples if s.name == "vllm:generation_tokens_total"))


def switch_lora_pdl_off() -> bool:
    """Disable programmatic dependent launch (PDL) for LoRA on SM100, where Triton cannot compile
    it. An existing environment variable wins. True if PDL was disabled here.

    Call this before vLLM's processes start: they inherit the environment and read it once.
    """
    name, off = LORA_WITHOUT_PDL
    if name in os.environ or not current_platform.is_cuda():
        return False
    capability = current_platform.get_device_capability()
    if capability is None or capability.major != SM100_MAJOR:
        return False
    os.environ[name] = off
    return True


def multiply_float32_exactly() -> None:
    """Let Triton's kernels multiply float32 in float32. An existing environment variable wins. Call
    this before vLLM's processes start."""
    if current_platform.is_cuda():
        os.environ.setdefault(*FLOAT32_PRODUCTS)


def refuse_parallel_engines(arguments: argparse.Namespace) -> None:
    """Refuse --share-weights with several workers: a trainer writes into only one, and the others
    would continue to serve the checkpoint. The check cannot run in the workers, because vLLM hides
    data parallelism of dense models from them. Raises `SystemExit` with the names of the
    options."""
    several = [
        f"--{n.replace('_', '-')} {getattr(arguments, n)}"
        for n in PARALLEL_SIZES
        if (getattr(arguments, n, None) or 1) > 1
    ]
    if several:
        raise SystemExit(
            f"vllm-api-server: --share-weights supports one worker; remove {', '.join(several)}"
        )


def refuse_partial_model(config: Any) -> None:
    """Raises `UnusableWeights` where vLLM itself would serve random numbers: it exempts all layers
    that can be quantised from its check of missing tensors."""
    from transformers import AutoModelForCausalLM

    model = config.model_config
    is_plain = model.quantization is None and config.load_config.load_format in READ_FORMATS
    if is_plain and type(model.hf_config) in AutoModelForCausalLM._model_mapping:
        require_whole_model(model.model, AutoModelForCausalLM)


def refuse_adapters(model_config: Any) -> None:
    """Refuse --enable-lora for a model that vLLM cannot serve with an adapter. Raises `SystemExit`
    with the reason."""
    from vllm.model_executor.model_loader.utils import get_model_architecture
    from vllm.model_executor.models.interfaces import supports_lora

    model_class, name = get_model_architecture(model_config)
    problem = None
    if not supports_lora(model_class):
        problem = f"vLLM cannot serve a model of class {name} with an adapter"
    elif model_config.is_moe and current_platform.is_cpu():
        problem = "on a CPU, vLLM cannot serve a mixture of experts with an adapter"
    if problem is not None:
        raise SystemExit(
            f"vllm-api-server: --enable-lora: {problem}; choose another model, or a mode that "
            "trains all weights: none or, for a dense model, shared_vllm"
        )


def warn_of_stock_adapters() -> None:
    """Log if another platform than ours was chosen, so that vLLM's own class computes adapters on
    a CPU."""
    found = current_platform.get_punica_wrapper() if current_platform.is_cpu() else CPU_ADAPTERS
    if found != CPU_ADAPTERS:
        log.warning(
            "adapters.stock_class",
            found=found,
            reason="prompt logprobs may end the engine; see the page on lora_only",
            hint="unset VLLM_PLUGINS and VLLM_TARGET_DEVICE",
        )


def refuse_head_size(model_config: Any) -> None:
    """Refuse a model whose attention vLLM's CPU build cannot compute. vLLM starts with it, and ends
    at the first request. Raises `SystemExit` with the sizes that it computes."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    size, sizes = model_config.get_head_size(), CPUAttentionBackend.get_supported_head_sizes()
    has_other_attention = model_config.use_mla or model_config.is_attention_free
    if size not in sizes and not has_other_attention:
        raise SystemExit(
            f"vllm-api-server: the model's attention heads have size {size}, and vLLM's CPU build "
            f"computes only {', '.join(map(str, sizes))}; choose another model, or use a GPU"
        )


def size_kv_cache(config: Any) -> None:
    """Give the KV cache of a CPU room for the longest sequence, unless the user has chosen its size
    or the share of the memory: vLLM would take 92 % of the host's, or not start if less is free."""
    cache, model, parallel = config.cache_config, config.model_config, config.parallel_config
    has_share = cache.gpu_memory_utilization != type(cache).gpu_memory_utilization
    if has_share or cache.kv_cache_memory_bytes is not None:
        return
    width = model.get_num_layers(parallel) * model.get_num_kv_heads(parallel)
    width *= 2 * model.get_head_size() * model.dtype.itemsize
    blocks = math.ceil(model.max_model_len / cache.block_size) + 1  # one stays empty
    size = max(blocks * cache.block_size * width, LEAST_KV_CACHE)
    cache.kv_cache_memory_bytes = size
    log.info("kv_cache.chosen", megabytes=size // 10**6, option="--kv-cache-memory-bytes")


def _command_line() -> tuple[Any, Callable[[], None]]:
    """vLLM's module that makes its parser, and its function that prepares the environment."""
    try:
        from vllm.entrypoints.common import cli_args, startup
    except ImportError:  # vLLM before 0.33
        from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    else:
        return cli_args, startup.cli_env_setup
    try:
        from vllm.entrypoints.launchers import cli_args
    except ImportError:  # vLLM before 0.30
        from vllm.entrypoints.openai import cli_args
    return cli_args, cli_env_setup


def _server() -> Any:
    """vLLM's functions that build its server. Imported on demand, because workers need none."""
    try:
        from vllm.entrypoints.launchers.api_server import app_state
        from vllm.entrypoints.launchers.app import build_app
    except ImportError:  # vLLM before 0.30
        from vllm.entrypoints.openai import api_server

        return api_server
    return SimpleNamespace(build_app=build_app, init_app_state=app_state.init_app_state)
